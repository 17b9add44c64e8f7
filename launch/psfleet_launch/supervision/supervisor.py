"""State machine that supervises a job: events of its processes in, actions out.

STARTING --all servers ready--> TRAINING --all workers done--> LEAVING --servers end--> DONE
    ^  `--------- a failure or a signal, from any of these ---------> STOPPING ---------> DONE
    `-- all ended -- GOING_BACK <--a server died, snapshots are kept-- TRAINING

A job survives the death of a process if one of the remedies in `_died` applies:

- a standby takes over from a server,
- a server is restarted and replays its log,
- a worker is restarted,
- the job continues without the worker,
- the whole job goes back to its last snapshot.

Otherwise the first failure ends the job. Workers are stopped first, then servers. A process that does not
end within its grace period is killed.

The supervisor starts no process, reads no clock and handles no signals. JobRunner passes events to it, one
at a time, and performs the actions. Times are seconds of any clock, as long as the caller always uses the
same clock.
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
    """State machine of one job. Call `begin` once, then `handle` with every event.

    Attributes:
        timeouts: Time limits of starting, leaving and stopping.
        alive: Members that were started and have not ended.
        awaited: Servers that were started and are not ready yet.
        failure: First failure of the job, or None.
        asked: Number of the signal that has requested the end of the job, or None.
        restarts: Number of restarts allowed for each server that dies during training. Needs logs.
        restarted: Number of restarts of each member so far.
        worker_restarts: Number of restarts allowed for each worker that dies during training.
        spares_workers: True if the job continues when a worker dies and is not restarted, as long as others
            train.
        rollbacks: Number of times that the whole job may go back to its last snapshot when a server dies.
        generation: Number of times that the job has gone back.
        over: Servers that have ended by themselves during training. They do so when every worker has
            reported that it leaves.
        standbys: Standbys that follow the servers and take over when they die, or None without standbys.
        watch: Detector of hung servers, or None if hung processes are not killed.
        restarts_hung: True if a hung server without a standby is killed and restarted from its log. Needs
            `restarts`.
        hung: Members that were killed because they were silent, and silent servers that are not killed.
        stopped: Members that were sent a signal to stop, in the order of the signals.
        killed: Members among `stopped` that were sent SIGKILL.
        deadline: Time at which the phase must be over, or infinity.
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
        """Return the actions that start the job: its servers."""
        self.over.clear()
        self.awaited = set(self.servers)
        self.deadline = at + self.timeouts.start
        return self._start(self.servers)

    def handle(self, event: Event, at: float) -> list[Action]:
        """Return the actions to perform after an event that happened at time `at`."""
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
        """Change the job's servers after rows have moved to them. The actions end removed servers."""
        leavers = tuple(member for member in self.servers if member not in servers)
        released: list[ReleaseStandbys] = []
        started: list[Member] = []
        if self.standbys is not None:
            # JobRunner has started these standbys itself, before the move was decided. `renew` makes them
            # part of the job.
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
        """The present primary of each server: the server itself, or the standby that has taken over."""
        return set(self.standbys.primary.values() if self.standbys else self.servers)

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        assert self.awaited <= self.alive
        assert not self.awaited or self.phase is not Phase.TRAINING
        assert self.killed <= set(self.stopped)
        assert self.alive or self.phase is Phase.DONE
        assert (self.failure or self.asked) or self.phase not in (Phase.STOPPING_WORKERS,)

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
            return []  # given up before, as when its machine was cut off; its death was handled then
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
        # All workers are done, so the job no longer needs standbys, nor servers whose pushes are all in a
        # log or on a standby. The death of such a process is no failure.
        if self.phase is Phase.LEAVING and (self._follows(member) or self._was_killed(exited)):
            orphan = self._orphan(
                member
            )  # its primary died before it could tell the standby to end
            return [SendSignal((orphan,), signal.SIGTERM)] if orphan else self._ended(exited, at)
        return self._died(exited, at) if exited.code else self._ended(exited, at)

    def _ended(self, exited: ProcessExited, at: float) -> list[Action]:
        """Return the actions after a process has ended regularly, or after the death of a process not
        needed."""
        member = exited.member
        if self.phase is Phase.TRAINING and member in self.servers:
            self.over.add(member)
        if not self._living("worker"):
            return self._leave(at)
        return [] if exited.left or member.role == "server" else [ReportMissingLeave(member)]

    def _died(self, exited: ProcessExited, at: float, why: str = "") -> list[Action]:
        """Return the actions of the first remedy for a death that applies. If none applies, the job fails."""
        # A remedy that does not apply returns None. The order matters: a takeover loses nothing, and a
        # worker that had left must not be restarted.
        remedies = (self._take_over, self._count_as_left, self._go_back, self._restart, self._spare)
        for remedy in remedies:
            if exited.code and (actions := remedy(exited, at)) is not None:
                return actions
        why = why or self._unprotected(exited.member)
        failure = Failure(exited.member, exited.code, why, exited.cause, exited.usage)
        return self._fail(failure, at)

    def _unprotected(self, member: Member) -> str:
        """Return why no standby can take over from this primary, or "" if the member is no primary."""
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
        is_spared = self._may_lose(exited.member)
        return [ReportLostWorker(exited.member, exited.code)] if is_spared else None

    def _had_left(self, exited: ProcessExited) -> bool:
        """Return whether a dead worker had finished its work.

        A server ends by itself when every worker has reported that it leaves, which is the last thing that
        a script does. So a worker that is killed after a server has ended was done, even if the other
        servers do not know it yet. A worker that was killed just before is restarted, and its new process
        fails, because there is no fleet to join. That failure is ignored too.
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
        if self.standbys is None or self.standbys.primary.get(member.rank) != member:
            return None
        heir = self.standbys.standby.get(member.rank)
        return heir if heir in self.alive else None

    def _follows(self, member: Member) -> bool:
        return self.standbys is not None and self.standbys.follows(member)

    def _taken_over(self, member: Member) -> list[Action]:
        """Return the actions after the death of a standby, or of a primary whose standby can take over.

        Empty for other members, which need another remedy.
        """
        if self.standbys is None or self.phase is not Phase.TRAINING:
            return []
        if self.standbys.follows(member):
            release, following = self.standbys.replace(member)
            return [release, *self._start(following)]
        promote = self.standbys.take_over(member)
        return [] if promote is None else [promote]

    def _go_on_without(self, cut_off: MachineCutOff) -> list[Action]:
        """Give up each server and standby on an unreachable machine if its partner is reachable.

        The partner (its standby or its server) continues alone. A primary that is still running on the
        cut-off machine sends no replies (decision 20), so there are never two primaries that acknowledge
        pushes. It is killed as soon as the machine can be reached.
        """
        if self.standbys is None or self.phase is not Phase.TRAINING:
            return []
        actions: list[Action] = []
        for member, partner in list(self.standbys.pairs()):
            if member in cut_off.members and partner in cut_off.answering:
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
        """Kill a member that is silent while its partner is not. Its exit is then handled like any death.

        The member must be killed before it is replaced. Otherwise a stopped process could be resumed later
        and acknowledge pushes in addition to its successor.
        """
        if self.watch is None or self.phase is not Phase.TRAINING:
            return []
        if self.standbys is None:
            return self._give_up_silent(self.watch)
        hung = {
            member
            for member, partner in self.standbys.pairs()
            if member not in self.hung and self.watch.has_hung(member, partner)
        }
        self.hung |= hung
        return [KillHung(member, self.watch.patience) for member in sorted(hung)]

    def _give_up_silent(self, watch: HangDetector) -> list[Action]:
        """Kill silent servers that can be restarted from their log. Report other silent servers once per
        silence.

        A server without a log and a standby has the only copy of its rows, so it is not killed.
        """
        silent = {member for member in self._living("server") if watch.is_silent(member)}
        newly_silent, self.hung = sorted(silent - self.hung), silent
        return [
            KillHung(member, watch.patience)
            if self.restarts_hung and self._may_restart(member)
            else ReportHung(member, watch.patience)
            for member in newly_silent
        ]

    def _may_go_back(self, member: Member) -> bool:
        """Return whether the whole job goes back to its last snapshot after the death of a member.

        The rows of a dead server are lost. All servers must go back to have rows of the same point of
        training.
        """
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
        allowed = self.restarts if member.role == "server" else self.worker_restarts
        return self.phase is Phase.TRAINING and self.restarted.get(member, 0) < allowed

    def _was_killed(self, exited: ProcessExited) -> bool:
        """Return whether a server was killed whose log or standby has all pushes of the workers."""
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
        """Enter the phase LEAVING, because all workers are done. Servers end by themselves when they notice
        it."""
        if self.phase is Phase.TRAINING:
            self.phase, self.deadline = Phase.LEAVING, at + self.timeouts.leave
            unready_standbys = (
                set(self.standbys.standby.values()) & self.alive - self.standbys.ready
                if self.standbys
                else set()
            )
            # A server that ends also ends its standby. A standby that is not ready may not have connected
            # to its server yet and would try on, so it must be ended here.
            if unready_standbys:
                return [SendSignal(tuple(sorted(unready_standbys)), signal.SIGTERM)]
        return [] if self.alive else self._finish()

    def _finish(self) -> list[Action]:
        self.phase, self.deadline = Phase.DONE, float("inf")
        if self.failure:
            return [FinishJob(self.failure.exit_code)]
        return [FinishJob(128 + self.asked if self.asked else 0)]

    def _fail(self, failure: Failure, at: float) -> list[Action]:
        self.failure = failure
        return self._stop_workers(signal.SIGTERM, at)

    def _asked(self, number: int, at: float) -> list[Action]:
        # At a second signal, or a signal during a failure, kill workers and servers together, without grace.
        if self.phase in _STOPPING and (self.asked or self.failure):
            self.phase, self.deadline = Phase.STOPPING_SERVERS, at + self.timeouts.grace
            return self._kill(self._living())
        self.asked = number
        is_known = number in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
        )  # scripts may have handlers for these signals
        return self._stop_workers(number if is_known else signal.SIGTERM, at)

    def _stop_workers(self, number: int, at: float) -> list[Action]:
        """Stop the workers. Servers are stopped later, because exit handlers of scripts may still use the
        fleet."""
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
        member, *further_members = sorted(self.awaited)
        nor = f"; nor were {listed(further_members)}" if further_members else ""
        return Failure(member, None, f"was not ready within {self.timeouts.start:g} s{nor}")

    def _kill(self, members: tuple[Member, ...]) -> list[Action]:
        self.stopped += [member for member in members if member not in self.stopped]
        self.killed |= set(members)
        return [SendSignal(members, signal.SIGKILL)] if members else []

    def _living(self, role: str = "") -> tuple[Member, ...]:
        return tuple(sorted(member for member in self.alive if role in ("", member.role)))
