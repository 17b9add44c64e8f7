"""What a server has for another number of servers: the product's parts, with the threads of a run."""

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psfleet.core.base.errors import PsfleetError
from psfleet.core.net.message_codec import decode
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.coordinator_messages import Outcome
from psfleet_server.coordinator.request_files import ScaleRequestFile, Scaling
from psfleet_server.durability.log_shipping import LogShipping
from psfleet_server.engine.row_moves import RowMoves
from psfleet_server.engine.server_messages import PrepareMoveRequest
from psfleet_server.engine.server_scaling import ServerScaling
from psfleet_server.services.scaling_service import _ScalingService
from tests.protocol.fleet.calls import AskServers, MoveRows, Request, Response
from tests.protocol.fleet.kept import Start
from tests.protocol.fleet.strands import Signal, Strand
from tests.protocol.scheduler import Received, Send, Tick

if TYPE_CHECKING:
    from tests.protocol.fleet.server import Server

_PATIENCE = 3  # ticks in which a call waits until it fails, and one more for every minute


class _Nothing:
    """What moves tell of themselves to parts of a process that are not in the run."""

    def forget(self, number: int) -> None:
        """A snapshot is given up."""

    def forget_layouts(self) -> None:
        """There are none."""


class _Host:
    """The ShardHost of a server in a run."""

    def __init__(self, server: "Server", folder: Path) -> None:
        self.lock = threading.Lock()
        self.shard, self.coordinator, self.boot = server.its_shard, server.coordinator, server.boot
        self.journal = None if server.kept is None else server.kept.journal
        self.parts = self.lanes = _Nothing()
        self.scale_file = ScaleRequestFile(folder if server.coordinator is not None else None)
        self._server = server

    @property
    def feed(self) -> LogShipping:
        return self._server.feed

    @feed.setter
    def feed(self, feed: LogShipping) -> None:
        self._server.feed = feed

    def meet(self, step: Callable[[Coordinator], Iterable[Outcome]]) -> None:
        assert self.coordinator is not None
        self._server.release(step(self.coordinator))


class Moved:
    """Moves of rows of one server, beside its shard.

    Attributes:
        endpoints: Of all servers, as server 0 knows them.
        ticks: That have passed.
    """

    def __init__(self, server: "Server", start: Start) -> None:
        self.endpoints: Sequence[str] = [f"S{one}" for one in range(server.job.servers)]
        self.ticks = 0
        self._out: list[Send] = []
        self._server = server
        self._number = server.boot << 20
        self._waited: set[int] = set()
        self._replies: dict[int, Any] = {}
        self._strands: list[Strand] = []
        host: Any = _Host(server, start.folder)
        network: Any = self
        self._start, self._file = start, host.scale_file
        keeps = {} if server.kept is None else {"open_log": server.kept.open}
        self._moves = RowMoves(host, network, generation=start.generation, **keeps)
        self.copy, self.release = self._moves.copy, self._moves.release
        self._service = _ScalingService(host, self._moves)
        if server.coordinator is not None:
            self._scaling = ServerScaling(
                host, network, start.folder, lambda: self.endpoints, self._moved
            )
            self._scaling._wanted = Signal(self, 1)  # type: ignore[assignment]
            self._scaling._over = Signal(self, 1)  # type: ignore[assignment]
            self.spawn(self._scaling._run)

    def recover(self, scaling: Scaling) -> None:
        """The process is server 0 from now on."""
        self._scaling.recover(scaling, self.endpoints, self._start.generation)

    def _moved(self, endpoints: Sequence[str]) -> None:
        self.endpoints = endpoints

    def handle(self, event: Any) -> None:
        """Take what has happened to the server, after the server has."""
        match event:
            case Tick():
                self.ticks += 1
            case Received(source, Request(number, MoveRows(method, body))):
                self.spawn(lambda: self._serve((source, number), method, body))
            case Received(source, Request(number, AskServers(servers))):
                self._file.ask(servers)
                self._server.out.append(Send(source, Response(number, True)))
            case Received(_, Response(number, content)) if number in self._waited:
                self._replies[number] = content
        self._run()

    def sent(self) -> list[Send]:
        """Calls and answers of moves, which wait for no standby."""
        sent, self._out = self._out, []
        return sent

    def _say(self, send: Send) -> None:
        (self._out if self._server.job.standbys else self._server.out).append(send)

    def _run(self) -> None:
        while ready := [strand for strand in self._strands if strand.until()]:
            ready[0].go_on()
            if ready[0].over:
                self._strands.remove(ready[0])

    def _serve(self, call: tuple[str, int], method: str, body: bytes) -> None:
        source, number = call
        kept = self._server.kept
        if method == "prepare" and kept is not None:
            move: PrepareMoveRequest = decode(PrepareMoveRequest, body)
            kept.promise(move.number, self._server.history)
        try:
            reply = getattr(self._service, method)(body)
        except PsfleetError as error:
            reply = error
        self._say(Send(source, Response(number, reply)))

    def die(self) -> None:
        """The process ends, and its threads and open files with it."""
        for strand in self._strands:
            strand.kill()
        if self._server.kept is not None:
            for log in {self._server.kept.journal.log, self._moves._log}:
                if log is not None:
                    log.close()

    # -- see strands.Caller ----------------------------------------------------------------------

    def spawn(self, work: Callable[[], Any]) -> Strand:
        """One more thread."""
        self._strands.append(Strand(work))
        return self._strands[-1]

    def call(self, to: str, method: str, request: bytes, seconds: float) -> bytes:
        """Call another server, and wait for its answer."""
        self._number += 1
        number, end = self._number, self.ticks + _PATIENCE + seconds / 60
        self._waited.add(number)
        move = MoveRows(method.removeprefix("Scaling/").lower(), request)
        self._say(Send(to, Request(number, move)))
        Strand.wait(lambda: number in self._replies or self.ticks > end)
        self._waited.discard(number)
        reply = self._replies.pop(number, None)
        if reply is None:
            raise TimeoutError
        if isinstance(reply, PsfleetError):
            raise reply
        return bytes(reply)
