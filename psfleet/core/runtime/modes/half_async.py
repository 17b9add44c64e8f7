"""Half-async mode: pushes wait in a queue, and a thread sends several of them summed to one push.

This is what Paddle calls the asynchronous communicator. The thread takes up to `max_merge` waiting pushes,
sums their gradients, pushes the sum and waits for the servers. A slow fleet thus gets fewer and larger pushes
instead of delaying the worker, until `queue_size` pushes wait; then `push` blocks. A pull does not wait for
the queue; `flush` and every collective do.

The servers apply a sum as one update of the optimizer rule. Only steps with the same tables, shapes and
learning rates are summed; other steps are sent one after the other, in their order.

Two locks: `_changed` protects the queue and the error, `_using` the cluster's runtime, which only one thread
at a time may call. No thread holds both, so the trainer can pull while the sending thread waits for a reply.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import DeadlineExceeded, PsfleetError, UsageError, joined_refusals
from psfleet.core.base.threads import ServiceThread, deferred, wait_for
from psfleet.core.engine.gradient_checks import check_gradients
from psfleet.core.engine.runtime_interface import Gradient, PendingPush, Runtime
from psfleet.core.engine.shard.membership_view import Position
from psfleet.core.runtime.runtime_bases import ForwardingRuntime
from psfleet.core.runtime.script_runtime import ClusterLike
from psfleet.core.runtime.strategy import ConsistencySettings

Floats = NDArray[np.float32]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(eq=False)
class _QueuedPush:
    """Push of the script, from its start in the queue until the servers have acknowledged it."""

    gradients: list[Gradient]
    samples: int
    loss: float | None
    position: Position
    runtime: "HalfAsyncRuntime"
    is_over: bool = False
    error: PsfleetError | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the servers have acknowledged this push.

        Each call raises the push's error, if it has one.
        """
        self.runtime.await_push(self, timeout)


def _alone(method: F) -> F:
    """Return a method that calls the cluster's method while no other thread uses the cluster's runtime."""

    def call(runtime: "HalfAsyncRuntime", *args: Any, **keywords: Any) -> Any:
        with runtime.alone():
            return getattr(runtime._cluster, method.__name__)(*args, **keywords)

    return cast(F, call)


def _flushed(method: F) -> F:
    """Return a method that calls the cluster's method after the servers have applied all earlier pushes."""

    def call(runtime: "HalfAsyncRuntime", *args: Any, **keywords: Any) -> Any:
        runtime.flush()
        with runtime.alone():
            return getattr(runtime._cluster, method.__name__)(*args, **keywords)

    return cast(F, call)


class HalfAsyncRuntime(ForwardingRuntime):
    """Runtime of a cluster with a queue before its pushes.

    If a push fails, its `wait` and every later call raise the error, because no push may be skipped. If a
    server refuses a push (for example because a table is full), later pushes continue. The `wait` of that
    push raises the refusal; if it was not called, the next call of the runtime does.

    Args:
        settings: Number of pushes to merge, and number of pushes that may wait.
    """

    def __init__(self, fleet: ClusterLike, settings: ConsistencySettings) -> None:
        super().__init__(fleet)
        self._cluster = fleet
        self._settings = settings
        self._using = threading.RLock()  # held during each call of the cluster's runtime
        self._changed = threading.Condition()
        self._queue: deque[_QueuedPush] = deque()
        self._sending = 0  # steps that have left the queue and are not acknowledged
        # Error of a failed push, after which nothing is sent.
        self._error: PsfleetError | None = None
        # Refusals that were not raised yet, neither by `wait` nor by another call.
        self._refusals: list[UsageError] = []
        self._closing = False
        self._thread = ServiceThread(self._run, "merging")
        self._thread.start()

    create = _alone(Runtime.create)
    open = _alone(Runtime.open)
    pull = _alone(Runtime.pull)  # without the gradients that wait in the queue
    evictions = _alone(Runtime.evictions)
    stats = _alone(Runtime.stats)
    all_reduce = _flushed(Runtime.all_reduce)
    read_table = _flushed(Runtime.read_table)
    write_table = _flushed(Runtime.write_table)
    shrink = _flushed(Runtime.shrink)
    save = _flushed(Runtime.save)
    load = _flushed(Runtime.load)

    @deferred()
    def push(
        self, gradients: Sequence[Gradient], *, samples: int = 0, loss: float | None = None
    ) -> _QueuedPush:
        """Put a push into the queue. Waits while the queue is full."""
        # Checked here, so that this call reports a bad gradient; the sending thread would report it later.
        check_gradients(self._spec_of, gradients)
        step = _QueuedPush(
            [_owned(gradient) for gradient in gradients],
            samples,
            loss,
            self._cluster.position,
            self,
        )
        self._await(lambda: len(self._queue) < self._settings.queue_size or bool(self._refusals))
        with self._changed:
            self._queue.append(step)
            self._changed.notify_all()
        return step

    def await_push(self, step: _QueuedPush, timeout: float | None) -> None:
        """Wait until a push is acknowledged, and raise its error if it has failed or was refused."""
        self._wait_until(lambda: step.is_over, timeout)
        # Nothing is sent after a failed push, so a push that still waits then has failed too.
        error = step.error if step.is_over else self._error
        if error is not None:
            with self._changed:
                self._refusals = [refusal for refusal in self._refusals if refusal is not error]
            raise error

    def _await(self, until: Callable[[], bool], timeout: float | None = None) -> None:
        """Wait until a condition holds, and raise the error of a push that has failed or was refused.

        Raises:
            DeadlineExceeded: `until` did not hold within `timeout` seconds.
        """
        self._wait_until(until, timeout)
        with self._changed:
            self._check()

    @deferred()
    def _wait_until(self, until: Callable[[], bool], timeout: float | None) -> None:
        with self._changed:
            in_time = wait_for(self._changed, lambda: until() or self._error is not None, timeout)
            if not in_time:
                self._check()
                raise DeadlineExceeded(
                    f"{len(self._queue) + self._sending} gradients were not sent within "
                    f"{timeout:g} seconds"
                )

    @override
    def flush(self, timeout: float | None = None) -> None:
        self._await(lambda: not self._queue and not self._sending, timeout)
        with self.alone():
            self._fleet.flush(timeout)

    @override
    def barrier(self, timeout: float | None = None) -> None:
        self.flush(timeout)
        with self.alone():
            self._fleet.barrier(timeout)

    def _run(self) -> None:
        while (steps := self._next()) is not None:
            try:
                self._send(_merged(steps)).wait()
            except UsageError as error:
                self._ended(steps, error)
                continue
            except PsfleetError as error:
                self._ended(steps, error)
                return
            except Exception as error:
                self._ended(steps, PsfleetError(f"merged gradients were not sent: {error!r}"))
                return
            self._ended(steps, None)

    def _send(self, step: _QueuedPush) -> PendingPush:
        with self._using:
            return self._cluster.push(
                step.gradients, samples=step.samples, loss=step.loss, position=step.position
            )

    def _next(self) -> list[_QueuedPush] | None:
        """Return the pushes to send together next, or None when this runtime is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if self._closing:
                return None
            steps = [self._queue.popleft()]
            kind = _kind(steps[0])
            while (
                self._queue
                and len(steps) < self._settings.max_merge
                and kind is not None
                and _kind(self._queue[0]) == kind
            ):
                steps.append(self._queue.popleft())
            # Set under the same lock under which pushes leave the queue: `flush` must see each push in one of
            # the two.
            self._sending = len(steps)
            self._changed.notify_all()
            return steps

    def _ended(self, steps: Sequence[_QueuedPush], error: PsfleetError | None) -> None:
        with self._changed:
            self._sending = 0
            if isinstance(error, UsageError):
                self._refusals.append(error)
            else:
                self._error = error
            for step in steps:
                step.is_over, step.error = True, error
            self._changed.notify_all()

    def release(self) -> None:
        """End the sending thread and leave the cluster's runtime open.

        Call `flush` before: pushes that still wait are dropped.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    @override
    def close(self) -> None:
        try:
            self.flush()
        finally:
            self.release()
            self._fleet.close()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads from calling the cluster's runtime inside the block."""
        with self._changed:
            self._check()
        with self._using:
            yield

    def _check(self) -> None:
        """Raise the servers' refusals that were not raised yet, as one error.

        If there are none, raise the error of a failed push, if any.
        """
        if self._refusals:
            refusals, self._refusals = self._refusals, []
            raise joined_refusals(refusals)
        if self._error is not None:
            raise self._error


def _owned(gradient: Gradient) -> Gradient:
    """Return the gradient with copied arrays: the caller may change its arrays while the push waits."""
    ids = None if gradient.ids is None else np.array(gradient.ids)
    return replace(gradient, values=np.array(gradient.values, np.float32), ids=ids)


def _kind(step: _QueuedPush) -> tuple[Any, ...] | None:
    """Return a key that is equal for steps that may be summed, or None for a step that is sent alone."""
    kinds = []
    for gradient in step.gradients:
        if gradient.ids is not None and gradient.values.ndim < 2:
            return None  # elements of a dense table, which are few already
        shape = gradient.values.shape if gradient.ids is None else gradient.values.shape[1:]
        kinds.append(
            (gradient.table, gradient.learning_rate, gradient.precision, gradient.scale, shape)
        )
    return tuple(kinds)


def _merged(steps: Sequence[_QueuedPush]) -> _QueuedPush:
    """Return one push for all steps: dense gradients summed, rows concatenated.

    The cluster's runtime sums the rows of repeated ids, as it does for any push.
    """
    if len(steps) == 1:
        return steps[0]
    last = steps[-1]
    gradients = []
    for parts in zip(*(step.gradients for step in steps), strict=True):
        first = parts[0]
        if first.ids is None:
            values, ids = np.array(first.values), None
            for part in parts[1:]:
                values += part.values
        else:
            values = np.concatenate([part.values for part in parts])
            ids = np.concatenate([part.ids.reshape(-1) for part in parts if part.ids is not None])
        gradients.append(replace(first, values=values, ids=ids))
    return replace(last, gradients=gradients, samples=sum(step.samples for step in steps))
