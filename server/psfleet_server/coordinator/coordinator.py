"""The coordinator, on server 0: membership, collectives and data dispatch of the whole fleet.

Pure like the shard: events in, outcomes out; no I/O, no clock. Each decision goes to the journal before
any reply depends on it, and a coordinator that replays its decisions has the same state. The
shell (psfleet_server.engine.view_changes) sends what is `due` to the servers and brings back their answers.
"""

import copy
from collections.abc import Callable, Mapping

from psfleet.core.base.errors import Fenced, Gap, NoRoom, NotReady, PsfleetError
from psfleet.core.engine.round_plan import Range, RoundPlan
from psfleet.core.engine.shard.events import Call, SendError
from psfleet.core.engine.shard.membership_view import PrepareView, ViewReport
from psfleet.core.engine.shard.recent_events import RecentEvents, remembers_calls
from psfleet_server.coordinator.barriers import (
    Arrival,
    CollectiveCompleted,
    CollectiveState,
    ModeSwitch,
)
from psfleet_server.coordinator.coordinator_messages import (
    Decision,
    Heartbeat,
    Outcome,
    PendingMessage,
    Registration,
    TermStarted,
    ViewDecided,
    WorkerLeft,
    WorkerRequests,
)
from psfleet_server.coordinator.data_dispatch import (
    DataDispatch,
    DatasetBegun,
    DatasetEnded,
    DatasetRequest,
    LeaseGranted,
    SeatPosition,
)
from psfleet_server.coordinator.membership import Membership, Seat, ViewChange
from psfleet_server.coordinator.request_files import Scaling

_START = 120.0  # seconds, at least, for a worker to come for the first time
_CHANGES = 32  # bits of a view's number for the changes since the coordinator has started


@remembers_calls("register", "arrive", "leave", "assign_data", "reported", "installed", "replay")
class Coordinator:
    """Membership, collectives and data of a fleet. One thread at a time.

    Args:
        workers: Seats that are expected to be taken; there may be more.
        servers: Number of servers; each must install every view.
        dead_after: Seconds of silence after which a worker's seat is removed; 0: never.

    Attributes:
        recent: Its last events, for errors; no part of its state.
        journal: Gets every decision before it takes effect; None: nothing is kept.
        waits_for_room: A collective is complete that could not be kept; `retry` tries again.
        worker_requests: Requests to all workers; callers set it.
        heartbeats: The last one of each worker (False, seat) and server (True, index), and when it came.
        scaling: Another number of servers.
    """

    def __init__(self, workers: int, servers: int = 1, dead_after: float = 0.0) -> None:
        self.workers = workers
        self.servers = servers
        self.dead_after = dead_after
        self.members = Membership({index: Seat() for index in range(workers)})
        self.collectives = CollectiveState()
        self.dispatch = DataDispatch()
        self.term = 0
        self.worker_requests = WorkerRequests()
        self.heartbeats: dict[tuple[bool, int], tuple[Heartbeat, float]] = {}
        self.journal: Callable[[Decision], None] | None = None
        self.waits_for_room = False
        self.scaling = Scaling()
        self._changes = 0  # since this process has started
        self._boots: dict[int, int] = {}
        self._change: ViewChange | None = None
        self._wanted = False  # a change of the view
        self._joining: dict[int, int] = {}
        self._removed: set[int] = set()
        self._uninstalled: set[int] = set()
        self._registering: dict[int, tuple[int, list[Call]]] = {}
        # By seat its incarnation, and when it was heard.
        self._seen: dict[int, tuple[int, float]] = {}
        self.recent = RecentEvents()

    def start(self) -> None:
        """This process is the coordinator from now on; all servers hear of it."""
        self._decide(TermStarted(self.term + 1))
        self._wanted = True
        self._uninstalled = set(range(self.servers))  # of the last view, for all that is known

    def go_on_with(self, dispatch: DataDispatch) -> None:
        """Hand out what a job with other workers has left."""
        self._decide(ViewDecided(self.members, dispatch))

    @property
    def view(self) -> int:
        """Number of the last view that was decided."""
        return self.members.view

    @property
    def is_installed(self) -> bool:
        """Every server has installed the last view."""
        return not self._uninstalled

    @property
    def is_busy(self) -> bool:
        """Something is due."""
        return self._wanted or self._change is not None or bool(self._uninstalled)

    # -- workers -------------------------------------------------------------------------------

    @property
    def registering(self) -> int:
        """Number of workers' calls that wait for a seat."""
        return sum(len(calls) for _, calls in [*self._registering.values()])

    def register(self, worker: int, boot: int, workers: int, call: Call) -> list[Outcome]:
        """A worker process that has started as number `boot` wants a seat.

        It is answered once every server knows of its incarnation. A seat beyond those that the fleet was
        started for is added; one that another process has is taken over.
        """
        try:
            seat = self.members.seat_for(worker, boot, workers, self.workers)
        except PsfleetError as error:
            return [SendError(call, error)]
        if seat is not None and boot == seat.boot and seat.present is not None:
            waiting = self._registering.get(worker)
            if waiting is None or waiting[0] != boot:
                self._registering[worker] = (boot, [])
            self._registering[worker][1].append(call)
            return self._seated()
        earlier = self._registering.pop(worker, (boot, []))
        refusals: list[Outcome] = []
        if earlier[0] != boot:
            later = Fenced(f"a later process has taken the seat of worker {worker}")
            refusals = [SendError(old, later) for old in earlier[1]]
            earlier = (boot, [])
        self._registering[worker] = (boot, [*earlier[1], call])
        if self._change is None or self._change.joining.get(worker) != boot:
            self._joining[worker] = boot
            self._wanted = True
        return refusals

    def _seated(self) -> list[Outcome]:
        """Answer those whose incarnations every server knows."""
        if self._uninstalled:
            return []
        outcomes: list[Outcome] = []
        for worker, (boot, calls) in [*self._registering.items()]:
            seat = self.members.seats.get(worker)
            if seat is None or seat.boot != boot or seat.present is None:
                continue
            del self._registering[worker]
            outcomes += [
                Registration(
                    call,
                    seat.incarnation,
                    seat.present.first,
                    self.view,
                    seat.rests,
                    self.collectives.switch,
                    seat.progress,
                )
                for call in calls
            ]
        return outcomes

    def arrive(self, arrival: Arrival, call: Call) -> list[Outcome]:
        """Take a worker to its collective; releases everybody when it was the last one."""
        try:
            self._admit(arrival.worker, arrival.incarnation)
        except PsfleetError as error:
            return [SendError(call, error)]
        return [*self.collectives.arrive(arrival, call), *self._complete()]

    def leave(self, worker: int, incarnation: int) -> list[Outcome]:
        """The worker comes to no more collectives."""
        seat = self.members.seats.get(worker)
        if seat is not None and seat.incarnation == incarnation and not seat.left:
            self._decide(WorkerLeft(worker, incarnation))
            if self.dispatch.is_open(incarnation):  # servers know what it has not used
                self._removed.add(worker)
                self._wanted = True
        return self._complete()

    def expire(self, call: Call) -> list[Outcome]:
        """The deadline of a waiting call has passed. Its worker stays arrived, or registered."""
        for worker, (_, calls) in self._registering.items():
            if call in calls:
                calls.remove(call)
                what = f"worker {worker} has asked server 0 for its seat, which waits for {self._lacking()}"
                error = NotReady(f"{what}: look whether it runs, and whether server 0 reaches it")
                return [SendError(call, error)]
        return [*self.collectives.expire(call, self.members.present())]

    def _lacking(self) -> str:
        """The servers that have not answered what is due."""
        servers = self._uninstalled
        if self._change is not None:
            servers = set(range(self.servers)) - self._change.reports.keys()
        return " and ".join(f"server {one}" for one in sorted(servers)) or "a change of members"

    def take_heartbeat(self, heartbeat: Heartbeat, at: float) -> WorkerRequests:
        """Note a liveness signal that came at time `at`; what is wanted of whoever gave it.

        Raises:
            Fenced: This incarnation of the worker is over.
        """
        if heartbeat.server:
            self.rebooted(heartbeat.index, heartbeat.boot)
        else:
            self._admit(heartbeat.index, heartbeat.incarnation)
            self._seen[heartbeat.index] = (heartbeat.incarnation, at)
        self.heartbeats[heartbeat.server, heartbeat.index] = (heartbeat, at)
        return WorkerRequests() if heartbeat.server else self.worker_requests

    def look(self, at: float) -> None:
        """Remove the seats of workers that have been silent for too long at time `at`."""
        for worker in self.members.present() if self.dead_after else []:
            incarnation = self.members.seats[worker].incarnation
            last = self._seen.get(worker)
            if last is None or last[0] != incarnation:
                # Every incarnation gets the whole time, also after a restart of this process.
                self._seen[worker] = (incarnation, at)
            elif at - last[1] > (self.dead_after if incarnation else max(self.dead_after, _START)):
                self._remove(worker)

    def _remove(self, worker: int) -> None:
        if self._change is None or worker not in self._change.removed:
            self._removed.add(worker)
            self._wanted = True

    # -- data ----------------------------------------------------------------------------------

    def assign_data(
        self, worker: int, incarnation: int, request: DatasetRequest
    ) -> RoundPlan | tuple[Range, ...] | None:
        """Return the data of a worker: in sync mode the plan, else a lease.

        Returns an empty lease if the dataset has ended, and None if the worker has to wait.

        Raises:
            Fenced: This incarnation of the worker is over.
            UsageError: The workers do not agree on the dataset.
            Gap: It was asked before all went on in another mode, and no caller waits for the reply.
        """
        seat = self._admit(worker, incarnation)
        if self._change is not None and self._change.ended.get(worker) == incarnation:
            raise NotReady(f"incarnation {incarnation} of worker {worker} is about to end")
        if self.collectives.switch is not None:
            self._check_asked_since(self.collectives.switch, request)
        begin = self.dispatch.begin(request, self.members.first_rounds() if request.round else None)
        if begin is not None:
            self._decide(begin)
        plan = self.dispatch.datasets[request.number - 1].plan
        if plan is not None:
            return plan
        if request.round:  # it was leased, and all of it is used
            return ()
        incarnations = [self.members.seats[index].incarnation for index in self.members.seats]
        grant = self.dispatch.lease(request, seat.incarnation, incarnations)
        if grant is not None:
            self._decide(grant)
        return self.dispatch.leased(request, seat.incarnation)

    def _check_asked_since(self, switch: ModeSwitch, request: DatasetRequest) -> None:
        if switch.mode.has_rounds != bool(request.round):
            raise Gap(f"the fleet is in mode {switch.mode!r}, which deals in another way")
        if 0 < request.round <= switch.last:
            raise Gap(f"data of round {request.round} was asked for before the fleet changed modes")

    # -- servers -------------------------------------------------------------------------------

    def rebooted(self, server: int, boot: int) -> None:
        """Note the process of a server. A new one has to install the view."""
        if self._boots.get(server) == boot or server >= self.servers:
            return
        before = self._boots.get(server)
        self._boots[server] = boot
        if before is not None:
            self._wanted = True
        if self._change is not None and server in self._change.reports:
            self._abandon()

    def _abandon(self) -> None:
        """Begin the change again, because the report of a server no longer holds."""
        assert self._change is not None
        self._joining = {**self._change.joining, **self._joining}
        self._removed |= self._change.removed
        self._change, self._wanted = None, True

    def due(self) -> list[PendingMessage]:
        """Return the messages to send; each is sent again until it is answered."""
        if self.scaling.moving is not None:
            return []
        if self._wanted and self._change is None:
            self._begin_change()
        if self._change is not None:
            freeze = PrepareView(self._change.view, self._change.ended)
            waiting = set(range(self.servers)) - self._change.reports.keys()
            boot = self._boots.get
            return [PendingMessage(server, boot(server, 0), freeze) for server in sorted(waiting)]
        install = self.members.install()
        # Server 0 last: it ends with a view that has no members, and no other process sends views.
        return [
            PendingMessage(server, self._boots[server], install)
            for server in sorted(self._uninstalled, key=lambda server: server or self.servers)
        ]

    def _begin_change(self) -> None:
        self._wanted = False
        self._changes += 1
        seats = self._removed | self._joining.keys()
        endings = {
            index: seat.incarnation
            for index, seat in self.members.seats.items()
            if index in seats and seat.incarnation
        }
        view = (self.term << _CHANGES) + self._changes
        self._change = ViewChange(view, self._joining, self._removed, endings)
        self._joining, self._removed = {}, set()

    def reported(self, server: int, boot: int, view: int, report: ViewReport) -> list[Outcome]:
        """A server is frozen; after the last one the view is decided."""
        change = self._change
        if change is None or change.view != view or self._boots.get(server) != boot:
            return []
        change.reports[server] = report
        if len(change.reports) < self.servers:
            return []
        try:
            refusals = self._view(change)
        except PsfleetError:  # it could not be kept: the server is asked once more
            del change.reports[server]
            raise
        self._change = None
        return [*refusals, *self._complete()]

    def _view(self, change: ViewChange) -> list[Outcome]:
        """Decide: first kept in the journal, then in force; who waits in an ended incarnation is told."""
        before = {index: seat.incarnation for index, seat in self.members.seats.items()}
        members, dispatch = copy.deepcopy((self.members, self.dispatch))
        members.decide(change, self.collectives.completed)
        over = [
            worker
            for worker, incarnation in before.items()
            if incarnation and members.seats[worker].incarnation != incarnation
        ]
        for worker in over:
            dispatch.give_back(worker, before[worker], change.reports)
        dispatch.change(members.closed, members.present(), members.counts_in)
        self._decide(ViewDecided(members, dispatch))
        self._uninstalled = set(range(self.servers))
        return [
            refusal
            for worker in over
            for refusal in self.collectives.drop(worker, self._fenced(worker, before[worker]))
        ]

    def installed(self, server: int, boot: int, view: int) -> list[Outcome]:
        """A server has installed the view; after the last one its new workers may begin."""
        if view == self.view and self._boots.get(server) == boot:
            self._uninstalled.discard(server)
        return [*self._seated(), *self._complete()]

    def scaled(self, endpoints: tuple[str, ...], boots: Mapping[int, int]) -> list[Outcome]:
        """End a change of the number of servers.

        Args:
            endpoints: Endpoints of all servers that now have the rows, or empty if the change was given up.
            boots: Number of the process of each server.
        """
        self.scaling.end(endpoints)
        if endpoints:
            self.servers, self._boots = len(endpoints), dict(boots)
            self.heartbeats = {k: b for k, b in self.heartbeats.items() if k < (True, self.servers)}
        return self._complete()

    # -- decisions -----------------------------------------------------------------------------

    def _decide(self, decision: Decision) -> list[Outcome]:
        self.scaling.admit(decision)
        if self.journal is not None:
            self.journal(decision)
        return self.replay(decision)

    def replay(self, decision: Decision) -> list[Outcome]:
        """Let a decision, perhaps one of an earlier process, take effect."""
        match decision:
            case TermStarted(term):
                self.term = term
            case ViewDecided(members, dispatch):
                self.members, self.dispatch = copy.deepcopy((members, dispatch))
            case CollectiveCompleted():
                for seat in self.members.present():  # where no worker rests at collectives, too
                    self.members.seats[seat].rests = decision.number
                if decision.switch is not None:
                    self._turn(decision.switch)
                return [*self.collectives.take(decision)]
            case WorkerLeft(worker, _):
                self.members.leave(worker)
            case DatasetBegun() | LeaseGranted() | DatasetEnded():
                self.dispatch.take(decision)
        return []

    def _turn(self, switch: ModeSwitch) -> None:
        """Redistribute the rest of the data by the rules of the new mode."""
        positions = {}
        for seat, number in switch.rounds.items():
            incarnation = self.members.seats[seat].present
            if incarnation is not None:
                at = (incarnation.incarnation, incarnation.first, number, switch.positions[seat])
                positions[seat] = SeatPosition(*at)
        self.dispatch.turn(switch.mode.has_rounds, positions)

    def _admit(self, worker: int, incarnation: int) -> Seat:
        seat = self.members.seats.get(worker)
        if seat is None or incarnation > self.members.incarnations or incarnation == 0:
            raise NotReady(f"incarnation {incarnation} of worker {worker} has not registered")
        if incarnation != seat.incarnation:
            raise self._fenced(worker, incarnation)
        return seat

    def _fenced(self, worker: int, incarnation: int) -> Fenced:
        now = self.members.seats[worker].incarnation
        then = f"incarnation {now} has begun" if now else "its seat is removed"
        return Fenced(f"incarnation {incarnation} of worker {worker} has ended; {then}")

    def retry(self) -> list[Outcome]:
        """There may be room in the log again: do what had to wait for it."""
        return self._complete()

    def _complete(self) -> list[Outcome]:
        """End the collective if all have come. A decision for which there is no room waits."""
        self.waits_for_room = False
        decision = self.collectives.complete(
            self.members.present(), self.worker_requests.mode_request
        )
        if decision is None or self.scaling.moving is not None:
            return []
        if (decision.switch is not None or self.scaling.is_due) and self.is_busy:
            return []  # neither changes while who is in the fleet is not known everywhere
        if self.scaling.is_due:
            self.scaling.begin()
            return []
        try:
            return self._decide(decision)
        except NoRoom:
            self.waits_for_room = True
            return []
