"""Writes this server's file of each snapshot, in a thread of its own while pushes continue.

The thread is started when the shard learns where to cut, and gets a frozen image of the shard at the cut. It
takes at most a fifth of a processor, so that training hardly notices. If a file cannot be written, the
snapshot is given up and the console says so once; the server continues.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from psfleet.checkpoint import Part, ShardFile, write_frozen
from psfleet.core.base import faults
from psfleet.core.base.errors import CheckpointError, PsfleetError
from psfleet.core.base.files import reason
from psfleet.core.base.logs import log_of
from psfleet.core.base.threads import ServiceThread
from psfleet.core.engine.shard.events import FrozenShard
from psfleet.core.net.server_state import ServerState

_LEAST = 0.0005  # seconds of the shortest pause, so that waiting threads get the interpreter
_log = log_of(__name__)
_SHARE = 0.2  # of one processor that a file takes
Told = Callable[[bytes | PsfleetError], None]
"""Callback that gets an outcome: this server's part of the manifest, empty bytes for a cut, or an error."""


class Throttle:
    """Limits the share of one processor that a thread uses, by pauses.

    A lower priority would not do: a thread that holds the interpreter or the lock of a table, and gets no
    processor, blocks every call of this process.

    Args:
        share: Fraction of its time in which the thread works, in (0, 1]. Otherwise the thread sleeps.
        worked: Returns the seconds of processor time that the thread has had.
        sleep: Sleeps for a number of seconds.
    """

    def __init__(
        self,
        share: float,
        worked: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rest = 1 / share - 1
        self._worked = worked
        self._sleep = sleep
        self._rested_at = worked()

    def rest(self) -> None:
        """Sleep in proportion to the work since the last call. Only the thread itself may call this."""
        self._sleep(max(_LEAST, (self._worked() - self._rested_at) * self._rest))
        self._rested_at = self._worked()


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

    Attributes:
        tell: Shows a line on the console: once when files cannot be written, and not again until one was.
        files: Maps the SHA-256 of each of the last two files to the number of its snapshot.
    """

    def __init__(self) -> None:
        self.tell: Callable[[str], None] = _log.warning
        self.files: dict[str, int] = {}
        self._has_failed = False
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
        reply(_unknown(number) if part is None else part.outcome or b"")

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

    def forget(self, number: int) -> None:
        """Drop a snapshot that is complete or was given up. Callbacks that still wait get an error."""
        with self._lock:
            part = self._parts.pop(number, None)
            if part is not None:
                part.cut.put(None)
        if part is not None:
            for reply in (*part.for_cut, *part.for_file):
                reply(_unknown(number))

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
        pace, began = Throttle(_SHARE), time.monotonic()

        def between() -> None:
            faults.reach("page")
            if not self._ending:
                pace.rest()

        faults.reach("cut")
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
        faults.reach("written")
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


def _unknown(number: int) -> CheckpointError:
    return CheckpointError(f"snapshot {number} was given up; take it again")
