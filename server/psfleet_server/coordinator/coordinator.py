"""Decides on server 0 for the whole fleet: who is a member, when a collective ends, who gets which data.

The coordinator is a pure state machine, like the shard: events in, outcomes out, without clock, threads or
I/O (except that it logs an unexpected error). A change of members runs like this (a *view* is a numbered
membership):

    register, leave, look     a worker joins, leaves or falls silent: a change is wanted
    due -> Freeze             every server stops closing rounds and reports its state
    reported                  the last report decides the next view
    due -> Install            every server works with the new members
    installed                 after the last server, new workers get their reply

Each decision goes to the journal before any reply depends on it, so a coordinator that replays its decisions
has the same state. `psfleet_server.engine.view_changes` sends the messages that are due and brings back the
replies. docs/protocol.md explains why this is safe.
"""

import copy
from collections.abc import Callable, Mapping

from psfleet.core.base.errors import (
    Fenced,
    Gap,
    NoRoom,
    NotReady,
    PsfleetError,
    internal_error,
    type_and_text,
)
from psfleet.core.base.logs import log_of
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
from psfleet_server.coordinator.worker_liveness import WorkerLiveness

_log = log_of(__name__)
# A view's number is (term << _CHANGES) + changes. Numbers therefore grow also after a restart of server 0,
# which forgets the changes that it had begun but not decided.
_CHANGES = 32


@remembers_calls("register", "arrive", "leave", "assign_data", "reported", "installed", "replay")
class Coordinator:
    """Membership, collectives and data of a fleet. Only one thread may call at a time (`ShardHost.lock`).

    Args:
        workers: Number of workers that the fleet was started for. Workers started later may join too.
        servers: Number of servers. Each must install every view (numbered membership).
        dead_after: Seconds of silence after which a worker is removed from the fleet. 0 never removes a
            worker.

    Attributes:
        recent: The last events, which are added to error messages. Not part of the state.
        journal: Called with every decision before it takes effect, or None if the job keeps no log.
        waits_for_room: True if all workers have arrived at a collective, but the log is too full to record
            its end. `retry` tries again.
        worker_requests: Requests to all workers, set by callers.
        heartbeats: Maps `(False, number of a worker)` or `(True, index of a server)` to a pair: the last
            heartbeat of that process, and the time at which the heartbeat came.
        scaling: State of a change of the number of servers.
        torn: Error of every later decision, after an error has stopped a decision behind its record, or None.
            This process then lacks a decision that the log has.
    """

    def __init__(self, workers: int, servers: int = 1, dead_after: float = 0.0) -> None:
        self.workers = workers
        self.servers = servers
        self._liveness = WorkerLiveness(dead_after)
        self.members = Membership({index: Seat() for index in range(workers)})
        self.collectives = CollectiveState()
        self.dispatch = DataDispatch()
        self.term = 0
        self.worker_requests = WorkerRequests()
        self.heartbeats: dict[tuple[bool, int], tuple[Heartbeat, float]] = {}
        self.journal: Callable[[Decision], None] | None = None
        self.waits_for_room = False
        self.scaling = Scaling()
        self.torn: PsfleetError | None = None
        self._changes = 0  # number of changes begun since this process has started
        self._boots: dict[int, int] = {}  # boot number of each server's process
        self._change: ViewChange | None = None  # the change for which servers are freezing
        self._wanted = False  # a change is to begin, with the next two as its content
        self._joining: dict[int, int] = {}  # boot number of the process that takes each seat
        self._removed: set[int] = set()  # seats to remove
        self._uninstalled: set[int] = set()  # servers without the last view
        # By seat, the process that registers and its calls, which are answered when it is a member.
        self._registering: dict[int, tuple[int, list[Call]]] = {}
        self.recent = RecentEvents()

    def start(self) -> None:
        """Take over as the coordinator, when server 0 starts or restarts.

        Begins a new term (the time in which one process is the coordinator), and makes all servers install
        the first view (numbered membership) of that term.
        """
        self._decide(TermStarted(self.term + 1))
        self._wanted = True
        # It is not known who has installed the last view, so no worker is told that it is a member until
        # every server has the next one.
        self._uninstalled = set(range(self.servers))

    def go_on_with(self, dispatch: DataDispatch) -> None:
        """Distribute the samples that an earlier job, with another number of workers, has left unused."""
        self._decide(ViewDecided(self.members, dispatch))

    @property
    def view(self) -> int:
        """Number of the last view (membership of the fleet) that was decided."""
        return self.members.view

    @property
    def is_installed(self) -> bool:
        """True if every server works with the last decided view (numbered membership)."""
        return not self._uninstalled

    @property
    def is_busy(self) -> bool:
        """True if a change of members is wanted, or a server still works with earlier members."""
        return self._wanted or self._change is not None or bool(self._uninstalled)

    @property
    def registering(self) -> int:
        """Number of calls of registering workers that wait for their reply."""
        return sum(len(calls) for _, calls in [*self._registering.values()])

    def register(self, worker: int, boot: int, workers: int, call: Call) -> list[Outcome]:
        """Register a worker process. The call gets its reply once every server knows the process as a member.

        Args:
            worker: Worker number (rank). A number beyond those the fleet was started for adds a worker. If
                another process has the number, the new process replaces it.
            boot: Random number that identifies the process.
            workers: Number of workers that the process was started for.
            call: The call to reply to. A process may repeat its call.

        Returns:
            Replies that can be sent now, perhaps to other calls.
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
            later = Fenced(f"a later process has taken over as worker {worker}")
            refusals = [SendError(old, later) for old in earlier[1]]
            earlier = (boot, [])
        self._registering[worker] = (boot, [*earlier[1], call])
        if self._change is None or self._change.joining.get(worker) != boot:
            self._joining[worker] = boot
            self._wanted = True
        return refusals

    def _seated(self) -> list[Outcome]:
        """Reply to the registrations of all workers that every server knows by now."""
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
        """Note that a worker has arrived at a collective. The last arrival completes the collective."""
        try:
            self._admit(arrival.worker, arrival.incarnation)
        except PsfleetError as error:
            return [SendError(call, error)]
        return [*self.collectives.arrive(arrival, call), *self._complete()]

    def leave(self, worker: int, incarnation: int) -> list[Outcome]:
        """Note that a worker has finished its script and takes part in no more collectives."""
        seat = self.members.seats.get(worker)
        if seat is not None and seat.incarnation == incarnation and not seat.left:
            self._decide(WorkerLeft(worker, incarnation))
            # The worker has left samples of its leases unused. A change of the view collects from the servers
            # how far it was, and so returns these samples to the pool.
            if self.dispatch.is_open(incarnation):
                self._removed.add(worker)
                self._wanted = True
        return self._complete()

    def expire(self, call: Call) -> list[Outcome]:
        """Refuse a waiting call whose deadline has passed.

        The worker's arrival at a collective, or its registration, stays valid. The worker may call again.
        """
        for worker, (_, calls) in self._registering.items():
            if call in calls:
                calls.remove(call)
                seat = f"worker {worker} has asked server 0 for its seat, which waits for {self._lacking()}"
                error = NotReady(f"{seat}: look whether it runs, and whether server 0 reaches it")
                return [SendError(call, error)]
        return [*self.collectives.expire(call, self.members.present())]

    def _lacking(self) -> str:
        """Name, for an error message, the servers that a worker's registration still waits for."""
        servers = self._uninstalled
        if self._change is not None:
            servers = set(range(self.servers)) - self._change.reports.keys()
        return (
            " and ".join(f"server {server}" for server in sorted(servers)) or "a change of members"
        )

    def take_heartbeat(self, heartbeat: Heartbeat, at: float) -> WorkerRequests:
        """Note a heartbeat that came at time `at`, in seconds.

        Returns:
            The requests to workers, for the reply. Empty for the heartbeat of a server.

        Raises:
            Fenced: Another process has replaced this worker, or the worker was removed.
        """
        if heartbeat.server:
            self.rebooted(heartbeat.index, heartbeat.boot)
        else:
            self._admit(heartbeat.index, heartbeat.incarnation)
            self._liveness.note(heartbeat.index, heartbeat.incarnation, at)
        self.heartbeats[heartbeat.server, heartbeat.index] = (heartbeat, at)
        return WorkerRequests() if heartbeat.server else self.worker_requests

    def look(self, at: float) -> None:
        """Remove the workers that are dead at time `at`, in seconds, as `WorkerLiveness` decides."""
        for worker in self._liveness.dead(self.members, at):
            if self._change is None or worker not in self._change.removed:
                self._removed.add(worker)
                self._wanted = True

    def assign_data(
        self, worker: int, incarnation: int, request: DatasetRequest
    ) -> RoundPlan | tuple[Range, ...] | None:
        """Return the data of a worker: in sync mode a plan of all rounds, otherwise a lease on some samples.

        Returns an empty lease if the dataset has ended, and None if the worker has to wait and ask again.

        Raises:
            Fenced: Another process has replaced this worker, or the worker was removed.
            NotReady: Another process is about to replace this worker.
            UsageError: The workers do not agree on the dataset.
            Gap: The request was made before a mode switch, so its worker no longer waits for the reply.
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
        if (
            request.round
        ):  # the dataset was distributed by leases before a mode switch, and is used up
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

    def rebooted(self, server: int, boot: int) -> None:
        """Note which process (`boot`, a random number) runs as a server.

        After a restart of the server, its new process has to install the last view (numbered membership).
        """
        if self._boots.get(server) == boot or server >= self.servers:
            return
        before = self._boots.get(server)
        self._boots[server] = boot
        if before is not None:
            self._wanted = True
        # The report came from the earlier process, and need not hold for the new one.
        if self._change is not None and server in self._change.reports:
            self._abandon()

    def _abandon(self) -> None:
        """Start the change of members again under a new view number, after a server has restarted.

        The report of the server's earlier process need not be true for the new one.
        """
        assert self._change is not None
        self._joining = {**self._change.joining, **self._joining}
        self._removed |= self._change.removed
        self._change, self._wanted = None, True

    def due(self) -> list[PendingMessage]:
        """Return the messages to send now.

        While a change of members is under way, servers get Freeze (close no rounds, and report). Otherwise
        servers without the last decided members get Install. A message is returned again until its server
        has replied. Nothing is due while rows move to other servers.
        """
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
        """Note the report of a frozen server (one that closes no rounds during a change of members).

        The last server's report makes the coordinator decide the view (the new numbered membership).

        Raises:
            PsfleetError: The decision could not be journalled. The last server then has to report again.
        """
        change = self._change
        if change is None or change.view != view or self._boots.get(server) != boot:
            return []
        change.reports[server] = report
        if len(change.reports) < self.servers:
            return []
        try:
            refusals = self._view(change)
        # Without this report the server's Freeze is due again, and its next report tries the decision again.
        except PsfleetError:
            del change.reports[server]
            raise
        self._change = None
        return [*refusals, *self._complete()]

    def _view(self, change: ViewChange) -> list[Outcome]:
        """Decide the next view (numbered membership) from the reports of all servers.

        Returns refusals for the waiting calls of removed worker processes.
        """
        before = {index: seat.incarnation for index, seat in self.members.seats.items()}
        # The next state is made in copies: if the journal refuses the decision, nothing has changed.
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
        """Note that a server works with a view (numbered membership).

        Once all servers do, new workers get the reply to their registration.
        """
        if view == self.view and self._boots.get(server) == boot:
            self._uninstalled.discard(server)
        return [*self._seated(), *self._complete()]

    def scaled(self, endpoints: tuple[str, ...], boots: Mapping[int, int]) -> list[Outcome]:
        """End a change of the number of servers.

        Args:
            endpoints: Endpoints of all servers that now hold the rows, or empty if the change was given up.
            boots: Random number that identifies the process of each server.
        """
        self.scaling.end(endpoints)
        if endpoints:
            self.servers, self._boots = len(endpoints), dict(boots)
            self.heartbeats = {k: b for k, b in self.heartbeats.items() if k < (True, self.servers)}
        return self._complete()

    def _decide(self, decision: Decision) -> list[Outcome]:
        if self.torn is not None:
            raise self.torn
        self.scaling.admit(decision)
        is_recorded = False
        try:
            # Journal first: once a decision has an effect, a reply may depend on it.
            if self.journal is not None:
                self.journal(decision)
            is_recorded = True
            return self.replay(decision)
        except Exception as error:
            # A PsfleetError of the journal means that there is no record.
            if is_recorded or not isinstance(error, PsfleetError):
                self.torn = PsfleetError(
                    f"server 0 has half of a decision ({type(decision).__name__}), which was stopped by "
                    f"{type_and_text(error)}; start again from the log or a snapshot"
                )
            raise

    def replay(self, decision: Decision) -> list[Outcome]:
        """Apply a decision that was just made, or that comes from the log of an earlier process."""
        match decision:
            case TermStarted(term):
                self.term = term
            case ViewDecided(members, dispatch):
                self.members, self.dispatch = copy.deepcopy((members, dispatch))
            case CollectiveCompleted():
                # Every mode notes this, also the modes in which no worker rests at collectives.
                for seat in self.members.present():
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
        """Distribute the unused samples by the rules of the new mode, after a mode switch."""
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
        """Try again to complete a collective that the full log could not record.

        Call it when the log may have space.
        """
        return self._complete()

    def _complete(self) -> list[Outcome]:
        """End the collective if all workers have arrived and nothing else has to come first.

        If a change of the number of servers is due, the rows move first. `scaled` then ends the collective.
        """
        self.waits_for_room = False
        try:
            return self._completed()
        except NoRoom:
            self.waits_for_room = True
            return []
        # To all workers that wait. Raised, the error would reach only the caller of this event.
        except PsfleetError as error:
            return [*self.collectives.refuse(error)]
        except Exception as error:
            _log.error("a collective has failed", exc_info=error)
            return [*self.collectives.refuse(internal_error(error))]

    def _completed(self) -> list[Outcome]:
        decision = self.collectives.complete(
            self.members.present(), self.worker_requests.mode_request
        )
        if decision is None or self.scaling.moving is not None:
            return []
        # A mode switch or a move of rows needs the same members at all servers, so it waits for the view.
        if (decision.switch is not None or self.scaling.is_due) and self.is_busy:
            return []
        if self.scaling.is_due:
            self.scaling.begin()
            return []
        return self._decide(decision)
