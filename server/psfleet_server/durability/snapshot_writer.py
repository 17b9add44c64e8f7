"""Writes this server's file of each snapshot, in a thread of its own while pushes continue.

The thread is started when the shard learns where to cut, and gets a frozen image of the shard at the cut. It
works at full speed while nothing trains, and rests in favour of pushes and pulls otherwise (`SnapshotShare`).
If a file cannot be written, the snapshot is given up and the console says so once; the server continues.
"""

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from psfleet.checkpoint import Part, ShardFile, write_frozen
from psfleet.core.base import crash_points
from psfleet.core.base.errors import CheckpointError, PsfleetError
from psfleet.core.base.files import reason
from psfleet.core.base.logs import log_of
from psfleet.core.base.threads import ServiceThread
from psfleet.core.engine.shard.events import FrozenShard
from psfleet.core.net.server_state import ServerState

_SHORTEST_REST = (
    0.0005  # seconds of the shortest pause, so that waiting threads get the interpreter
)
# Seconds after which a rest asks for the share again. That may have become everything.
_LONGEST_REST = 0.1
_log = log_of(__name__)

# Seconds without a push or pull after which nothing trains. A script with longer steps leaves its servers
# idle between them.
_QUIET = 0.25
# Least share of one processor beside training that keeps all processors busy. W1 loses as many steps to a
# snapshot with a quarter as with a half, and more with a tenth: a push pays for rows that are not read yet.
_LEAST_SHARE = 0.25
# Largest share beside training, however many processors are idle: calls need the interpreter too.
_MOST_SHARE = 0.5
# Part of the idle processors' time that a file takes. Other servers of the machine may want the rest.
_OF_IDLE = 0.5
# Seconds over which idle time is measured. The kernel counts it in steps of 0.01.
_WINDOW = 0.1
# Age in seconds at which the least share has doubled. It is everything before twice this age, well within the
# ten minutes that server 0 waits for a file.
_PATIENT = 60.0
Told = Callable[[bytes | PsfleetError], None]
"""Callback that gets an outcome: this server's part of the manifest, empty bytes for a cut, or an error."""


class Throttle:
    """Limits the share of one processor that a thread uses, by pauses.

    A lower priority would not do: a thread that holds the interpreter or the lock of a table, and gets no
    processor, blocks every call of this process.

    Args:
        share: Returns the part of its time in which the thread works, in (0, 1]. It sleeps the rest.
        worked: Returns the seconds of processor time that the thread has had.
        sleep: Sleeps for a number of seconds.
    """

    def __init__(
        self,
        share: Callable[[], float],
        worked: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._share = share
        self._worked = worked
        self._sleep = sleep
        self._rested_at = worked()

    def rest(self) -> None:
        """Sleep in proportion to the work since the last rest. Only the thread itself may call this."""
        work, rested = self._worked() - self._rested_at, 0.0
        while (share := self._share()) < 1:
            left = max(_SHORTEST_REST, work * (1 / share - 1)) - rested
            if left <= 0:
                break
            self._sleep(min(left, _LONGEST_REST))
            rested += min(left, _LONGEST_REST)
        self._rested_at = self._worked()


class SnapshotShare:
    """Share of one processor that the thread of a snapshot may take now, by what training needs.

    - Everything, while no push or pull arrives: nothing trains, or all workers wait for the snapshot.
    - Otherwise a quarter, and half of the time in which processors of this machine are idle.
    - The quarter grows with the age of the snapshot, so that it ends however busy the machine is.

    Args:
        calls: Returns a number that rises with each push and pull of a worker.
        idle: Returns the seconds that all processors together have been idle.
        clock: Returns seconds that only rise.
    """

    def __init__(
        self, calls: Callable[[], int], idle: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._calls, self._idle, self._clock = calls, idle, clock
        self._seen_calls, self._called_at = calls(), -math.inf
        self._began = self._measured_at = clock()
        self._idle_then, self._idle_processors = idle(), 0.0

    def __call__(self) -> float:
        """Return the share, in (0, 1]."""
        now, calls = self._clock(), self._calls()
        if calls != self._seen_calls:
            self._seen_calls, self._called_at = calls, now
        if now - self._called_at > _QUIET:
            return 1.0
        if now - self._measured_at >= _WINDOW:
            idle = self._idle()
            self._idle_processors = max(idle - self._idle_then, 0) / (now - self._measured_at)
            self._measured_at, self._idle_then = now, idle
        least = _LEAST_SHARE * (1 + ((now - self._began) / _PATIENT) ** 2)
        spare = min(_LEAST_SHARE + _OF_IDLE * self._idle_processors, _MOST_SHARE)
        return min(max(least, spare), 1.0)


def idle_seconds() -> float:
    """Return the seconds that all processors of this machine together have been idle, or 0 if unknown."""
    try:
        with open("/proc/stat", "rb") as file:
            fields = file.readline().split()
        idle, waiting_for_disks = map(int, fields[4:6])
        return (idle + waiting_for_disks) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


@dataclass
class _PartInProgress:
    """State of one snapshot on this server.

    Attributes:
        folder: Folder for the file.
        cut: Queue that gets one item: the shard as it was at the cut (the last push in the snapshot), or
            None if the snapshot is given up before.
        awaits_cut: True once a thread waits for the cut.
        made: True once the cut is made.
        outcome: Outcome of writing the file, or None while the file is being written.
        for_cut: Callbacks to call when the cut is made.
        for_file: Callbacks to call when the file is written.
    """

    folder: str
    cut: "queue.SimpleQueue[tuple[FrozenShard, ServerState] | None]" = field(
        default_factory=queue.SimpleQueue
    )
    awaits_cut: bool = False
    made: bool = False
    outcome: bytes | PsfleetError | None = None
    for_cut: list[Told] = field(default_factory=list)
    for_file: list[Told] = field(default_factory=list)


class SnapshotWriter:
    """Writes the files of snapshots. Thread-safe; callbacks run in the thread that produces the outcome.

    Args:
        calls: Returns a number that rises with each push and pull of a worker.

    Attributes:
        tell: Shows a line on the console: once when files cannot be written, and not again until one was.
        files: Maps the SHA-256 of each of the last two files to the number of its snapshot.
    """

    def __init__(self, calls: Callable[[], int]) -> None:
        self._calls = calls
        self.tell: Callable[[str], None] = _log.warning
        self.files: dict[str, int] = {}
        self._has_failed = False
        # The last snapshot that the shard gave up, and why: server 0 may ask for it only later.
        self._failure: tuple[int, PsfleetError] | None = None
        self._parts: dict[int, _PartInProgress] = {}
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._ending = False

    def expect(self, number: int, folder: str) -> None:
        """Prepare for a snapshot whose files go to `folder`, and give up all earlier snapshots.

        Raises:
            CheckpointError: The server is ending.
        """
        with self._lock:
            if self._ending:
                raise CheckpointError("the server is ending")
            if number not in self._parts:
                self._parts[number] = _PartInProgress(folder)
            earlier = [n for n in self._parts if n < number]
        for n in earlier:
            self.forget(n)

    def start(self, number: int) -> None:
        """Start the thread that will write a snapshot's file, before the shard makes its cut.

        A thread that starts at the cut would delay pushes, which wait for the cut: on busy processors a new
        thread takes milliseconds to run. Other snapshots whose cut is not made are given up.
        """
        with self._lock:
            part = self._parts.get(number)
            begins = part is not None and not part.awaits_cut
            if part is not None:
                part.awaits_cut = True
            unmade = [n for n, p in self._parts.items() if n != number and not p.made]
        for n in unmade:
            self.forget(n)
        if begins:
            thread = ServiceThread(self._write, "snapshot", (part,))
            self._threads = [*(t for t in self._threads if t.is_alive()), thread]
            thread.start()

    def await_part(self, number: int, reply: Told, *, cut: bool) -> None:
        """Call `reply` when the cut of a snapshot is made (`cut` True) or its file is on the disk (False).

        The cut fixes the last push in the snapshot. If the event has happened already, or the snapshot is
        unknown, `reply` is called at once.
        """
        with self._lock:
            part = self._parts.get(number)
            if part is not None and not (part.made if cut else part.outcome is not None):
                (part.for_cut if cut else part.for_file).append(reply)
                return
        reply(self._given_up(number) if part is None else part.outcome or b"")

    def begin(self, frozen: FrozenShard, state: ServerState) -> None:
        """Pass the shard, as it was at the cut (the last push in the snapshot), to the thread that writes it.

        Returns at once.
        """
        with self._lock:
            part = self._parts.get(frozen.number)
            if part is not None:
                part.made = True
                part.cut.put((frozen, state))
        if part is None:
            frozen.close()

    def forget(self, number: int, failure: PsfleetError | None = None) -> None:
        """Drop a snapshot that is complete or was given up. Callbacks that still wait get an error.

        Args:
            number: Number of the snapshot.
            failure: Reason why the shard has given it up, or None.
        """
        with self._lock:
            if failure is not None:
                self._failure = number, failure
            part = self._parts.pop(number, None)
            if part is not None:
                part.cut.put(None)
        if part is not None:
            for reply in (*part.for_cut, *part.for_file):
                reply(self._given_up(number))

    def _given_up(self, number: int) -> PsfleetError:
        if self._failure is not None and self._failure[0] == number:
            return self._failure[1]
        return CheckpointError(f"snapshot {number} was given up; take it again")

    def end(self) -> None:
        """Accept no more snapshots, give up those without a cut yet, and write the others without pauses."""
        with self._lock:
            self._ending = True
            numbers = [n for n, part in self._parts.items() if not part.made]
        for number in numbers:
            self.forget(number)

    def stop(self) -> None:
        """Do the same as `end`, then wait until the files in progress are written."""
        self.end()
        for thread in self._threads:
            thread.join()

    def _write(self, part: _PartInProgress) -> None:
        if (cut := part.cut.get()) is None:
            return
        with self._lock:
            waiting, part.for_cut = part.for_cut, []
        for reply in waiting:
            reply(b"")
        self._write_file(part, *cut)

    def _write_file(self, part: _PartInProgress, frozen: FrozenShard, state: ServerState) -> None:
        outcome: bytes | PsfleetError
        pace = Throttle(SnapshotShare(self._calls, idle_seconds, time.monotonic))
        began = time.monotonic()

        def between() -> None:
            crash_points.reach("page")
            if not self._ending:
                pace.rest()

        crash_points.reach("cut")
        try:
            with contextlib.closing(frozen):
                file = write_frozen(part.folder, frozen, state, between)
            _log_written(frozen, file, time.monotonic() - began)
            outcome, self._has_failed = _described(frozen, file), False
            self.files = dict([*self.files.items()][-1:]) | {file.sha256: frozen.number}
        except Exception as error:
            outcome = CheckpointError(
                f"server {frozen.index} cannot write to {part.folder!r}: {error}"
            )
            if part in self._parts.values():  # else it was given up, and its folder is gone
                self._complain(f"a snapshot cannot be written to {part.folder!r}: {reason(error)}")
        crash_points.reach("written")
        with self._lock:
            part.outcome, waiting, part.for_file = outcome, part.for_file, []
        for reply in waiting:
            reply(outcome)

    def _complain(self, text: str) -> None:
        (_log.warning if self._has_failed else self.tell)(text)
        self._has_failed = True


def _log_written(frozen: FrozenShard, file: ShardFile, seconds: float) -> None:
    number = frozen.number
    fields = {"snapshot": number, "round": frozen.round, "bytes": file.bytes}
    _log.info(
        f"snapshot {number}: its part is written, {file.bytes:,} bytes in {seconds:.2f} s",
        extra={**fields, "seconds": round(seconds, 3)},
    )


def _described(frozen: FrozenShard, file: ShardFile) -> bytes:
    """Return this server's part of the manifest, encoded."""
    specs = tuple(table.spec for table in frozen.tables)
    return Part(file, specs, frozen.mode, frozen.round, dict(frozen.pushes)).encode()
