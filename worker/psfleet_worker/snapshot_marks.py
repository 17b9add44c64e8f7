"""A worker's part in a snapshot: it marks the last push of its stream that belongs to the snapshot.

Training does not stop for a snapshot. Server 0 announces a snapshot in its reply to a call that waits for the
announcement, and in replies to heartbeats. The worker confirms the announcement. When all workers have
confirmed, each worker cuts its stream after the last push that it has begun, and sends this mark to all
servers. Later pushes carry the mark too. All this runs in threads beside the training thread. If a call
fails, the snapshot fails at server 0, but the training continues.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

from psfleet.core.base.errors import DeadlineExceeded, PsfleetError, ServerUnavailable
from psfleet.core.base.settings.kinds import place_or_url
from psfleet.core.base.threads import ServiceThread
from psfleet.core.engine.shard.events import MarkCut
from psfleet.core.net.v1 import snapshot_pb2
from psfleet.core.net.v1.membership_pb2 import HeartbeatReply
from psfleet_worker.connection.call import wait_all
from psfleet_worker.connection.connection import FleetConnection
from psfleet_worker.session.instructions import AwaitMarking, CutStream, Instruction, ReportState

_CALL_TIMEOUT = 10.0  # seconds for each call; server 0 gives up a snapshot whose calls take longer
_PAUSE = 0.05  # seconds between attempts to reach a server
_LISTENING = 300.0  # seconds of one call that waits for an announcement
_LATER = 1.0  # seconds until the next such call, if the last one brought no announcement
_COLLECTIVE = 0.1  # seconds within which a collective ends once all workers have called it

StateAt = Callable[[int, Callable[[], bool]], bytes]


class SnapshotMarks:
    """Takes part in snapshots for one worker process.

    Attributes:
        state_at: Function (number, is_stuck) that returns the worker's state after its push `number` as JSON,
            or b"" if the worker keeps no state. With a number below 0 it returns the states after the last
            pushes, a JSON list of [number, state]. It may wait until the script has ended its present step.
            It stops waiting once `is_stuck()` returns True, which means that the step cannot end.
        newest: Folder of the newest snapshot of the job, and this worker's last push in it (0 if unknown), or
            None before the first one is announced.
    """

    def __init__(self, fleet: FleetConnection) -> None:
        self.state_at: StateAt = lambda number, is_stuck: b""
        self.newest: tuple[str, int] | None = None
        self._fleet = fleet
        # For each snapshot that may become complete, the last push in it.
        self._lasts: dict[int, int] = {}
        self._keeps = False
        self._hearing = threading.Lock()  # held while a thread begins to take part in a snapshot
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._news = ServiceThread(self._listen, "snapshot news")
        # True if the script of any worker waits for the last announced snapshot.
        self._script_waits = False
        # Time from which on this script counts as stuck while `_script_waits`, or infinity.
        self._stuck_from = math.inf

    def start(self) -> None:
        """Start the thread that listens for announcements."""
        self._news.start()

    @contextlib.contextmanager
    def blocking(self, seconds: float = _COLLECTIVE) -> Iterator[None]:
        """Context in which the script waits for all workers, or for a snapshot.

        Args:
            seconds: Seconds after which the script counts as stuck (cannot end its step) if the script of
                some worker waits for a snapshot. No collective of all workers ends meanwhile.
        """
        self._stuck_from = time.monotonic() + seconds
        try:
            yield
        finally:
            self._stuck_from = math.inf

    def _is_stuck(self) -> bool:
        # While the script of one worker waits for a snapshot, no collective of all workers ends.
        return self._script_waits and time.monotonic() >= self._stuck_from

    def introduce(self, *, keeps: bool) -> bytes:
        """Report the endpoints of all servers to server 0, and whether this worker adds state to snapshots.

        Returns:
            State of this worker in the snapshot that the fleet was started from, or b"" if there is none.
        """
        request = snapshot_pb2.KeptRequest(
            worker=self._fleet.worker,
            incarnation=self._fleet.session.incarnation,
            servers=[client.endpoint for client in self._fleet.clients],
            keeps=keeps,
        )
        self._keeps = keeps
        patience = self._fleet.patience
        call = self._fleet.clients[0].start(
            "SnapshotCoordinator/Kept",
            request.SerializeToString(),
            outage=max(patience.start, patience.outage),
        )
        [reply] = wait_all([call])
        return snapshot_pb2.KeptReply.FromString(reply).state

    def take(self, path: str, *, delta: bool, base: bool) -> str:
        """Make server 0 save a snapshot of all tables, and return its path.

        The folder appears only once the snapshot is complete.

        Args:
            path: Folder of the snapshot, or "" for the folder in which the job keeps its snapshots.
            delta: True to save only changes since the last snapshot that deltas can build on.
            base: True if the next delta may build on this snapshot.
        """
        request = snapshot_pb2.TakeRequest(
            path=place_or_url(path) if path else "",
            kind="delta" if delta else "full",
            base=base,
            script_waits=True,
        )
        call = self._fleet.clients[0].start(
            "SnapshotCoordinator/Take",
            request.SerializeToString(),
            seconds=self._fleet.patience.wait,
        )
        with self.blocking(0):
            [reply] = wait_all([call])
        return snapshot_pb2.TakeReply.FromString(reply).path

    def say_goodbye(self) -> None:
        """Send the state at the end of this process, for snapshots under way or taken later."""
        if not self._keeps:
            return
        request = snapshot_pb2.KeepRequest(
            worker=self._fleet.worker,
            incarnation=self._fleet.session.incarnation,
            state=self.state_at(-1, bool),
        )
        # The script did not request the snapshot that may need this state, so it should not see an error.
        with contextlib.suppress(PsfleetError):
            self._call(0, "SnapshotCoordinator/Keep", request)

    def listen(self, reply: HeartbeatReply) -> None:
        """Handle the snapshots that a heartbeat's reply announces as begun or complete."""
        complete = reply.complete
        if complete.number:
            self.newest = complete.folder, self._lasts.get(complete.number, 0)
            for before in [number for number in tuple(self._lasts) if number < complete.number]:
                del self._lasts[before]
        self._hear(reply.snapshot.number)

    def _listen(self) -> None:
        """Wait for announcements of server 0, which arrive earlier this way than with the next heartbeat."""
        while not self._over.is_set():
            number, known = 0, self._fleet.stream.last_snapshot
            request = snapshot_pb2.ListenRequest(worker=self._fleet.worker, number=known)
            with contextlib.suppress(PsfleetError):  # server 0 is away, or starts again
                reply = self._fleet.clients[0].attempt(
                    "SnapshotCoordinator/Listen", request.SerializeToString(), _LISTENING
                )
                number = snapshot_pb2.ListenReply.FromString(reply).number
            self._hear(number)
            if number <= known:
                self._over.wait(_LATER)

    def _hear(self, number: int) -> None:
        with self._hearing:  # replies to heartbeats announce the same snapshot
            if self._over.is_set() or not self._fleet.stream.hears(number):
                return
            thread = ServiceThread(self._reply, "mark", (number,))
            self._threads = [*(t for t in self._threads if t.is_alive()), thread]
            thread.start()

    def close(self) -> None:
        """Stop the threads. Close the connection before, which ends their calls."""
        self._over.set()
        with self._hearing:
            threads = [*self._threads, self._news]
        for thread in threads:
            if thread.ident is not None:
                thread.join()

    def _reply(self, number: int) -> None:
        # If a call fails, the snapshot fails at server 0, which waits for this worker and reports the
        # failure.
        with contextlib.suppress(PsfleetError):
            self._fleet.run(self._fleet.stream.mark(number), self._perform)

    def _perform(self, instruction: Instruction, timeout: float | None) -> object:
        identity = {"worker": self._fleet.worker, "incarnation": self._fleet.session.incarnation}
        match instruction:
            case AwaitMarking(number):
                ready_request = snapshot_pb2.ReadyRequest(number=number, **identity)
                reply = self._call(0, "SnapshotCoordinator/Ready", ready_request)
                ready = snapshot_pb2.ReadyReply.FromString(reply)
                self._script_waits = ready.script_waits
                return ready.mark, ready.round
            case CutStream():
                for server in range(len(self._fleet.clients)):
                    self._call(server, "Snapshots/Mark", _mark_request(instruction.to(server)))
            case ReportState(number, last):
                self._lasts[number] = last
                state = self.state_at(last, self._is_stuck)
                request = snapshot_pb2.KeepRequest(
                    number=number, last=last, state=state, **identity
                )
                self._call(0, "SnapshotCoordinator/Keep", request)
        return None

    def _call(self, server: int, method: str, request: object) -> bytes:
        """Make a call in this thread, and repeat it while the server cannot be reached.

        The call does not wait for calls of the training thread.
        """
        message: bytes = request.SerializeToString()  # type: ignore[attr-defined]  # a message
        deadline = time.monotonic() + _CALL_TIMEOUT
        while True:
            remaining_seconds = deadline - time.monotonic()
            if remaining_seconds <= 0 or self._over.is_set():
                raise DeadlineExceeded(
                    f"{method} was not answered within {_CALL_TIMEOUT:g} seconds"
                )
            try:
                return self._fleet.clients[server].attempt(method, message, remaining_seconds)
            except ServerUnavailable:
                time.sleep(_PAUSE)


def _mark_request(mark: MarkCut) -> snapshot_pb2.MarkRequest:
    return snapshot_pb2.MarkRequest(
        number=mark.number,
        worker=mark.worker,
        incarnation=mark.incarnation,
        last=mark.last,
        addressed=mark.addressed,
    )
