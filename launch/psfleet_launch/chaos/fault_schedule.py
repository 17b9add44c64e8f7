"""Decides what `psfleet-launch --chaos SEED` does to which process, and when.

`schedule` yields faults without end, of kinds that the job's own settings promise to survive. ChaosSchedule
turns the faults that are due into signals. Neither has a clock or touches a process: the job runner does
that.
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

_FIRST = 1.5  # seconds
_PAUSE = (0.2, 1.5)
_HANG = (1.0, 3.0)  # beyond the time after which it is given up
_FULL = 0.4
_NETWORK = {"drop": 0.02, "duplicate": 0.03, "delay": 0.03}
_ROLL_BACKS = 3
_MACHINES = 2  # stay: a server and its standby are never on one
_OF_PAIRS = ("kill", "pause", "hang")
_STANDBYS = 0.4  # share of a server's faults that its standby gets
_SLOW = 0.2
_MORE = 2  # servers than the job begins with, at most


@dataclass(frozen=True)
class ProcessFault:
    """One thing that is done to a process.

    Attributes:
        at: Seconds since training began.
        kind: kill: as `kill -9`; pause: SIGSTOP, and SIGCONT later; hang: the same, but so long that it
            is given up; full: no room for its log; lose: its machine is lost with all that it runs;
            scale: of no process: the job is asked for another number of servers.
        member: A worker, or a server: the process that has this role at that time.
        seconds: Duration; 0 for a kill.
        standby: It is done to the standby of that server.
        servers: Number of servers that are asked for.
    """

    at: float
    kind: Kind
    member: Member
    seconds: float = 0.0
    standby: bool = False
    servers: int = 0

    @property
    def target(self) -> str:
        """`worker 0`, `server 1`, `standby of server 1`, `machine of server 1` or `servers to 3`."""
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
    """Faults without end, in order of time; the same for the same seed and request.

    Servers are killed where they come back, have a standby, or the job goes back; standbys too, and both
    hang; workers are killed as often as they are started again; disks are full, which ends the workers
    that push, where those are started again. Machines are lost where standbys and restarts of workers cover
    it, until two are left. With `scales` the number of servers changes too. Between two faults lie 0.5 to
    1.5 times `pace` seconds.
    """
    dice, cover = random.Random(seed), _Cover.of(request, machines, scales)
    at, wanted = _FIRST, request.servers
    while True:
        kind, member = dice.choice(cover.kinds(dice))
        seconds = _lasting(kind, dice, request)
        cover.take(kind, member)
        has_standby = bool(request.replicas) and member.role == "server" and kind in _OF_PAIRS
        fault = ProcessFault(at, kind, member, seconds, has_standby and dice.random() < _STANDBYS)
        if kind == "scale":
            wanted = dice.choice([n for n in range(1, cover.most + 1) if n != wanted])
            fault = replace(fault, servers=wanted)
        yield fault
        rests = 10.0 if request.durability == "snapshot" and not request.replicas else 0.0
        at += pace * dice.uniform(0.5, 1.5) + rests


@dataclass
class _Cover:
    """Faults that a job's settings still cover.

    Attributes:
        restarts: Restarts of workers.
        machines: That may be lost.
        returns: To the last snapshot.
        most: Servers that there may be.
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
        """Faults that are covered now, each as often as it is likely."""
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
        """This fault happens: less is covered then."""
        if kind == "full":
            self.restarts -= 2
        elif kind == "lose":
            self.machines, self.restarts = self.machines - 1, self.restarts - 1
        elif kind == "kill" and member.role == "worker":
            self.restarts -= 1
        elif kind == "kill" and self.returns and not self.request.replicas:
            self.returns -= 1


def _lasting(kind: Kind, dice: random.Random, request: JobRequest) -> float:
    """Seconds for which a fault of this kind lasts."""
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
    """Too short to be taken for a death."""
    longest = min(_PAUSE[1], request.dead_after / 4) if request.dead_after else _PAUSE[1]
    if request.watches:
        longest = min(longest, request.hung_after / 4)
    return dice.uniform(min(_PAUSE[0], longest), longest)


@dataclass(frozen=True)
class FaultSignal:
    """A signal for a process, or for all of its machine, and what to say about it.

    Attributes:
        servers: Number of servers that the job is asked for. There is no signal then.
    """

    member: Member
    signal: int
    text: str = ""
    takes_machine: bool = False
    servers: int = 0


@dataclass
class ChaosSchedule:
    """The chaos of one job, or with `is_calm` the same job without it, to compare with.

    Attributes:
        folder: Folder for the processes' audit files; exists.
        done: Faults so far.
        followed: Faults of followers, as in `said`.
        generations: Number of times that the job has gone back; audit files of earlier times are put aside.
        machines: On which the job runs; known when it begins.
        scales: The job may have another number of servers; known when it begins.
        moves: How often it has had one.
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
        self._now = 0.0  # seconds of the schedule
        self._endings: list[tuple[float, ProcessFault, Member]] = []
        self._struck: set[Member] = set()  # killed, or stopped and not yet let go on
        # A server whose machine is being lost. What else runs there is known when it has ended.
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

        Of a server and its standby only one is struck at a time, and only if both are up.

        Args:
            living: Processes that run; of servers those that answer, else one that is killed again
                and again before it is back would never be. (Tests kill servers while they recover.)
            trains: All of them do, and none is being started or stopped otherwise.
            standbys: Present primary of each server; None: there are no standbys.
            moving: A request for another number of servers is under way.
            whole: No server is being started. Else the time of the schedule goes slowly, so that a slow
                machine has hardly more faults than a fast one for what it gets done.
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
                break  # it waits for standbys of all servers
            self._next = next(self._schedule)
            is_there = not moving if fault.kind == "scale" else victim in living
            if is_there and victim is not None and not self._has_left(fault):
                self.done.append(fault)
                strikes += self._begin(fault, victim, at)
        self._struck &= living
        return strikes

    def went_back(self) -> None:
        """The job starts again from a snapshot: what was pushed since then is gone by design."""
        self.generations += 1
        aside = self.folder / f"generation-{self.generations}"
        aside.mkdir()
        for path in [*self.folder.glob("pushed.*"), *self.folder.glob("left.*")]:
            path.rename(aside / path.name)
        self._endings = [ending for ending in self._endings if ending[1].kind == "full"]
        self._struck.clear()

    def follow(self, step: ScalingStep) -> None:
        """Note what becomes of requests for another number of servers."""
        self.moves += step.servers is not None
        for (
            member
        ) in step.start:  # an earlier server of this rank has said what it held when it left
            (self.folder / f"held.{member.rank}.json").unlink(missing_ok=True)

    def said(self) -> list[dict[str, Any]]:
        """Return the injected faults, for a report."""
        faults = [
            {"at": fault.at, "kind": fault.kind, "member": fault.target, "seconds": fault.seconds}
            for fault in self.done
        ]
        return sorted(faults + self.followed, key=lambda fault: fault["at"])

    def _has_left(self, fault: ProcessFault) -> bool:
        """Return whether the fleet may end before the worker or the killed server returns, or the hung one is
        detected."""
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
    """Return the process that the fault is for, or None if that process or its partner is not up."""
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
    """Return whether every server and its standby are up; a machine runs some of each."""
    heirs = set(standbys.standby.values())
    return (
        len(heirs) == len(standbys.primary)
        and heirs <= standbys.ready
        and whole.issuperset((*standbys.primary.values(), *heirs))
    )
