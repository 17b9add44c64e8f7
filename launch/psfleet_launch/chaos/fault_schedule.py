"""Schedule of the faults of `psfleet-launch --chaos SEED`: kills, pauses, full disks, lost machines, scaling.

`schedule` yields an endless sequence of faults that depends only on the seed and the job's settings. It
contains only faults that the job promises to survive, such as the death of a server with a log or a
standby. ChaosSchedule returns the faults that are due at a given time. Neither reads a clock or touches a
process. The job runner does both, in the launcher's main thread.
"""

import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from psfleet_launch.chaos.audit import ChaosSettings
from psfleet_launch.job.job_plan import Member
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.supervision.scaling_requests import ScalingStep
from psfleet_launch.supervision.standbys import Standbys

Kind = Literal["kill", "pause", "hang", "full", "lose", "scale"]

_FIRST = 1.5  # seconds from the start of training to the first fault
_PAUSE = (0.2, 1.5)  # shortest and longest pause in seconds
_HANG = (1.0, 3.0)  # seconds of a hang beyond --hung-after, when the process is given up
_FULL = 0.4  # seconds during which a disk is full
_NETWORK = {"drop": 0.02, "duplicate": 0.03, "delay": 0.03}  # shares of a worker's calls
_ROLL_BACKS = 3  # times that a job with snapshots is made to go back
_MACHINES = 2  # machines that are never lost, since a server and its standby need two
_OF_PAIRS = ("kill", "pause", "hang")  # faults that may hit a standby instead of its server
_STANDBYS = 0.4  # share of these faults that hit the standby
_SLOW = 0.2  # pace of the schedule while a server starts
_MORE = 2  # maximum of servers beyond those at the job's begin


@dataclass(frozen=True)
class ProcessFault:
    """Planned fault of a worker, a server, a machine or the number of servers.

    Attributes:
        at: Time of the fault, in seconds of the schedule's clock since training began.
        kind: Kind of the fault:
            "kill": SIGKILL.
            "pause": SIGSTOP, then SIGCONT.
            "hang": A pause so long that the launcher kills the process.
            "full": A server behaves as if its disk were full.
            "lose": A machine is lost with all its processes.
            "scale": The number of servers changes.
        member: Worker or server. The fault affects the process that serves this member at that time.
        seconds: Duration of the fault, or 0 for faults without a duration.
        standby: True if the fault affects the standby of the server.
        servers: New number of servers for "scale".
    """

    at: float
    kind: Kind
    member: Member
    seconds: float = 0.0
    standby: bool = False
    servers: int = 0

    @property
    def target(self) -> str:
        """Target in words: "worker 0", "standby of server 1", "machine of server 1" or "servers to 3"."""
        if self.kind == "scale":
            return f"servers to {self.servers}"
        if self.kind == "lose":
            return f"machine of {self.member}"
        return f"standby of {self.member}" if self.standby else str(self.member)

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        words = {
            "kill": "is killed",
            "pause": "is paused",
            "hang": "hangs",
            "full": "has no room on its disk",
            "lose": "is lost",
            "scale": "are asked for",
        }
        return f"{self.at:.1f} s: {self.target} {words[self.kind]}{lasts}"


def schedule(
    seed: int, request: JobRequest, pace: float = 4.0, machines: int = 1, scales: bool = False
) -> Iterator[ProcessFault]:
    """Yield faults without end, in order of time. The same seed and request give the same faults.

    Only faults that the job's settings promise to survive are chosen:

    - Servers are killed if they have a log or a standby, or if the job can go back to a snapshot.
    - Servers and standbys hang if the launcher kills hung processes.
    - Workers are killed at most as often as the launcher restarts them.
    - Disks are full only if workers are restarted.
    - Machines are lost if the job has standbys and enough restarts of workers, until two machines are left.
    - The number of servers changes if `scales` is True.

    Args:
        pace: Mean number of seconds between two faults. The actual times are 0.5 to 1.5 times as long.
        scales: True if the number of servers can change.
    """
    dice, cover = random.Random(seed), _Cover.of(request, machines, scales)
    at, servers = _FIRST, request.servers
    while True:
        kind, member = dice.choice(cover.kinds(dice))
        seconds = _lasting(kind, dice, request)
        cover.take(kind, member)
        has_standby = bool(request.replicas) and member.role == "server" and kind in _OF_PAIRS
        fault = ProcessFault(at, kind, member, seconds, has_standby and dice.random() < _STANDBYS)
        if kind == "scale":
            servers = dice.choice([n for n in range(1, cover.most + 1) if n != servers])
            fault = replace(fault, servers=servers)
        yield fault
        # A job that goes back to a snapshot restarts all its processes, which takes longer than other
        # recoveries.
        recovery_time = 10.0 if request.durability == "snapshot" and not request.replicas else 0.0
        at += pace * dice.uniform(0.5, 1.5) + recovery_time


@dataclass
class _Cover:
    """Remaining faults of each kind that a job's settings promise to survive.

    Attributes:
        request: Job under chaos.
        restarts: Remaining restarts of workers.
        machines: Number of machines that may still be lost.
        returns: Number of times that the job may still go back to its last snapshot.
        most: Maximum number of servers.
    """

    request: JobRequest
    restarts: int
    machines: int
    returns: int
    most: int

    @classmethod
    def of(cls, request: JobRequest, machines: int, scales: bool) -> "_Cover":
        spare = machines - _MACHINES if request.replicas else 0
        returns = _ROLL_BACKS if request.durability == "snapshot" else 0
        most = request.servers + _MORE if scales else request.servers
        return cls(request, request.worker_restarts, spare, returns, most)

    def kinds(self, dice: random.Random) -> list[tuple[Kind, Member]]:
        """Return the faults that the job survives now. A fault that is twice in the list is twice as
        likely."""
        request = self.request
        servers = [Member("server", rank) for rank in range(self.most)]
        workers = [Member("worker", rank) for rank in range(request.workers)]
        faults: list[tuple[Kind, Member]] = [("pause", dice.choice(servers + workers))]
        if request.keeps_log or self.returns or request.replicas:
            faults += [("kill", dice.choice(servers))] * 2
        if request.watches:
            faults += [("hang", dice.choice(servers))] * 2
        if self.restarts:
            faults += [("kill", dice.choice(workers))]
        if request.keeps_log and self.restarts >= 2:
            faults += [("full", dice.choice(servers))]
        if self.machines > 0 and self.restarts:
            faults += [("lose", dice.choice(servers))] * 2
        if self.most > request.servers:
            faults += [("scale", servers[0])] * 2
        return faults

    def take(self, kind: Kind, member: Member) -> None:
        """Subtract this fault from the remaining faults."""
        if kind == "full":
            self.restarts -= 2
        elif kind == "lose":
            self.machines, self.restarts = self.machines - 1, self.restarts - 1
        elif kind == "kill" and member.role == "worker":
            self.restarts -= 1
        elif kind == "kill" and self.returns and not self.request.replicas:
            self.returns -= 1


def _lasting(kind: Kind, dice: random.Random, request: JobRequest) -> float:
    """Return the duration of a fault of this kind, in seconds."""
    match kind:
        case "full":
            return _FULL
        case "pause":
            return _pause(dice, request)
        case "hang":
            return request.hung_after + dice.uniform(*_HANG)
        case _:
            return 0.0


def _pause(dice: random.Random, request: JobRequest) -> float:
    """Return the duration of a pause that is too short for the launcher to treat it as a death or a hang."""
    longest = min(_PAUSE[1], request.dead_after / 4) if request.dead_after else _PAUSE[1]
    if request.watches:
        longest = min(longest, request.hung_after / 4)
    return dice.uniform(min(_PAUSE[0], longest), longest)


@dataclass(frozen=True)
class FaultSignal:
    """Fault that is due now. The job runner carries it out.

    Attributes:
        member: Process to signal.
        signal: Number of the signal, or 0 for no signal.
        text: Line for the user, or "".
        takes_machine: True to kill everything on the machine of the process.
        servers: Number of servers to request, or 0 to request none.
    """

    member: Member
    signal: int
    text: str = ""
    takes_machine: bool = False
    servers: int = 0


@dataclass
class ChaosSchedule:
    """Faults of one job, and the settings of its processes for the audit.

    Attributes:
        request: Job under chaos.
        folder: Existing folder for the processes' audit files.
        is_calm: True for a run with the audit but without faults, for comparison.
        pace: Mean number of seconds between two faults.
        done: Faults so far.
        followed: Faults of followers, in the form that `said` returns.
        generations: Number of times that the job has gone back to a snapshot.
        machines: Number of machines of the job. Set before the job begins.
        scales: True if the number of servers can change. Set before the job begins.
        moves: Number of times that the number of servers has changed.
    """

    seed: int
    request: JobRequest
    folder: Path
    is_calm: bool = False
    pace: float = 4.0
    done: list[ProcessFault] = field(default_factory=list)
    followed: list[dict[str, Any]] = field(default_factory=list)
    generations: int = 0
    machines: int = 1
    scales: bool = False
    moves: int = 0

    def __post_init__(self) -> None:
        self._looked: float | None = None
        self._now = 0.0  # seconds of the schedule, which runs slowly while a server starts
        # Time of the end, fault and victim of each fault that has a duration.
        self._endings: list[tuple[float, ProcessFault, Member]] = []
        self._struck: set[Member] = set()  # killed, or stopped and not continued yet
        # Server whose machine is being lost. The schedule waits until the server has ended. Until then it
        # does not know which other processes ran on that machine, and a fault might kill their partners.
        self._losing: Member | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for the processes of the job."""
        network = {} if self.is_calm else _NETWORK
        settings = ChaosSettings(str(self.folder.absolute()), self.seed, **network)
        return {"PSFLEET_CHAOS": settings.text()}

    def due(
        self,
        at: float,
        living: set[Member],
        *,
        trains: bool,
        standbys: Standbys | None = None,
        moving: bool = False,
        whole: bool = True,
    ) -> list[FaultSignal]:
        """Return the faults to inject at time `at`.

        Of a server and its standby, only one is affected at a time, and only while both are running.

        Args:
            at: Present time, in seconds of any clock.
            living: Running processes. A server must not be included before it answers calls. Otherwise it
                might be killed during each recovery and never recover. (Other tests kill servers during
                recovery.)
            trains: True while the job trains. Faults begin only then.
            standbys: Standbys of the job, with the present primaries, or None without standbys.
            moving: True while a change of the number of servers is under way.
            whole: False while a server is starting. The schedule's clock then runs slowly, so that a slow
                machine does not get many more faults than a fast machine for the same work.
        """
        if self.is_calm:
            return []
        if self._looked is None:
            if not trains:
                return []
            self._looked = at
            self._schedule = schedule(
                self.seed, self.request, self.pace, self.machines, self.scales
            )
            self._next = next(self._schedule)
        strikes = self._ended(at)
        self._now += (at - self._looked) * (1.0 if whole else _SLOW)
        self._looked = at
        while trains and self._next.at <= self._now and self._losing not in living:
            fault, victim = self._next, _victim(self._next, standbys, living - self._struck)
            if fault.kind == "lose" and victim is None:
                break  # the fault, and all later ones, wait until every server has a ready standby
            self._next = next(self._schedule)
            is_there = not moving if fault.kind == "scale" else victim in living
            if is_there and victim is not None and not self._has_left(fault):
                self.done.append(fault)
                strikes += self._begin(fault, victim, at)
        self._struck &= living
        return strikes

    def went_back(self) -> None:
        """Set the audit files aside, because the job goes back to a snapshot, which undoes later pushes."""
        self.generations += 1
        aside = self.folder / f"generation-{self.generations}"
        aside.mkdir()
        for path in [*self.folder.glob("pushed.*"), *self.folder.glob("left.*")]:
            path.rename(aside / path.name)
        self._endings = [ending for ending in self._endings if ending[1].kind == "full"]
        self._struck.clear()

    def follow(self, step: ScalingStep) -> None:
        """Record a step of a change of the number of servers."""
        self.moves += step.servers is not None
        for member in step.start:  # written by an earlier server of this rank
            (self.folder / f"held.{member.rank}.json").unlink(missing_ok=True)

    def said(self) -> list[dict[str, Any]]:
        """Return the injected faults for the report, as JSON objects."""
        faults = [
            {"at": fault.at, "kind": fault.kind, "member": fault.target, "seconds": fault.seconds}
            for fault in self.done
        ]
        return sorted(faults + self.followed, key=lambda fault: fault["at"])

    def _has_left(self, fault: ProcessFault) -> bool:
        """Return whether the fleet may end before the fault has been detected and repaired.

        Such a fault would test nothing: the process would not be back in time, or the hang not be detected.
        """
        leavers = len([*self.folder.glob("left.*")])
        if fault.kind in ("hang", "lose", "scale"):
            return leavers > 0
        if fault.member.role == "worker":
            return (self.folder / f"left.{fault.member.rank}").exists()
        return fault.kind == "kill" and leavers >= self.request.workers

    def _begin(self, fault: ProcessFault, victim: Member, at: float) -> list[FaultSignal]:
        if fault.kind == "scale":
            return [FaultSignal(victim, 0, str(fault), servers=fault.servers)]
        if fault.seconds:
            self._endings.append((at + fault.seconds, fault, victim))
        if fault.kind == "full":
            self._mark(fault).touch()
            return [FaultSignal(victim, 0, str(fault))]
        self._struck.add(victim)
        if takes_machine := fault.kind == "lose":
            self._losing = victim
        number = signal.SIGKILL if takes_machine or fault.kind == "kill" else signal.SIGSTOP
        return [FaultSignal(victim, number, str(fault), takes_machine)]

    def _ended(self, at: float) -> list[FaultSignal]:
        over = [(fault, victim) for end, fault, victim in self._endings if end <= at]
        self._endings = [ending for ending in self._endings if ending[0] > at]
        for fault, victim in over:
            self._struck.discard(victim)
            if fault.kind == "full":
                self._mark(fault).unlink(missing_ok=True)
        return [
            FaultSignal(victim, signal.SIGCONT) for fault, victim in over if fault.kind != "full"
        ]

    def _mark(self, fault: ProcessFault) -> Path:
        return self.folder / f"full.{fault.member.rank}"


def _victim(fault: ProcessFault, standbys: Standbys | None, whole: set[Member]) -> Member | None:
    """Return the process to inject the fault into, or None if that process or its partner is not running."""
    rank = fault.member.rank
    has_pair = standbys is not None and fault.member.role == "server" and rank in standbys.primary
    if standbys is None or not has_pair or fault.kind == "scale":  # a new server has no standby yet
        return None if fault.standby else fault.member
    if fault.kind == "lose" and not _are_all_up(standbys, whole):
        return None
    pair = standbys.primary.get(rank), standbys.standby.get(rank)
    if not whole.issuperset(pair) or pair[1] not in standbys.ready:
        return None
    return pair[fault.standby]


def _are_all_up(standbys: Standbys, whole: set[Member]) -> bool:
    """Return whether every server and every standby is running. Losing a machine may affect any of them."""
    heirs = set(standbys.standby.values())
    return (
        len(heirs) == len(standbys.primary)
        and heirs <= standbys.ready
        and whole.issuperset((*standbys.primary.values(), *heirs))
    )
