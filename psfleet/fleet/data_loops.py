"""The loops of a script over its data: who gets which batch, and how far this worker is.

The place in the loops is remembered with whatever else the script wants remembered: in snapshots, where
those are taken, and with every push that counts. A script that runs again, because its worker has died
or because the fleet goes on from a snapshot, passes over what lies before that place; there all that is
remembered gets back its state.
"""

import contextlib
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

from psfleet.core.base.json_documents import reading
from psfleet.core.base.logs import log_of
from psfleet.core.engine.worker_state import (
    PLACE,
    LoopPosition,
    ScriptProgress,
    WorkerState,
    read_states,
)
from psfleet.core.graph.execution.executor import check_trained
from psfleet.core.runtime.process_runtime import current
from psfleet.core.runtime.script_runtime import Cluster, ScriptRuntime
from psfleet.data.read_ahead import BufferedPeekable, Peekable, RepeatablePeekable, SizedPeekable

_log = log_of(__name__)

T = TypeVar("T")
R = TypeVar("R")


class DataLoops:
    """Data loops of one process.

    Args:
        index, workers: Number of this worker, and of all workers.
        meet: Waits until every worker is here.
        end_step: Called at the end of each step; True: the loop ends there.
        is_stopped: Tells whether loops end before they begin.
        runtime: Gives the runtime of the cluster; None: there is none.
        snapshots: Snapshots are taken, or one is gone on from: server 0 is to ask for the place.
        restarts: Workers that die may be started again.
    """

    def __init__(
        self,
        index: int,
        workers: int,
        meet: Callable[[], object],
        end_step: Callable[[], bool] = bool,
        is_stopped: Callable[[], bool] = bool,
        *,
        runtime: Callable[[], ScriptRuntime] | None = None,
        snapshots: bool = False,
        restarts: bool = False,
    ) -> None:
        self._index = index
        self._workers = workers
        self._meet = meet
        self._end_step = end_step
        self._is_stopped = is_stopped
        self._runtime = runtime
        self._snapshots = snapshots
        self._restarts = restarts
        self._alone = ScriptProgress()
        self._place = LoopPosition()
        self._worker_state = WorkerState()
        self._worker_state.add(PLACE, self._place)
        self._restored: dict[str, Any] = {}
        self._aim = LoopPosition()  # where the script was when it ran before
        self._there = False  # whether it is there again
        self._asked = self._keeps = False
        self._said: set[str] = set()
        self._loops = 0  # begun
        self._is_open = False  # one of them is under way
        self._collectives = (0, 0)  # collectives and changes of the mode before the present loop

    # -- what is remembered --------------------------------------------------------------------

    def remember(self, name: str, thing: R) -> R:
        self._ask(keeps=True)
        self._worker_state.add(name, thing, self._restored.get(name) if self._there else None)
        return thing

    def step_done(self) -> None:
        self._ask()
        if not self._is_open:
            self._end_step()
        # In a loop of the fleet a later incarnation goes on between two of its batches, and nowhere else.
        self._mark(-1 if self._is_open else self._loops)

    def _ask(self, keeps: bool = False) -> None:
        """Learn, once, where the script was when it ran before.

        Args:
            keeps: Snapshots are to hold what is remembered.
        """
        if (keeps or self._snapshots) and not self._keeps:
            self._keeps = True
            cluster = self._cluster
            text = b"" if cluster is None else cluster.keep(self._worker_state.state_at)
            with reading("what the worker kept in the snapshot"):
                kept_states = read_states(json.loads(text)) if text else {}
            self._restored = {**kept_states, **self._restored}
        if not self._asked:
            self._asked = True
            # What came with a push is newer than a snapshot.
            self._restored |= self._progress.states
            if PLACE in self._restored:
                self._aim.set_state_dict(self._restored[PLACE])
            self._look()
            self._mark(0)

    @property
    def _progress(self) -> ScriptProgress:
        """Progress of the script: its pushes so far."""
        cluster = self._cluster
        return self._alone if cluster is None else cluster.progress

    @property
    def _cluster(self) -> Cluster | None:
        """The worker's part of the cluster, or None without one."""
        return None if self._runtime is None else self._runtime().cluster

    def _collectives_so_far(self) -> tuple[int, int]:
        cluster = self._cluster
        return (0, 0) if cluster is None else cluster.collectives

    def _look(self, dealt: bool = False, extended: int = sys.maxsize) -> None:
        """Restore the remembered state when the script is back at its place; its pushes count again.

        Args:
            dealt: The fleet deals the data, so that every batch is new.
            extended: Loop in which the fleet has dealt a batch. If the script had this loop behind it, a
                resumed job has further epochs, which begin here.
        """
        reached = self._place.has_reached(self._aim) or extended < self._aim.loop
        if not self._there and reached:
            self._there = True
            self._worker_state.restore(self._restored)
            self._progress.arrive()
        if dealt and self._there:
            self._progress.catch_up()

    def _mark(self, loop: int, latest: bool = False) -> None:
        """The script is between two steps of a loop."""
        # What is remembered after steps whose gradients wait to be merged is ahead of the tables: a later
        # incarnation has to make these steps again.
        if not self._there or current().waiting_steps:
            return
        if self._is_open:
            self._note_collectives(self._place.loop, self._collectives_so_far())
        cluster = self._cluster
        state = self._worker_state.capture(0 if cluster is None else cluster.step)
        if loop >= 0:
            self._progress.mark(state, latest)

    def _note_collectives(self, loop: int, now: tuple[int, int]) -> None:
        """Those that the script has come to within the present loop."""
        if now != self._collectives:
            self._place.collectives[loop] = (
                now[0] - self._collectives[0],
                now[1] - self._collectives[1],
            )

    # -- loops ---------------------------------------------------------------------------------

    def stepping(self, batches: Peekable[T]) -> Peekable[T]:
        """The same batches, which the fleet deals; what is remembered is taken after each."""

        def taken() -> Iterator[T]:
            with self._loop() as loop:
                for batch in () if self._is_stopped() else self._timed(batches):
                    self._look(extended=loop)
                    yield batch
                    if self._end_step():
                        self._break(loop)
                        return
                    self._mark(loop, latest=True)
                # It was in this loop that the script was: its last push was one of a dealt batch.
                dealt = not self._there and self._aim.is_in(loop)
            self._look(dealt)
            self._mark(loop, latest=True)
            check_trained()

        return Peekable(taken(), batches.peek)

    def shard(self, batches: Iterable[T], repeatable: bool) -> Peekable[T]:
        if isinstance(batches, io.IOBase) and not batches.seekable():
            repeatable = False
        if not repeatable and self._restarts:
            self._say(
                "repeatable",
                f"fleet.shard cannot read {batches!r} again: if worker {self._index} starts again, "
                "it goes on with what comes then, and the batch that it had in hand is lost",
            )
        if _is_unseeded(batches) and (self._workers > 1 or self._restarts):
            self._say(
                "seed",
                f"fleet.shard reads {batches!r}, which shuffles in another order on every worker: some "
                "batches come twice and others never; call torch.manual_seed(0) before it, or give it a "
                "generator with the same seed everywhere",
            )

        def begin() -> Peekable[T]:
            own = BufferedPeekable(self._own(batches))

            def peek() -> T | None:
                entry = own.peek()
                return None if entry is None else entry[1]

            return Peekable(self._sharded(own, repeatable), peek)

        if isinstance(batches, Iterator):
            return begin()
        if not isinstance(batches, Sized):
            return RepeatablePeekable(begin)
        return SizedPeekable(begin, lambda: len(range(self._index, len(batches), self._workers)))

    def _say(self, about: str, text: str) -> None:
        """Print a line to standard error, once."""
        if about not in self._said:
            self._said.add(about)
            _log.warning(text)

    def _timed(self, items: Iterable[R]) -> Iterator[R]:
        """The same; the time until each is there counts as waiting for data."""
        cluster, own = self._cluster, iter(items)
        while True:
            began = time.perf_counter_ns()
            try:
                item = next(own)
            except StopIteration:
                return
            if cluster is not None:
                cluster.add_data_wait(time.perf_counter_ns() - began)
            yield item

    def _own(self, batches: Iterable[T]) -> Iterator[tuple[int, T]]:
        """This worker's batches with their numbers."""
        return ((n, batch) for n, batch in enumerate(batches) if n % self._workers == self._index)

    def _sharded(self, own: Iterable[tuple[int, T]], repeatable: bool) -> Iterator[T]:
        """The batches; the place in the data is noted after each, and the workers meet at the end."""
        with self._loop() as loop:
            start, stop = (0, None) if self._there else self._aim.behind(loop)
            if not repeatable:  # nothing that was read comes again
                own, start = () if start == sys.maxsize or stop is not None else own, 0
            for number, batch in () if self._is_stopped() else self._timed(own):
                if stop is not None and number >= stop:
                    break
                if number < start:
                    continue
                self._place.at(loop, number if repeatable else 0)
                self._look(dealt=not repeatable)
                yield batch
                if self._end_step():
                    self._break(loop)
                    return
                self._place.at(loop, number + 1 if repeatable else 0)
                self._mark(loop)
            if stop is not None:
                self._place.broken[loop] = stop
        self._look()
        if stop is None:
            self._mark(loop)
            self._meet()
        check_trained()

    def _break(self, loop: int, collectives: tuple[int, int] | None = None) -> None:
        """Note that a loop is left before its end, and the collectives so far."""
        if loop >= 0:
            self._place.broken[loop] = self._place.item + 1
            self._note_collectives(loop, collectives or self._collectives_so_far())

    @contextlib.contextmanager
    def _loop(self) -> Iterator[int]:
        """A loop; its number. One within another has none (-1): the place is that of the outer one."""
        self._ask()
        if self._is_open:
            yield -1
            return
        loop, self._loops, self._is_open = self._loops, self._loops + 1, True
        place, cluster = self._place, self._cluster
        self._collectives = self._collectives_so_far()
        place.enter(loop)
        if not self._there and PLACE in self._progress.states:
            # Those in the part that is passed over; who goes on from a snapshot meets anew.
            place.collectives[loop] = self._aim.collectives.get(loop, (0, 0))
            if cluster is not None:
                cluster.pass_collectives(*place.collectives[loop])
        self._look()
        self._mark(loop)
        try:
            yield loop
        except GeneratorExit:  # the script has left it before its end
            self._break(loop, (0, 0) if cluster is None else cluster.collectives)
            raise
        finally:
            self._is_open = False
            place.leave(loop)


def _is_unseeded(batches: Any) -> bool:
    """Return whether it is a torch DataLoader that shuffles with an unseeded generator.

    torch seeds those from the system with 64 bits; seeds that people choose fit into 32.
    """
    sampler, torch = getattr(batches, "sampler", None), sys.modules.get("torch")
    if torch is None or type(sampler).__name__ != "RandomSampler":
        return False
    generator = getattr(sampler, "generator", None) or torch.default_generator
    return bool(generator.initial_seed() >= 1 << 32)
