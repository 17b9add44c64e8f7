"""Schedule of the snapshots that server 0 takes by itself (`--snapshot-every`).

A thread compares the clock or the progress of training with the interval twenty times a second, and requests
a snapshot when one is due. A failed snapshot is tried again, and the console shows a line.
"""

import threading
import time
from collections.abc import Callable

from psfleet.core.base.errors import Later, NotReady, PsfleetError, ServerUnavailable
from psfleet.core.base.settings.kinds import SnapshotInterval
from psfleet.core.base.threads import ServiceThread
from psfleet_server.snapshots.snapshot_coordinator import SnapshotPostponed, SnapshotRequest
from psfleet_server.snapshots.snapshot_runner import SnapshotRunner

_LOOK = 0.05  # seconds between looks how far the training is
_PAUSE = 1.0  # after one that failed


class SnapshotSchedule:
    """Thread that requests a snapshot whenever one is due, and reports when snapshots fail.

    Args:
        runner: Takes the snapshots.
        every: Interval between snapshots.
        position: Returns the training's progress in rounds, or in pushes of the fastest worker.
        has_rounds: Returns whether the mode has rounds. If so, an interval of N rounds means after the rounds
            N, 2 N, 3 N, ... Otherwise a snapshot is due after N pushes of the fastest worker.
        clock: Returns a monotonic time in seconds.
        tell: Shows a line on the console when snapshots begin to fail, and when they work again.
    """

    def __init__(
        self,
        runner: SnapshotRunner,
        every: SnapshotInterval,
        position: Callable[[], int],
        has_rounds: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        *,
        tell: Callable[[str], None],
    ) -> None:
        self._runner = runner
        self._every = every
        self._position = position
        self._has_rounds = has_rounds
        self._clock = clock
        self._tell = tell
        self._time_done, self._rounds_done = clock(), position()  # at the last snapshot
        self._over = threading.Event()
        self._thread = ServiceThread(self._run, "snapshot schedule")

    def start(self) -> None:
        """Start the thread. The first interval begins now."""
        self._time_done, self._rounds_done = self._clock(), self._position()
        self._thread.start()

    @property
    def seconds(self) -> float:
        """Seconds between snapshots, or 0 if the interval is a number of rounds."""
        return self._every.seconds

    @property
    def waited(self) -> float:
        """Seconds since this schedule's last snapshot or its start. 0 if no push was made since."""
        stands_still = self._position() == self._rounds_done
        return 0.0 if stands_still else self._clock() - self._time_done

    def stop(self) -> None:
        """Stop the thread, once the snapshot that it waits for has ended."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        every, failures = self._every, 0
        while not self._over.wait(min(_LOOK, every.seconds or _LOOK)):
            rounds, exact = self._position(), bool(every.rounds) and self._has_rounds()
            if not exact and not self._is_due(rounds):
                continue
            try:
                self._runner.take(SnapshotRequest(every=every.rounds if exact else 0)).result()
            except (PsfleetError, OSError) as error:
                # There is no fault while rows move, while another snapshot goes first, or, with rounds, until
                # a restarted server is back. Such snapshots are tried again without a message.
                waits = isinstance(error, SnapshotPostponed | NotReady | Later) or (
                    exact and isinstance(error, ServerUnavailable)
                )
                if not waits and not self._over.is_set():
                    failures += 1
                    self._fails(error, failures)
                    self._over.wait(_PAUSE)
                continue
            if failures:
                self._tell(f"snapshots are taken again, after {failures} that failed")
            failures, self._time_done, self._rounds_done = 0, self._clock(), rounds

    def _fails(self, error: Exception, failures: int) -> None:
        """Report the 1st, 2nd, 4th, 8th ... failure in a row."""
        if failures.bit_count() == 1:
            often = f" {failures} times in a row" if failures > 1 else ""
            self._tell(f"a snapshot could not be taken{often}: {error}; it is tried again")

    def _is_due(self, rounds: int) -> bool:
        if every := self._every.rounds:
            return rounds // every > self._rounds_done // every
        return self.waited >= self.seconds
