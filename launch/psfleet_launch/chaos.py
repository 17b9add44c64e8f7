"""psfleet-launch --chaos: a seeded schedule of faults that the job's own settings promise to cover."""

import random
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from psfleet.testing.notes import ChaosSettings
from psfleet_launch.plan import Member, Request

__all__ = ["Fault", "Strike", "Trouble", "schedule"]

Kind = Literal["kill", "pause", "full"]

_FIRST = 1.5  # seconds
_PAUSE = (0.2, 1.5)
_FULL = 0.4
_NETWORK = {"drop": 0.02, "duplicate": 0.03, "delay": 0.03}
_ROLL_BACKS = 3


@dataclass(frozen=True)
class Fault:
    """One thing that is done to a process.

    Attributes:
        at: Seconds since training began.
        kind: kill: as `kill -9`; pause: SIGSTOP, and SIGCONT later; full: no room for its log.
        seconds: How long it lasts; 0 for a kill.
    """

    at: float
    kind: Kind
    member: Member
    seconds: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        words = {"kill": "is killed", "pause": "is paused", "full": "has no room on its disk"}
        return f"{self.at:.1f} s: {self.member} {words[self.kind]}{lasts}"


def schedule(seed: int, request: Request, pace: float = 4.0) -> Iterator[Fault]:
    """Faults without end, in order of time; the same for the same seed and request.

    Servers are killed where they come back or the job goes back; workers as often as they are
    started again; disks are full, which ends the workers that push, where those are started again.
    Between two faults lie 0.5 to 1.5 times `pace` seconds.
    """
    dice = random.Random(seed)
    keeps_log = request.durability in ("log", "log+fsync")
    servers = [Member("server", rank) for rank in range(request.servers)]
    workers = [Member("worker", rank) for rank in range(request.workers)]
    left = request.worker_restarts
    back = _ROLL_BACKS if request.durability == "snapshot" else 0
    at = _FIRST
    while True:
        kinds: list[tuple[Kind, Member]] = [("pause", dice.choice(servers + workers))]
        if keeps_log or back:
            kinds += [("kill", dice.choice(servers))] * 2
        if left:
            kinds += [("kill", dice.choice(workers))]
        if keeps_log and left >= 2:
            kinds += [("full", dice.choice(servers))]
        kind, member = dice.choice(kinds)
        seconds = 0.0
        if kind == "full":
            seconds, left = _FULL, left - 2
        elif kind == "pause":
            seconds = _pause(dice, request)
        elif member.role == "worker":
            left -= 1
        elif back:
            back -= 1
        yield Fault(at, kind, member, seconds)
        at += pace * dice.uniform(0.5, 1.5) + (10.0 if request.durability == "snapshot" else 0.0)


def _pause(dice: random.Random, request: Request) -> float:
    """Too short to be taken for a death."""
    longest = min(_PAUSE[1], request.dead_after / 4) if request.dead_after else _PAUSE[1]
    return dice.uniform(min(_PAUSE[0], longest), longest)


@dataclass(frozen=True)
class Strike:
    """A signal for a process, and what to say about it."""

    member: Member
    signal: int
    text: str = ""


@dataclass
class Trouble:
    """The chaos of one job, or with `is_calm` the same job without it, to compare with.

    Attributes:
        folder: For the notes of the processes; exists.
        done: What was done so far.
        generations: How often the job has gone back; notes of earlier times are put aside.
    """

    seed: int
    request: Request
    folder: Path
    is_calm: bool = False
    pace: float = 4.0
    done: list[Fault] = field(default_factory=list)
    generations: int = 0

    def __post_init__(self) -> None:
        self._schedule = schedule(self.seed, self.request, self.pace)
        self._next = next(self._schedule)
        self._began: float | None = None
        self._endings: list[tuple[float, Fault]] = []

    @property
    def variables(self) -> dict[str, str]:
        """What the processes of the job are told."""
        network = {} if self.is_calm else _NETWORK
        settings = ChaosSettings(str(self.folder.absolute()), self.seed, **network)
        return {"PSFLEET_CHAOS": settings.text()}

    def due(self, at: float, living: set[Member], *, trains: bool) -> list[Strike]:
        """What is to be done at time `at`.

        Args:
            living: Processes that run; of servers those that answer, else one that is killed again
                and again before it is back would never be. (Tests kill servers while they recover.)
            trains: All of them do, and none is being started or stopped by somebody else.
        """
        if self.is_calm:
            return []
        if self._began is None:
            if not trains:
                return []
            self._began = at
        strikes = self._ended(at)
        while trains and self._began + self._next.at <= at:
            fault, self._next = self._next, next(self._schedule)
            if fault.member in living and not self._has_left(fault.member):
                self.done.append(fault)
                strikes += self._begin(fault, at)
        return strikes

    def went_back(self) -> None:
        """The job starts again from a snapshot: what was pushed since then is gone by design."""
        self.generations += 1
        aside = self.folder / f"generation-{self.generations}"
        aside.mkdir()
        for path in [*self.folder.glob("pushed.*"), *self.folder.glob("left.*")]:
            path.rename(aside / path.name)

    def said(self) -> list[dict[str, Any]]:
        """What was done, for a report."""
        return [{**asdict(fault), "member": str(fault.member)} for fault in self.done]

    def _has_left(self, member: Member) -> bool:
        """Whether it is a worker that is done: the fleet may end before it could come back."""
        return member.role == "worker" and (self.folder / f"left.{member.rank}").exists()

    def _begin(self, fault: Fault, at: float) -> list[Strike]:
        if fault.seconds:
            self._endings.append((at + fault.seconds, fault))
        if fault.kind == "full":
            self._mark(fault).touch()
            return [Strike(fault.member, 0, str(fault))]
        number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
        return [Strike(fault.member, number, str(fault))]

    def _ended(self, at: float) -> list[Strike]:
        over = [fault for end, fault in self._endings if end <= at]
        self._endings = [(end, fault) for end, fault in self._endings if end > at]
        for fault in over:
            if fault.kind == "full":
                self._mark(fault).unlink(missing_ok=True)
        return [Strike(fault.member, signal.SIGCONT) for fault in over if fault.kind == "pause"]

    def _mark(self, fault: Fault) -> Path:
        return self.folder / f"full.{fault.member.rank}"
