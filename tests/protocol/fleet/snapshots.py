"""The snapshot coordinator of server 0: what its runner does in a real server, without I/O."""

import random
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from psfleet.core.base.errors import CheckpointError, DeadlineExceeded, PsfleetError
from psfleet.core.engine.shard.events import BeginCut, EndCut, SendError
from psfleet_server.snapshots import snapshot_coordinator
from tests.protocol.fleet import calls
from tests.protocol.scheduler import Disk, Received, Send, Tick, WriteFile

if TYPE_CHECKING:
    from tests.protocol.fleet.server import Server

_PATIENCE = 15  # ticks until a server or a worker that does not answer counts as away
_EVERY = (0, 0, 2, 3)  # rounds between snapshots
_MORE = 0.05  # of ticks that bring one more request


def published(disk: Disk) -> dict[int, calls.Published]:
    """The complete snapshots on the disk of server 0, by number."""
    return {file.number: file for file in disk.files.values() if isinstance(file, calls.Published)}


class Snapshots:
    """Somebody wants snapshots all the time. The folder that all servers share is server 0's disk."""

    def __init__(self, server: "Server", disk: Disk) -> None:
        self._server, self._disk = server, disk
        patience = snapshot_coordinator.SnapshotTimeouts(_PATIENCE, _PATIENCE, _PATIENCE)
        self._coordinator = snapshot_coordinator.SnapshotCoordinator(patience, lambda: self._ticks)
        self._events: deque[snapshot_coordinator.SnapshotEvent] = deque()
        self._dice = random.Random(server.boot)
        self._ticks = 0.0
        self._requests = 0  # that wait
        self._calls = server.boot << 20
        self._ask: snapshot_coordinator.ServerCalls | None = None
        self._asked: dict[str, calls.Request] = {}
        self._replies: dict[str, Any] = {}
        self._patience = 0
        self._announced: int | None = None
        self._watched = 0
        self._left: frozenset[int] | None = None  # seats, as the coordinator was told last

    def handle(self, event: Any) -> None:
        """Take what has happened to the server, after the server has."""
        match event:
            case Tick():
                self._tick()
            case Received(_, calls.Response(number, content)):
                self._answered(number, content)
            case Received(source, calls.Learned(number, worker, incarnation)):
                call = (source, number, incarnation)
                self._events.append(
                    lambda machine: machine.worker_learned(call, number, worker, incarnation)
                )
            case Received(_, calls.Delivered(number, worker, incarnation, state)):
                self._events.append(
                    lambda machine: machine.state_delivered(
                        number, worker, incarnation, state, state
                    )
                )
        self._look_at_members()
        while self._events or self._sees_cut():
            for instruction in self._events.popleft()(self._coordinator):
                self._perform(instruction)
            self._coordinator.validate()

    def _look_at_members(self) -> None:
        seats = frozenset(range(self._server.job.workers))
        left = frozenset(self._server.its_shard.rounds.left)
        if left != self._left:
            self._left = left
            self._events.append(lambda machine: machine.members_changed(left, seats))

    def _sees_cut(self) -> bool:
        """Hand over what has become of this server's cut."""
        number, cuts = self._watched, self._server.its_shard.cuts
        if not number or not (cuts.last >= number or cuts.is_lost(number)):
            return False
        failure = None if cuts.last >= number else cuts.failure or CheckpointError("given up")
        self._events.append(lambda machine: machine.cut_ended(number, failure))
        self._watched = 0
        return True

    # -- time ----------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._ticks += 1
        if not self._requests or self._dice.random() < _MORE:
            self._request()
        if self._ticks >= self._coordinator.deadline:
            self._events.append(snapshot_coordinator.SnapshotCoordinator.time_passed)
        self._patience -= 1
        if self._ask is not None and self._patience < 0:
            self._give_up(DeadlineExceeded("a server does not answer"))
        for name, request in self._asked.items():
            if name not in self._replies:
                self._send(name, request)
        if self._announced is not None:
            for seat in range(self._server.job.workers):
                self._send(f"w{seat}", calls.Announced(self._announced))

    def _request(self) -> None:
        self._requests += 1
        seen = max([self._server.its_shard.cuts.last, *published(self._disk)])
        request = snapshot_coordinator.SnapshotRequest(every=self._dice.choice(_EVERY))
        self._events.append(lambda machine: machine.request("request", request, seen))

    # -- instructions --------------------------------------------------------------------------

    def _perform(self, instruction: snapshot_coordinator.SnapshotInstruction) -> None:
        match instruction:
            case snapshot_coordinator.OpenDraft(number):
                path, folder = f"snapshot {number}", f"draft {number}"
                self._events.append(lambda machine: machine.draft_opened(path, folder))
            case (
                snapshot_coordinator.BeginCuts()
                | snapshot_coordinator.AwaitParts()
                | snapshot_coordinator.SettleCuts()
            ):
                self._call(instruction)
            case snapshot_coordinator.AnnounceSnapshot(announced):
                self._announced = announced
            case snapshot_coordinator.WatchCut(number):
                self._watched = number
            case snapshot_coordinator.ReleaseWorker(call, marks, last):
                source, number, incarnation = cast("tuple[str, int, int]", call)
                self._send(source, calls.Mark(number, incarnation, None if marks else last))
            case snapshot_coordinator.PublishSnapshot():
                file = calls.Published(
                    instruction.number,
                    cast("tuple[calls.Taken, ...]", instruction.parts),
                    dict(instruction.states),
                    frozenset(self._server.its_shard.rounds.left),
                )
                self._server.out.append(WriteFile(("manifest", file.number), file))
                self._events.append(snapshot_coordinator.SnapshotCoordinator.published)
            case snapshot_coordinator.CompleteSnapshot() | SendError("request"):
                self._requests -= 1

    def _send(self, to: str, message: Any) -> None:
        self._server.out.append(Send(to, message))

    # -- calls ---------------------------------------------------------------------------------

    def _call(self, ask: snapshot_coordinator.ServerCalls) -> None:
        """Ask all servers; again with every tick, until they have answered."""
        content: Any
        match ask:
            case snapshot_coordinator.BeginCuts(_, cutting):
                content = BeginCut(cutting)
            case snapshot_coordinator.AwaitParts(number, cut):
                content = calls.Finish(number, cut)
            case snapshot_coordinator.SettleCuts(number, _, base):
                content = EndCut(number, base)
        self._ask, self._patience = ask, _PATIENCE
        self._replies, self._asked = {}, {}
        for server in range(self._server.job.servers):
            self._calls += 1
            self._asked[f"S{server}"] = calls.Request(self._calls, content)
            self._send(f"S{server}", self._asked[f"S{server}"])

    def _answered(self, number: int, content: Any) -> None:
        name = next((name for name, asked in self._asked.items() if asked.number == number), None)
        if name is None or content is None:  # a repeat, or not yet
            return
        if isinstance(content, PsfleetError) and not isinstance(
            self._ask, snapshot_coordinator.SettleCuts
        ):
            self._give_up(content)
            return
        self._replies[name] = content
        if len(self._replies) == len(self._asked):
            replies = [self._replies[name] for name in self._asked]
            self._end_call(lambda machine: machine.servers_replied(replies))

    def _give_up(self, error: PsfleetError) -> None:
        if isinstance(
            self._ask, snapshot_coordinator.SettleCuts
        ):  # whoever is away learns of it later
            self._end_call(snapshot_coordinator.SnapshotCoordinator.servers_replied)
        else:
            self._end_call(lambda machine: machine.step_failed(error))

    def _end_call(self, event: snapshot_coordinator.SnapshotEvent) -> None:
        self._ask, self._asked = None, {}
        self._events.append(event)
