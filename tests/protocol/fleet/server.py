"""A server process: a shard, perhaps the coordinator, and what goes to its standby; without I/O.

Shard, Coordinator, Feed, and the records with which logs and standbys make them again are those that
run in production. Journals become instructions to append to a log, so that the scheduler can kill the
process before and after every record, and a new one is made by replay.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from psfleet.core.base.errors import CheckpointError, PsfleetError
from psfleet.core.engine.shard import events
from psfleet.core.engine.shard.membership_view import InstallView, PrepareView
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.net.v1.follower_pb2 import ChangesRequest, RowsRequest
from psfleet_server.coordinator.barriers import Arrival
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.coordinator_messages import Decision, Heartbeat, Outcome
from psfleet_server.durability.log_shipping import LogShipping, joined
from psfleet_server.durability.records import encode, encode_change
from psfleet_server.durability.recovery import take
from psfleet_server.snapshots.snapshot_coordinator import Standing
from psfleet_worker.session.instructions import ServerJoined
from tests.protocol import scheduler
from tests.protocol.fleet import calls
from tests.protocol.fleet.followed import Followed
from tests.protocol.fleet.job import COUNTS, FEW, ROWS, Job, sample_of
from tests.protocol.fleet.kept import Kept, Start
from tests.protocol.fleet.moved import Moved
from tests.protocol.fleet.plain import take_plainly
from tests.protocol.fleet.primary import Primary
from tests.protocol.fleet.snapshots import Snapshots

DEAD_AFTER = 1.0  # seconds


class Server:
    """One process: made from its log, and journaling to it.

    Args:
        index: Of its shard; None: it only hosts the coordinator.
        start: Where there are requests of another number of servers: how its process starts.

    Attributes:
        history: All that its log has been told, in order.
        parts: Of snapshots, by number, that it has written.
    """

    def __init__(
        self,
        index: int | None,
        job: Job,
        disk: scheduler.Disk,
        boot: int,
        start: Start | None = None,
    ) -> None:
        self.job, self.boot = job, boot
        self.history: list[object] = list(disk.fields.get("history", []))
        self.out: list[scheduler.Instruction] = []
        self.parts: dict[int, calls.Taken] = {}
        self._frozen: list[events.FrozenShard] = []
        self._primaries = [Primary(self)]  # that of the present standby, and of one that a move has
        self._snapshots = Snapshots(self, disk) if job.snapshots and index == 0 else None
        self.shard = None if index is None else Shard(index, job.servers, job.workers)
        self._followed = Followed(self) if job.followers and index is not None else None
        hosts = index is None or (index == 0 and not job.apart)
        self.coordinator = Coordinator(job.workers, job.servers, DEAD_AFTER) if hosts else None
        self._now = 0.0
        self._taken = 0
        self.kept: Kept | None = None
        if start is not None and job.logs:
            self.kept = Kept(start, self.its_shard, self.coordinator, disk)
            self.history = self.kept.history
        self.moved = Moved(self, start) if start is not None else None
        for kind, body, record in disk.log:
            take(kind, memoryview(body), self.shard or Shard(), self.coordinator)
            self.history.append(record)

    def _start_coordinator(self) -> None:
        """Be the process that answers for its place, and keep what changes."""
        if self.shard is not None:
            self.shard.workers.frozen = True
            self.shard.journal = lambda record: self._keep(*encode(record), record)
        if self.coordinator is not None:
            self.coordinator.journal = self._keep_decision
            if self.moved is not None:
                self.moved.recover(self.coordinator.scaling)
            if self.shard is not None:
                self.coordinator.rebooted(0, self.boot)
            self.coordinator.start()

    @property
    def its_shard(self) -> Shard:
        """The shard of a server that has one."""
        assert self.shard is not None
        return self.shard

    def _keep(self, kind: int, parts: Any, record: object) -> None:
        body = joined(parts)
        if self.kept is not None:
            self.kept.journal.log.append(kind, [body])
        elif self.job.logs:
            self.out.append(scheduler.Append((kind, body, record)))
        self.history.append(record)
        self._primary.feed_record(kind, body, record)

    def _keep_decision(self, decision: Decision) -> None:
        self._keep(*encode_change(decision), decision)

    def handle(self, event: Any) -> list[scheduler.Instruction]:
        self.out = []
        match event:
            case scheduler.Boot():
                self._start_coordinator()
            case scheduler.Tick():
                self._tick()
            case calls.Silent(worker, seconds):
                self._pass(worker, seconds)
            case calls.Release(attach):
                release = self.feed.release if self.moved is None else self.moved.release
                release(attach)
            case scheduler.Received(source, calls.Follow(attach, servers)):
                self._begin_copy(source, attach, servers)
            case scheduler.Received(_, calls.Took() as took):
                for primary in self._primaries:
                    primary.took(took)
            case scheduler.Received(source, message):
                self._receive(source, message)
        if self.shard is not None:
            self.shard.validate()
        if self._snapshots is not None:
            self._snapshots.handle(event)
        if self.moved is not None:
            self.moved.handle(event)
        if self._followed is not None:
            self.out += self._followed.handle(event)
        others = [sent for one in self._primaries[1:] for sent in one.hold([])]
        free = [] if self.moved is None else self.moved.sent()
        return [*self._primary.hold(self.out), *others, *free]

    @property
    def _primary(self) -> Primary:
        return self._primaries[0]

    @property
    def feed(self) -> LogShipping:
        """To its present standby."""
        return self._primary.feed

    @feed.setter
    def feed(self, feed: LogShipping) -> None:
        found = [one for one in self._primaries if one.feed is feed] or [Primary(self, feed)]
        found[0].replace(self._primary)
        self._primaries = found

    def _begin_copy(self, standby: str, attach: int, servers: int) -> None:
        shard, feed = self.its_shard, self.feed
        state = shard.state()
        if self.moved is not None:
            try:
                feed, shard, state = self.moved.copy(servers)
            except PsfleetError:
                return  # it asks again
        if feed is self.feed:
            self._primary.begin(standby, attach, shard, state)
        elif (one := Primary(self, feed)).begin(standby, attach, shard, state):
            self._primaries = [self._primary, one]

    def hurry(self) -> None:
        """From now on what goes to the standby is not late."""
        self._primary.hurry()

    def _receive(self, source: str, message: Any) -> None:
        match message:
            case calls.Request(number, content):
                self._called((source, number), content)
            case calls.Told(boot, content):
                self._told(source, boot, content)
            case _ if self.coordinator is not None:
                self._take_message(self.coordinator, message)

    # -- the shard -----------------------------------------------------------------------------

    def _event(self, event: events.Event, call: Any) -> None:
        assert self.shard is not None
        if isinstance(event, events.Push | events.Pull):
            self._taken += 1
            if self._taken % 2 and take_plainly(self.shard, event):  # others the ordinary way
                if isinstance(event, events.Push):
                    self._reply(call, events.SendOutcome(call, "applied"))
                else:
                    self._perform(events.SendValues(call, event.reads))
                return
        for instruction in self.shard.handle(event, call):
            match instruction:
                case events.SendOutcome(waiting) if isinstance(event, events.BeginCut):
                    self._reply(waiting, self._standing(instruction.number))
                case events.SendOutcome(waiting) if isinstance(event, events.Join):
                    self._reply(waiting, self._joined(instruction, event))
                case events.SendOutcome(waiting):
                    self._reply(waiting, instruction)
                case _:
                    self._perform(instruction)

    def _perform(self, instruction: Any) -> None:
        """What anybody's event may bring about."""
        match instruction:
            case events.SendValues(waiting, reads):
                shard = self.its_shard
                values = shard.tables.read(reads)
                self._reply(waiting, (values, shard.rounds.closed, shard.workers.view))
            case events.SendError(waiting, error):
                self._reply(waiting, error)
            case events.WriteSnapshot(frozen):
                self._frozen.append(frozen)

    def _joined(self, reply: events.SendOutcome, join: events.Join) -> ServerJoined:
        mode = self.its_shard.consistency
        declared = mode.declared if mode.mode else join.mode
        return ServerJoined(reply.number, reply.clock, declared, mode.switches)

    def _standing(self, closed: int) -> Standing:
        shard = self.its_shard
        left = shard.rounds.left
        incarnations = {
            seat: incarnation
            for seat, incarnation in shard.workers.incarnations.items()
            if seat not in left
        }
        return Standing(shard.mode or "", closed, incarnations)

    def _finished(self, number: int, cut: bool) -> Any:
        """This server's part of a snapshot; None: not yet."""
        waits = self.its_shard.cuts.under_way
        if number in self.parts:
            return True if cut else self.parts[number]
        if any(frozen.number == number for frozen in self._frozen):
            return True if cut else None
        if waits is not None and waits.number == number:
            return None
        raise CheckpointError(f"snapshot {number} was given up; take it again")

    def _write_parts(self) -> None:
        """What was cut is read only now, after more of what changes it."""
        for frozen in self._frozen:
            taken = taken_of(frozen)
            self.parts[frozen.number] = taken
            self.out.append(scheduler.WriteFile(frozen.number, taken))
        self._frozen = []

    def _told(self, source: str, boot: int, message: PrepareView | InstallView) -> None:
        """What the coordinator wants: answered only by the process that is meant."""
        shard = self.shard
        assert shard is not None
        if boot != self.boot:
            self.out.append(scheduler.Send(source, calls.Other(shard.index, self.boot)))
            return
        call = object()
        for instruction in shard.handle(message, call):
            match instruction:
                case events.SendReport(_, report):
                    self._primary.feed.confirm()
                    reply: Any = calls.Frozen(shard.index, self.boot, message.view, report)
                    self.out.append(scheduler.Send(source, reply))
                case events.SendOutcome(waiting) if waiting is call:
                    self.out.append(
                        scheduler.Send(
                            source, calls.Installed(shard.index, self.boot, message.view)
                        )
                    )
                case events.SendError(waiting) if waiting is call:
                    pass  # it is late, and says it again if it matters
                case _:
                    self._perform(instruction)

    # -- calls ---------------------------------------------------------------------------------

    def _called(self, call: tuple[str, int], content: Any) -> None:
        try:
            match content:
                case calls.CreateTable(spec, worker):
                    assert self.shard is not None
                    self.shard.create(spec, np.zeros(0, np.float32), worker)
                    self._reply(call, True)
                case calls.Finish(number, cut):
                    self._reply(call, self._finished(number, cut))
                case events.BeginCut(cutting):  # marks are the shard's, not the message's
                    self._event(events.BeginCut(replace(cutting, marks={}, addressed={})), call)
                case ChangesRequest() | RowsRequest() | calls.MoveRows() | calls.AskServers():
                    pass  # see Followed, Moved
                case calls.Register() | Arrival() | calls.Depart() | calls.AssignData():
                    assert self.coordinator is not None
                    self._coordinate(self.coordinator, call, content)
                case _:
                    self._event(content, call)
        except PsfleetError as error:
            self._reply(call, error)

    def _coordinate(self, coordinator: Coordinator, call: Any, content: Any) -> None:
        match content:
            case calls.Register(worker, boot):
                self.release(coordinator.register(worker, boot, self.job.workers, call))
            case Arrival():
                coordinator.worker_requests.mode_request = (
                    self.job.requested_modes[-1] if self.job.requested_modes else None
                )
                self.release(coordinator.arrive(content, call))
            case calls.Depart(worker, incarnation):
                self.release(coordinator.leave(worker, incarnation))
                self._reply(call, True)
            case calls.AssignData(worker, incarnation, request):
                self._reply(
                    call, (coordinator.assign_data(worker, incarnation, request), coordinator.view)
                )

    def release(self, outcomes: Iterable[Outcome]) -> None:
        """Answer calls to the coordinator."""
        for one in outcomes:
            content = one.error if isinstance(one, events.SendError) else one
            assert self.coordinator is not None
            self._reply(one.call, content, self.coordinator.scaling.endpoints)

    def _reply(self, call: Any, content: Any, servers: tuple[str, ...] = ()) -> None:
        source, number = call
        self.out.append(scheduler.Send(source, calls.Response(number, content, servers)))

    # -- the coordinator -----------------------------------------------------------------------

    def _take_message(self, coordinator: Coordinator, message: Any) -> None:
        match message:
            case Heartbeat():
                coordinator.take_heartbeat(message, self._now)
            case calls.Frozen(server, boot, view, report):
                self.release(coordinator.reported(server, boot, view, report))
            case calls.Installed(server, boot, view):
                self.release(coordinator.installed(server, boot, view))
            case calls.Other(server, boot):
                coordinator.rebooted(server, boot)

    def _tick(self) -> None:
        self._primary.send_again()
        self._write_parts()
        if self.shard is not None:
            heartbeat = Heartbeat(self.shard.index, server=True, boot=self.boot)
            self.out.append(scheduler.Send(self.job.home, heartbeat))
        if self.coordinator is not None:
            for due in self.coordinator.due():
                self.out.append(scheduler.Send(f"S{due.server}", calls.Told(due.boot, due.message)))

    def _pass(self, worker: int, seconds: float) -> None:
        """Time passes in which one worker is silent."""
        coordinator = self.coordinator
        assert coordinator is not None
        coordinator.look(self._now)
        self._now += seconds
        for other in coordinator.members.present():
            incarnation = coordinator.members.seats[other].incarnation
            if other != worker and incarnation:
                coordinator.take_heartbeat(Heartbeat(other, incarnation=incarnation), self._now)
        coordinator.look(self._now)


def taken_of(frozen: events.FrozenShard) -> calls.Taken:
    """What a snapshot would have of a shard."""
    found: dict[int, dict[int, np.ndarray[Any, Any]]] = {
        spec.key: {} for spec in (ROWS, COUNTS, FEW)
    }
    for table in frozen.tables:
        for page in table.pages():
            rows = found[table.spec.key]
            for key, row in zip(page.get("ids", ()), page.get("rows", ()), strict=True):
                rows[int(key)] = row[: table.spec.dim].copy()
    frozen.close()
    return calls.Taken(
        frozen.round,
        dict(frozen.pushes),
        frozenset(frozen.state.consistency.rounds.left),
        {
            spec.name: {key: row.tobytes() for key, row in found[spec.key].items()}
            for spec in (ROWS, COUNTS, FEW)
        },
        {sample_of(key): float(row[0]) for key, row in found[COUNTS.key].items()},
    )
