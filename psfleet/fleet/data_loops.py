"""Loops of a script over its data (`fleet.dataset`, `fleet.shard`), and their continuation after a restart.

A script has no checkpoint of its own. After its worker died, or when a job resumes from a snapshot, the
script runs again from its first line. This module lets the second run continue where the first one stopped.

After each step it makes a record: the position in the loops (number of the loop, number of the batch,
collectives so far) and the states of all objects passed to `fleet.remember`. The record is stored in
snapshots and sent with every push, so the servers know the record of the last push that they have applied.
The second run

    1. skips batches, loops, pushes and collectives before the recorded position (`_aim`),
    2. restores all remembered objects when it reaches that position (`_look`),
    3. continues as if it had never stopped.

Loops are numbered in the order in which the script begins them, so a script must run the same loops each
time. A loop inside another one has no position of its own. Everything runs in the thread that trains.
psfleet/core/engine/worker_state.py holds the records.
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
    """Data loops of one process, and the position of its script in them.

    Args:
        meet: Function that waits for all workers.
        end_step: Function to call at the end of each step. It returns True to end the loop.
        is_stopped: Function that returns True if loops are to end before their first batch.
        runtime: Function that returns the runtime of the cluster, or None in a process without one.
        snapshots: True if snapshots are taken or the job resumes from one, so that positions must be kept.
        restarts: True if a worker that dies may be started again.
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
        self._aim = LoopPosition()  # position of the script when it ran before
        self._there = False  # True once the script has reached that position again
        self._asked = self._keeps = False
        self._said: set[str] = set()
        self._loops = 0  # number of loops that were begun
        self._is_open = False  # True while a loop is running
        self._collectives = (
            0,
            0,
        )  # collectives, and mode switches among them, before the present loop

    def remember(self, name: str, thing: R) -> R:
        self._ask(keeps=True)
        self._worker_state.add(name, thing, self._restored.get(name) if self._there else None)
        return thing

    def step_done(self) -> None:
        self._ask()
        if not self._is_open:
            self._end_step()
        # A restarted worker continues a loop of the fleet only between two batches, so inside such a loop the
        # position (-1) is not sent to the servers here.
        self._mark(-1 if self._is_open else self._loops)

    def _ask(self, keeps: bool = False) -> None:
        """Read the record of the script's earlier run from the servers, once.

        Args:
            keeps: True if snapshots must contain the states of remembered objects.
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
            # The record of the last applied push is newer than the record in a snapshot.
            self._restored |= self._progress.states
            if PLACE in self._restored:
                self._aim.set_state_dict(self._restored[PLACE])
            self._look()
            self._mark(0)

    @property
    def _progress(self) -> ScriptProgress:
        """Number of the script's pushes so far, and the record to send with the next push."""
        cluster = self._cluster
        return self._alone if cluster is None else cluster.progress

    @property
    def _cluster(self) -> Cluster | None:
        return None if self._runtime is None else self._runtime().cluster

    def _collectives_so_far(self) -> tuple[int, int]:
        cluster = self._cluster
        return (0, 0) if cluster is None else cluster.collectives

    def _look(self, dealt: bool = False, extended: int = sys.maxsize) -> None:
        """Restore the remembered objects if the script has reached the position of its earlier run.

        From then on the script's pushes are sent to the servers again.

        Args:
            dealt: True if no batch comes a second time, because the fleet assigns the batches or the source
                cannot be read again. Then no push is a repetition.
            extended: Number of a loop for which the fleet has just assigned a batch. If the earlier run had
                finished this loop, the resumed job trains for more epochs, and these begin here.
        """
        reached = self._place.has_reached(self._aim) or extended < self._aim.loop
        if not self._there and reached:
            self._there = True
            self._worker_state.restore(self._restored)
            self._progress.arrive()
        if dealt and self._there:
            self._progress.catch_up()

    def _mark(self, loop: int, latest: bool = False) -> None:
        """Record the position and the states between two steps, to be sent with the next push.

        Args:
            loop: Number of the loop. -1 records for snapshots only: a restarted worker does not continue
                here.
            latest: True to replace the last record even if no push was made since. The fleet needs this
                because it does not assign the same batch again.
        """
        # Gradients of merged steps that are not pushed yet are lost when the worker dies. The restarted
        # worker must repeat these steps, so no record is made.
        if not self._there or current().waiting_steps:
            return
        if self._is_open:
            self._note_collectives(self._place.loop, self._collectives_so_far())
        cluster = self._cluster
        state = self._worker_state.capture(0 if cluster is None else cluster.step)
        if loop >= 0:
            self._progress.mark(state, latest)

    def _note_collectives(self, loop: int, now: tuple[int, int]) -> None:
        """Store the numbers of collectives and mode switches in the present loop so far.

        Args:
            now: Numbers since the start of the script.
        """
        if now != self._collectives:
            self._place.collectives[loop] = (
                now[0] - self._collectives[0],
                now[1] - self._collectives[1],
            )

    def stepping(self, batches: Peekable[T]) -> Peekable[T]:
        """Iterate over batches that the fleet assigns, and record the position after each batch."""

        def taken() -> Iterator[T]:
            with self._loop() as loop:
                for batch in () if self._is_stopped() else self._timed(batches):
                    self._look(extended=loop)
                    yield batch
                    if self._end_step():
                        self._break(loop)
                        return
                    self._mark(loop, latest=True)
                # The earlier run stopped in this loop, and the fleet has no further batch for it. The earlier
                # run's last push belonged to a batch of this loop, so all pushes from here on are new.
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
            own_batches = (b for b in enumerate(batches) if b[0] % self._workers == self._index)
            numbered_batches = BufferedPeekable(own_batches)

            def peek() -> T | None:
                entry = numbered_batches.peek()
                return None if entry is None else entry[1]

            return Peekable(self._sharded(numbered_batches, repeatable), peek)

        if isinstance(batches, Iterator):
            return begin()
        if not isinstance(batches, Sized):
            return RepeatablePeekable(begin)
        return SizedPeekable(begin, lambda: len(range(self._index, len(batches), self._workers)))

    def _say(self, about: str, text: str) -> None:
        """Log a warning, once for each subject `about`."""
        if about not in self._said:
            self._said.add(about)
            _log.warning(text)

    def _timed(self, items: Iterable[R]) -> Iterator[R]:
        """Yield the items, and add the time until each is available to the worker's data-wait metric."""
        cluster, iterator = self._cluster, iter(items)
        while True:
            began = time.perf_counter_ns()
            try:
                item = next(iterator)
            except StopIteration:
                return
            if cluster is not None:
                cluster.add_data_wait(time.perf_counter_ns() - began)
            yield item

    def _sharded(self, numbered_batches: Iterable[tuple[int, T]], repeatable: bool) -> Iterator[T]:
        """Yield this worker's batches, and record the position after each. At the end wait for all
        workers."""
        with self._loop() as loop:
            start, stop = (0, None) if self._there else self._aim.behind(loop)
            # A source that cannot be read again has no old batches to skip. If the earlier run has finished
            # or left this loop, the whole source is skipped. Otherwise the loop continues with the next
            # batches.
            if not repeatable:
                numbered_batches, start = (
                    () if start == sys.maxsize or stop is not None else numbered_batches,
                    0,
                )
            for number, batch in () if self._is_stopped() else self._timed(numbered_batches):
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
        """Record that the script left a loop before its end, so that a later run leaves it after the same
        batch.
        """
        if loop >= 0:
            self._place.broken[loop] = self._place.item + 1
            self._note_collectives(loop, collectives or self._collectives_so_far())

    @contextlib.contextmanager
    def _loop(self) -> Iterator[int]:
        """Context of a loop: yield the loop's number, or -1 for a loop inside another one.

        An inner loop is part of a step of the outer loop, so only the outer loop's position is recorded.
        """
        self._ask()
        if self._is_open:
            yield -1
            return
        loop, self._loops, self._is_open = self._loops, self._loops + 1, True
        position, cluster = self._place, self._cluster
        self._collectives = self._collectives_so_far()
        position.enter(loop)
        if not self._there and PLACE in self._progress.states:
            # Only this worker was restarted. The other workers have finished the collectives of the skipped
            # batches and will not repeat them, so count these as done. After a resume from a snapshot, in
            # contrast, all workers run again and repeat their collectives together.
            position.collectives[loop] = self._aim.collectives.get(loop, (0, 0))
            if cluster is not None:
                cluster.pass_collectives(*position.collectives[loop])
        self._look()
        self._mark(loop)
        try:
            yield loop
        except GeneratorExit:  # the script has left the loop with break or an error
            self._break(loop, (0, 0) if cluster is None else cluster.collectives)
            raise
        finally:
            self._is_open = False
            position.leave(loop)


def _is_unseeded(batches: Any) -> bool:
    """Return whether the batches are a torch DataLoader that shuffles without a seed chosen by the script.

    If no seed was set, torch draws a random one with 64 bits. Seeds that people choose fit into 32 bits, so a
    larger seed means that none was set.
    """
    sampler, torch = getattr(batches, "sampler", None), sys.modules.get("torch")
    if torch is None or type(sampler).__name__ != "RandomSampler":
        return False
    generator = getattr(sampler, "generator", None) or torch.default_generator
    return bool(generator.initial_seed() >= 1 << 32)
