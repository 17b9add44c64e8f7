"""State machine that supervises a job: events of its processes in, actions out.

STARTING --all servers ready--> TRAINING --all workers done--> LEAVING --servers end--> DONE
    ^  `--------- a failure or a signal, from any of these ---------> STOPPING ---------> DONE
    `-- all ended -- GOING_BACK <--a server died, snapshots are kept-- TRAINING

Pure: no process, no clock, no signal handler. Times are seconds of whatever clock the caller uses.
"""

import signal
from dataclasses import dataclass, field

from psfleet_launch.job.job_plan import Member, listed
from psfleet_launch.supervision.job_events import (
    Action,
    ClockTick,
    Event,
    Failure,
    FinishJob,
    KillHung,
    LivenessSignal,
    MachineCutOff,
    Phase,
    ProcessEnding,
    ProcessExited,
    ReportHung,
    ReportLostWorker,
    ReportMissingLeave,
    SendSignal,
    ServerReady,
    ServerUnreachable,
    StartProcesses,
    StopRequested,
    Timeouts,
)
from psfleet_launch.supervision.standbys import HangDetector, ReleaseStandbys, Standbys

_STOPPING = (Phase.STOPPING_WORKERS, Phase.STOPPING_SERVERS)


@dataclass
class Supervisor:
    """The state of one job. Call `begin` once, then `handle` with every event.

    Attributes:
        alive: Started and not ended.
        failure: The first one.
        asked: The signal that ended the job, if one did.
        restarts: Number of restarts allowed for each server that dies during training; needs a log.
        restarted: Number of restarts of each member so far.
        worker_restarts: Number of restarts allowed for each worker that dies during training.
        spares_workers: A worker that dies for good does not end the job while others train.
        rollbacks: Number of times that the whole job may go back to its last snapshot when a server dies.
        generation: Number of times that it has gone back.
        over: Servers that have ended by themselves during training, as every worker had reported that it
            leaves.
        standbys: Standbys that follow the servers and take over when they die; None: there are none.
        watch: Detector of hung servers; None: none is given up for silence.
        restarts_hung: A server without a standby is given up too; only where `restarts` are.
        hung: Those that were given up and killed, or are left alone in their silence.
        stopped: Members that were asked to stop, in that order; `killed`: those that had to be.
    """

    servers: tuple[Member, ...]
    workers: tuple[Member, ...]
    timeouts: Timeouts = field(default_factory=Timeouts)
    restarts: int = 0
    rollbacks: int = 0
    worker_restarts: int = 0
    spares_workers: bool = False
    standbys: Standbys | None = None
    watch: HangDetector | None = None
    restarts_hung: bool = False
    generation: int = 0
    phase: Phase = Phase.STARTING
    alive: set[Member] = field(default_factory=set)
    awaited: set[Member] = field(default_factory=set)
    failure: Failure | None = None
    asked: int | None = None
    restarted: dict[Member, int] = field(default_factory=dict)
    stopped: list[Member] = field(default_factory=list)
    killed: set[Member] = field(default_factory=set)
    hung: set[Member] = field(default_factory=set)
    over: set[Member] = field(default_factory=set)
    deadline: float = float("inf")

    def begin(self, at: float) -> list[Action]:
        """Start the servers."""
        self.over.clear()
        self.awaited = set(self.servers)
        self.deadline = at + self.timeouts.start
        return self._start(self.servers)

    def handle(self, event: Event, at: float) -> list[Action]:
        """Return the actions to take after `event`, which happened at time `at`."""
        if self.phase is Phase.DONE:
            return []
        if self.watch is not None:
            self.watch.look(at)
        if self.standbys is not None:
            self.standbys.now = at
        match event:
            case ServerReady(member):
                return self._ready(member)
            case ServerUnreachable(member, why):
                starts = self.phase is Phase.STARTING
                return self._fail(Failure(member, None, why), at) if starts else []
            case ProcessExited():
                return self._exited(event, at)
            case StopRequested(number):
                return self._asked(number, at)
            case LivenessSignal(member):
                return self._take_signal(member)
            case ProcessEnding(member):
                return self._parting(member)
            case MachineCutOff():
                return self._go_on_without(event)
            case ClockTick():
                if at >= self.deadline:
                    return self._overdue(at)
                return [*self._start_delayed(), *self._give_up_hung()]

    def rescale(self, servers: tuple[Member, ...]) -> list[Action]:
        """The job has these servers from now on; those that it has no more are asked to end."""
        leavers = tuple(member for member in self.servers if member not in servers)
        released: list[ReleaseStandbys] = []
        started: list[Member] = []
        if self.standbys is not None:
            self.alive |= {*self.standbys.prepared.values()}
            ended, released, started = self.standbys.renew(len(servers))
            leavers = tuple(ended)
        self.alive = self.alive - set(leavers) | set(servers[len(self.servers) :])
        for member in leavers:
            self._parting(member)
        self.servers = servers
        ends: list[Action] = [SendSignal(leavers, signal.SIGTERM)] if leavers else []
        return [*ends, *released, *self._start(tuple(started))]

    @property
    def primaries(self) -> set[Member]:
        """The servers, of each the process that answers for it."""
        return set(self.standbys.primary.values() if self.standbys else self.servers)

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        assert self.awaited <= self.alive
        assert not self.awaited or self.phase is not Phase.TRAINING
        assert self.killed <= set(self.stopped)
        assert self.alive or self.phase is Phase.DONE
        assert (self.failure or self.asked) or self.phase not in (Phase.STOPPING_WORKERS,)

    # -- in order --------------------------------------------------------------------------------

    def _start(self, members: tuple[Member, ...]) -> list[Action]:
        self.alive |= set(members)
        self.hung -= set(members)
        return [StartProcesses(members)] if members else []

    def _ready(self, member: Member) -> list[Action]:
        self.awaited.discard(member)
        if self.phase is Phase.TRAINING and self.standbys is not None:
            return self._start(self.standbys.is_ready(member))
        if self.phase is not Phase.STARTING or self.awaited:
            return []
        self.phase, self.deadline = Phase.TRAINING, float("inf")
        following = [] if self.standbys is None else self.standbys.begin(self.servers)
        return [*self._start(tuple(following)), *self._start(self.workers)]

    def _exited(self, exited: ProcessExited, at: float) -> list[Action]:
        member = exited.member
        if member not in self.alive:
            return []  # it was given up before
        self.alive.discard(member)
        if self.watch is not None:
            self.watch.forget(member)
        awaited = member in self.awaited
        self.awaited.discard(member)
        if self.phase in _STOPPING:
            return self._stopping_goes_on(at)
        if self.phase is Phase.GOING_BACK:
            return self._going_back(at)
        if awaited:
            return self._died(exited, at, "ended before it was ready")
        if self.phase is Phase.LEAVING and (self._follows(member) or self._was_killed(exited)):
            orphan = self._orphan(member)  # no other process ends it
            return [SendSignal((orphan,), signal.SIGTERM)] if orphan else self._ended(exited, at)
        return self._died(exited, at) if exited.code else self._ended(exited, at)

    def _ended(self, exited: ProcessExited, at: float) -> list[Action]:
        """A process has ended by itself, or is not needed any more."""
        member = exited.member
        if self.phase is Phase.TRAINING and member in self.servers:
            self.over.add(member)
        if not self._living("worker"):
            return self._leave(at)
        return [] if exited.left or member.role == "server" else [ReportMissingLeave(member)]

    def _died(self, exited: ProcessExited, at: float, why: str = "") -> list[Action]:
        """Return the actions of the first remedy for a process's death that applies; else fail the job."""
        covers = (self._take_over, self._count_as_left, self._go_back, self._restart, self._spare)
        for cover in covers:
            if exited.code and (actions := cover(exited, at)) is not None:
                return actions
        why = why or self._unprotected(exited.member)
        failure = Failure(exited.member, exited.code, why, exited.cause, exited.usage)
        return self._fail(failure, at)

    def _unprotected(self, member: Member) -> str:
        """Why no standby takes over from this server; empty: it is none that could have one."""
        if self.standbys is None or self.standbys.primary.get(member.rank) != member:
            return ""
        return self.standbys.unprotected().get(member.rank, "")

    def _take_over(self, exited: ProcessExited, at: float) -> list[Action] | None:
        return self._taken_over(exited.member) or None

    def _count_as_left(self, exited: ProcessExited, at: float) -> list[Action] | None:
        if not self._had_left(exited):
            return None
        lost = ReportLostWorker(exited.member, exited.code, left=True)
        return [lost] if self._living("worker") else [lost, *self._leave(at)]

    def _go_back(self, exited: ProcessExited, at: float) -> list[Action] | None:
        if not self._may_go_back(exited.member):
            return None
        self.generation += 1
        self.phase, self.failure = Phase.GOING_BACK, None
        living = self._living()
        return [SendSignal(living, signal.SIGKILL)] if living else self._going_back(at)

    def _restart(self, exited: ProcessExited, at: float) -> list[Action] | None:
        member = exited.member
        if exited.left or exited.is_final or not self._may_restart(member):
            return None
        self.restarted[member] = self.restarted.get(member, 0) + 1
        return self._start((member,))

    def _spare(self, exited: ProcessExited, at: float) -> list[Action] | None:
        may = self._may_lose(exited.member)
        return [ReportLostWorker(exited.member, exited.code)] if may else None

    def _had_left(self, exited: ProcessExited) -> bool:
        """Return whether a dead worker had finished: no process waits for it, nor could it come back.

        A server ends by itself when every worker has reported its leave, which is the last thing that
        a script does. So one that is killed then is done, also before all servers know. One that
        was killed a moment earlier is started again; its exit code does not count.
        """
        member = exited.member
        if member.role != "worker" or self.phase is not Phase.TRAINING:
            return False
        if exited.code > 0:
            return member in self.restarted and bool(self.over)
        return (exited.left or bool(self.over)) and bool(
            self.worker_restarts or self.spares_workers
        )

    def _orphan(self, member: Member) -> Member | None:
        """The standby of this primary, if it runs."""
        if self.standbys is None or self.standbys.primary.get(member.rank) != member:
            return None
        heir = self.standbys.standby.get(member.rank)
        return heir if heir in self.alive else None

    def _follows(self, member: Member) -> bool:
        return self.standbys is not None and self.standbys.follows(member)

    def _taken_over(self, member: Member) -> list[Action]:
        """Return the actions after the death of a standby, or of a server that has one; empty: none helps."""
        if self.standbys is None or self.phase is not Phase.TRAINING:
            return []
        if self.standbys.follows(member):
            release, following = self.standbys.replace(member)
            return [release, *self._start(following)]
        promote = self.standbys.take_over(member)
        return [] if promote is None else [promote]

    def _go_on_without(self, cut_off: MachineCutOff) -> list[Action]:
        """Give up each server and standby of a machine whose partner can be reached and goes on alone.

        Those that still run send no replies (decision 20), and are killed as soon as they can be reached.
        """
        if self.standbys is None or self.phase is not Phase.TRAINING:
            return []
        actions: list[Action] = []
        for member, other in list(self.standbys.pairs()):
            if member in cut_off.members and other in cut_off.answering:
                self.alive.discard(member)
                if self.watch is not None:
                    self.watch.forget(member)
                actions += [SendSignal((member,), signal.SIGKILL), *self._taken_over(member)]
        return actions

    def _take_signal(self, member: Member) -> list[Action]:
        if self.watch is not None and member in self.alive:
            self.watch.take_signal(member)
        return []

    def _parting(self, member: Member) -> list[Action]:
        if self.watch is not None:
            self.watch.forget(member)
        return []

    def _start_delayed(self) -> list[Action]:
        if self.standbys is None or self.phase is not Phase.TRAINING:
            return []
        return self._start(self.standbys.due())

    def _give_up_hung(self) -> list[Action]:
        """Kill a member that is silent while its partner is not: its death is then handled like any other.

        A server that was killed cannot acknowledge anything, even if it is resumed first.
        """
        if self.watch is None or self.phase is not Phase.TRAINING:
            return []
        if self.standbys is None:
            return self._give_up_silent(self.watch)
        hung = {
            member
            for member, other in self.standbys.pairs()
            if member not in self.hung and self.watch.has_hung(member, other)
        }
        self.hung |= hung
        return [KillHung(member, self.watch.patience) for member in sorted(hung)]

    def _give_up_silent(self, watch: HangDetector) -> list[Action]:
        """The same without standbys: kill who has a log to go on from; of others say so once a silence."""
        silent = {member for member in self._living("server") if watch.is_silent(member)}
        fresh, self.hung = sorted(silent - self.hung), silent
        return [
            KillHung(member, watch.patience)
            if self.restarts_hung and self._may_restart(member)
            else ReportHung(member, watch.patience)
            for member in fresh
        ]

    def _may_go_back(self, member: Member) -> bool:
        """Return whether the job may go back: all memory is lost with one server, so none ends in order."""
        return (
            member.role == "server"
            and self.phase is Phase.TRAINING
            and self.generation < self.rollbacks
        )

    def _going_back(self, at: float) -> list[Action]:
        if self.alive:
            return []
        self.phase = Phase.STARTING
        return self.begin(at)

    def _may_restart(self, member: Member) -> bool:
        often = self.restarts if member.role == "server" else self.worker_restarts
        return self.phase is Phase.TRAINING and self.restarted.get(member, 0) < often

    def _was_killed(self, exited: ProcessExited) -> bool:
        """Return whether a server was killed whose log or standby has all that its workers have pushed."""
        keeps = self.restarts > 0 or (
            self.standbys is not None and self.standbys.has_heir(exited.member)
        )
        return exited.member.role == "server" and keeps and exited.code < 0

    def _may_lose(self, member: Member) -> bool:
        return (
            member.role == "worker"
            and self.spares_workers
            and self.phase is Phase.TRAINING
            and bool(self._living("worker"))
        )

    def _leave(self, at: float) -> list[Action]:
        """The workers are done; servers that know it end by themselves."""
        if self.phase is Phase.TRAINING:
            self.phase, self.deadline = Phase.LEAVING, at + self.timeouts.leave
            late = (
                set(self.standbys.standby.values()) & self.alive - self.standbys.ready
                if self.standbys
                else set()
            )
            if late:  # no other process ends them
                return [SendSignal(tuple(sorted(late)), signal.SIGTERM)]
        return [] if self.alive else self._finish()

    def _finish(self) -> list[Action]:
        self.phase, self.deadline = Phase.DONE, float("inf")
        if self.failure:
            return [FinishJob(self.failure.exit_code)]
        return [FinishJob(128 + self.asked if self.asked else 0)]

    # -- out of order ----------------------------------------------------------------------------

    def _fail(self, failure: Failure, at: float) -> list[Action]:
        self.failure = failure
        return self._stop_workers(signal.SIGTERM, at)

    def _asked(self, number: int, at: float) -> list[Action]:
        if self.phase in _STOPPING and (self.asked or self.failure):
            self.phase, self.deadline = Phase.STOPPING_SERVERS, at + self.timeouts.grace
            return self._kill(self._living())
        self.asked = number
        is_known = number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # to scripts, as an end
        return self._stop_workers(number if is_known else signal.SIGTERM, at)

    def _stop_workers(self, number: int, at: float) -> list[Action]:
        """Workers first: what a script does on its way out may need the servers."""
        workers = self._living("worker")
        if not workers:
            return self._stop_servers(at)
        self.phase, self.deadline = Phase.STOPPING_WORKERS, at + self.timeouts.grace
        self.stopped += workers
        return [SendSignal(workers, number)]

    def _stop_servers(self, at: float) -> list[Action]:
        if not self.alive:
            return self._finish()
        self.phase, self.deadline = Phase.STOPPING_SERVERS, at + self.timeouts.grace
        servers = self._living("server")
        self.stopped += servers
        return [SendSignal(servers, signal.SIGTERM)] if servers else []

    def _stopping_goes_on(self, at: float) -> list[Action]:
        if self.phase is Phase.STOPPING_WORKERS and not self._living("worker"):
            return self._stop_servers(at)
        return [] if self.alive else self._finish()

    def _overdue(self, at: float) -> list[Action]:
        match self.phase:
            case Phase.STARTING:
                return self._fail(self._never_ready(), at)
            case Phase.STOPPING_WORKERS:
                return [*self._kill(self._living("worker")), *self._stop_servers(at)]
            case Phase.STOPPING_SERVERS:
                self.deadline = at + self.timeouts.grace
                return self._kill(self._living())
            case _:
                return self._stop_servers(at)

    def _never_ready(self) -> Failure:
        member, *others = sorted(self.awaited)
        nor = f"; nor were {listed(others)}" if others else ""
        return Failure(member, None, f"was not ready within {self.timeouts.start:g} s{nor}")

    def _kill(self, members: tuple[Member, ...]) -> list[Action]:
        self.stopped += [member for member in members if member not in self.stopped]
        self.killed |= set(members)
        return [SendSignal(members, signal.SIGKILL)] if members else []

    def _living(self, role: str = "") -> tuple[Member, ...]:
        return tuple(sorted(member for member in self.alive if role in ("", member.role)))
