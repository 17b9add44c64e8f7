"""The coordinator, on server 0: membership, collectives and data dispatch of the whole fleet.

Pure like the shard: events in, outcomes out; no I/O, no clock. Each decision goes to the journal before
any reply depends on it, and a coordinator that replays its decisions has the same state. The
shell (psfleet_server.engine.view_changes) sends what is `due` to the servers and brings back their answers.
"""

import copy
from collections.abc import Callable

from psfleet.data.assignment import Range, RoundPlan
from psfleet.errors import ConfigError, Fenced, Gap, NoRoom, NotReady, PsfleetError
from psfleet.shard.events import Call, SendError
from psfleet.shard.membership_view import PrepareView, ViewReport
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

__all__ = ["Coordinator"]

_MOST_SEATS = 1 << 16
_START = 120.0  # seconds, at least, for a worker to come for the first time
_CHANGES = 32  # bits of a view's number for the changes since the coordinator has started


class Coordinator:
    """Membership, collectives and data of a fleet. One thread at a time.

    Args:
        workers: Seats that are expected to be taken; there may be more.
        servers: How many servers must install every view.
        dead_after: Seconds of silence after which a worker's seat is removed; 0: never.

    Attributes:
        journal: Gets every decision before it takes effect; None: nothing is kept.
        waits_for_room: A meeting is complete that could not be kept; `retry` tries again.
        orders: What workers are asked to do; callers set it.
        beats: The last one of each worker (False, seat) and server (True, index), and when it came.
    """

    def __init__(self, workers: int, servers: int = 1, dead_after: float = 0.0) -> None:
        self.workers = workers
        self.servers = servers
        self.dead_after = dead_after
        self.members = Membership({index: Seat() for index in range(workers)})
        self.meetings = CollectiveState()
        self.supply = DataDispatch()
        self.term = 0
        self.orders = WorkerRequests()
        self.beats: dict[tuple[bool, int], tuple[Heartbeat, float]] = {}
        self.journal: Callable[[Decision], None] | None = None
        self.waits_for_room = False
        self._changes = 0  # since this process has started
        self._boots: dict[int, int] = {}
        self._change: ViewChange | None = None
        self._wanted = False  # a change of the view
        self._joining: dict[int, int] = {}
        self._removed: set[int] = set()
        self._uninstalled: set[int] = set()
        self._registering: dict[int, tuple[int, list[Call]]] = {}
        self._seen: dict[int, tuple[int, float]] = {}  # by seat its life, and when it was heard

    def start(self) -> None:
        """This process is the coordinator from now on; all servers hear of it."""
        self._decide(TermStarted(self.term + 1))
        self._wanted = True
        self._uninstalled = set(range(self.servers))  # of the last view, for all that is known

    def go_on_with(self, supply: DataDispatch) -> None:
        """Hand out what a job with other workers has left."""
        self._decide(ViewDecided(self.members, supply))

    @property
    def view(self) -> int:
        """Number of the last view that was decided."""
        return self.members.view

    @property
    def is_installed(self) -> bool:
        """Whether every server has the last view."""
        return not self._uninstalled

    @property
    def is_busy(self) -> bool:
        """Whether something is due."""
        return self._wanted or self._change is not None or bool(self._uninstalled)

    # -- workers -------------------------------------------------------------------------------

    @property
    def registering(self) -> int:
        """How many calls of workers wait for a seat."""
        return sum(len(calls) for _, calls in [*self._registering.values()])

    def register(self, worker: int, boot: int, workers: int, call: Call) -> list[Outcome]:
        """A worker process that has started as number `boot` wants a seat.

        It is answered once every server knows of its life. A seat beyond those that the fleet was
        started for is added; one that another process has is taken over.
        """
        try:
            seat = self._seat_for(worker, boot, workers)
        except PsfleetError as error:
            return [SendError(call, error)]
        if seat is not None and boot == seat.boot and seat.life is not None:
            known = self._registering.get(worker)
            if known is None or known[0] != boot:
                self._registering[worker] = (boot, [])
            self._registering[worker][1].append(call)
            return self._seated()
        earlier = self._registering.pop(worker, (boot, []))
        replaced: list[Outcome] = []
        if earlier[0] != boot:
            later = Fenced(f"a later process has taken the seat of worker {worker}")
            replaced = [SendError(old, later) for old in earlier[1]]
            earlier = (boot, [])
        self._registering[worker] = (boot, [*earlier[1], call])
        if self._change is None or self._change.joining.get(worker) != boot:
            self._joining[worker] = boot
            self._wanted = True
        return replaced

    def _seat_for(self, worker: int, boot: int, workers: int) -> Seat | None:
        if not 0 <= worker < min(max(workers, self.workers), _MOST_SEATS):
            raise ConfigError(
                f"worker {worker} is unknown; the fleet has workers 0 to {self.workers - 1}"
            )
        if worker < self.workers != workers:
            raise ConfigError(
                f"worker {worker} was started for {workers} workers, "
                f"the servers were started for {self.workers}"
            )
        seat = self.members.seats.get(worker)
        if seat is not None and boot in seat.earlier:
            raise Fenced(f"a later process has taken the seat of worker {worker}")
        return seat

    def _seated(self) -> list[Outcome]:
        """Answer those whose lives every server knows."""
        if self._uninstalled:
            return []
        found: list[Outcome] = []
        for worker, (boot, calls) in [*self._registering.items()]:
            seat = self.members.seats.get(worker)
            if seat is None or seat.boot != boot or seat.life is None:
                continue
            del self._registering[worker]
            found += [
                Registration(
                    call,
                    seat.incarnation,
                    seat.life.first,
                    self.view,
                    seat.rests,
                    self.meetings.switch,
                    seat.progress,
                )
                for call in calls
            ]
        return found

    def arrive(self, arrival: Arrival, call: Call) -> list[Outcome]:
        """Take a worker to its meeting; releases everybody when it was the last one."""
        try:
            self._admit(arrival.worker, arrival.incarnation)
        except PsfleetError as error:
            return [SendError(call, error)]
        return [*self.meetings.arrive(arrival, call), *self._complete()]

    def leave(self, worker: int, incarnation: int) -> list[Outcome]:
        """The worker comes to no more meetings."""
        seat = self.members.seats.get(worker)
        if seat is not None and seat.incarnation == incarnation and not seat.left:
            self._decide(WorkerLeft(worker, incarnation))
            if self.supply.is_open(incarnation):  # servers know what it has not used
                self._removed.add(worker)
                self._wanted = True
        return self._complete()

    def expire(self, call: Call) -> list[Outcome]:
        """The deadline of a waiting call has passed. Its worker stays arrived, or registered."""
        for _, calls in self._registering.values():
            if call in calls:
                calls.remove(call)
                return [
                    SendError(call, NotReady(f"not every server has answered: {self._lacking()}"))
                ]
        return [*self.meetings.expire(call, self.members.present())]

    def _lacking(self) -> str:
        waited = self._uninstalled or (
            set(range(self.servers)) - (self._change.reports.keys() if self._change else set())
        )
        return ", ".join(f"server {server}" for server in sorted(waited))

    def beat(self, beat: Heartbeat, at: float) -> WorkerRequests:
        """Note a sign of life that came at time `at`; what is wanted of whoever gave it.

        Raises:
            Fenced: This life of the worker is over.
        """
        if beat.server:
            self.rebooted(beat.index, beat.boot)
        else:
            self._admit(beat.index, beat.incarnation)
            self._seen[beat.index] = (beat.incarnation, at)
        self.beats[beat.server, beat.index] = (beat, at)
        return WorkerRequests() if beat.server else self.orders

    def look(self, at: float) -> None:
        """Remove the seats of workers that have been silent for too long at time `at`."""
        for worker in self.members.present() if self.dead_after else []:
            life = self.members.seats[worker].incarnation
            seen = self._seen.get(worker)
            if seen is None or seen[0] != life:
                # Every life gets the whole time, also after a restart of this process.
                self._seen[worker] = (life, at)
            elif at - seen[1] > (self.dead_after if life else max(self.dead_after, _START)):
                self._remove(worker)

    def _remove(self, worker: int) -> None:
        if self._change is None or worker not in self._change.removed:
            self._removed.add(worker)
            self._wanted = True

    # -- data ----------------------------------------------------------------------------------

    def deal(
        self, worker: int, incarnation: int, order: DatasetRequest
    ) -> RoundPlan | tuple[Range, ...] | None:
        """A worker's data: in sync mode the plan, else a lease; empty: it has all; None: wait.

        Raises:
            Fenced: This life of the worker is over.
            UsageError: The workers do not agree on the dataset.
            Gap: It was asked before all went on in another mode, and nobody waits for the answer.
        """
        seat = self._admit(worker, incarnation)
        if self._change is not None and self._change.ended.get(worker) == incarnation:
            raise NotReady(f"incarnation {incarnation} of worker {worker} is about to end")
        if self.meetings.switch is not None:
            self._check_asked_since(self.meetings.switch, order)
        begun = self.supply.begin(order, self.members.first_rounds() if order.round else None)
        if begun is not None:
            self._decide(begun)
        plan = self.supply.datasets[order.number - 1].plan
        if plan is not None:
            return plan
        if order.round:  # it was leased, and all of it is used
            return ()
        lives = [self.members.seats[index].incarnation for index in self.members.seats]
        leased = self.supply.lease(order, seat.incarnation, lives)
        if leased is not None:
            self._decide(leased)
        return self.supply.leased(order, seat.incarnation)

    def _check_asked_since(self, switch: ModeSwitch, order: DatasetRequest) -> None:
        if switch.mode.has_rounds != bool(order.round):
            raise Gap(f"the fleet is in mode {switch.mode!r}, which deals in another way")
        if 0 < order.round <= switch.last:
            raise Gap(f"data of round {order.round} was asked for before the fleet changed modes")

    # -- servers -------------------------------------------------------------------------------

    def rebooted(self, server: int, boot: int) -> None:
        """The server is this process. A new one has to be told the view."""
        if self._boots.get(server) == boot:
            return
        known = self._boots.get(server)
        self._boots[server] = boot
        if known is not None:
            self._wanted = True
        if self._change is not None and server in self._change.reports:
            self._abandon()

    def _abandon(self) -> None:
        """Begin the change anew: what a server has reported does not hold any more."""
        assert self._change is not None
        self._joining = {**self._change.joining, **self._joining}
        self._removed |= self._change.removed
        self._change, self._wanted = None, True

    def due(self) -> list[PendingMessage]:
        """What has to be sent, again and again until it is answered."""
        if self._wanted and self._change is None:
            self._begin_change()
        if self._change is not None:
            freeze = PrepareView(self._change.view, self._change.ended)
            waiting = set(range(self.servers)) - self._change.reports.keys()
            return [
                PendingMessage(server, self._boots.get(server, 0), freeze)
                for server in sorted(waiting)
            ]
        install = self.members.install()
        # Server 0 last: it ends with a view that has no members, and nobody else brings views.
        return [
            PendingMessage(server, self._boots[server], install)
            for server in sorted(self._uninstalled, key=lambda server: server or self.servers)
        ]

    def _begin_change(self) -> None:
        self._wanted = False
        self._changes += 1
        touched = self._removed | self._joining.keys()
        ended = {
            index: seat.incarnation
            for index, seat in self.members.seats.items()
            if index in touched and seat.incarnation
        }
        view = (self.term << _CHANGES) + self._changes
        self._change = ViewChange(view, self._joining, self._removed, ended)
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
            refused = self._view(change)
        except PsfleetError:  # it could not be kept: the server is asked once more
            del change.reports[server]
            raise
        self._change = None
        return [*refused, *self._complete()]

    def _view(self, change: ViewChange) -> list[Outcome]:
        """Decide: first kept in the journal, then in force; who waits in an ended life is told."""
        before = {index: seat.incarnation for index, seat in self.members.seats.items()}
        members, supply = copy.deepcopy((self.members, self.supply))
        members.decide(change, self.meetings.met)
        over = [
            worker
            for worker, life in before.items()
            if life and members.seats[worker].incarnation != life
        ]
        for worker in over:
            supply.give_back(worker, before[worker], change.reports)
        supply.change(members.closed, members.present(), members.counts_in)
        self._decide(ViewDecided(members, supply))
        self._uninstalled = set(range(self.servers))
        return [
            refusal
            for worker in over
            for refusal in self.meetings.drop(worker, self._fenced(worker, before[worker]))
        ]

    def installed(self, server: int, boot: int, view: int) -> list[Outcome]:
        """A server has installed the view; after the last one its new workers may begin."""
        if view == self.view and self._boots.get(server) == boot:
            self._uninstalled.discard(server)
        return [*self._seated(), *self._complete()]

    # -- decisions -----------------------------------------------------------------------------

    def _decide(self, decision: Decision) -> list[Outcome]:
        if self.journal is not None:
            self.journal(decision)
        return self.replay(decision)

    def replay(self, decision: Decision) -> list[Outcome]:
        """Let a decision, perhaps one of an earlier process, take effect."""
        match decision:
            case TermStarted(term):
                self.term = term
            case ViewDecided(members, supply):
                self.members, self.supply = copy.deepcopy((members, supply))
            case CollectiveCompleted():
                for seat in self.members.present():  # where nobody rests at meetings, too
                    self.members.seats[seat].rests = decision.number
                if decision.switch is not None:
                    self._turn(decision.switch)
                return [*self.meetings.take(decision)]
            case WorkerLeft(worker, _):
                self.members.seats[worker].left = True
            case DatasetBegun() | LeaseGranted() | DatasetEnded():
                self.supply.take(decision)
        return []

    def _turn(self, switch: ModeSwitch) -> None:
        """What is left of the data is dealt as the new mode deals."""
        reached = {}
        for seat, number in switch.rounds.items():
            life = self.members.seats[seat].life
            if life is not None:
                at = (life.incarnation, life.first, number, switch.positions[seat])
                reached[seat] = SeatPosition(*at)
        self.supply.turn(switch.mode.has_rounds, reached)

    def _admit(self, worker: int, incarnation: int) -> Seat:
        seat = self.members.seats.get(worker)
        if seat is None or incarnation > self.members.lives or incarnation == 0:
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
        """End the meeting if all have come. Whoever called has outcomes of its own, so a decision for
        which there is no room waits.
        """
        self.waits_for_room = False
        met = self.meetings.complete(self.members.present(), self.orders.wish)
        if met is None or (met.switch is not None and self.is_busy):
            return []  # the mode is not changed while who is in the fleet is not known everywhere
        try:
            return self._decide(met)
        except NoRoom:
            self.waits_for_room = True
            return []
