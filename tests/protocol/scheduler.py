"""A random scheduler for state machines without I/O: their network, their disks and their faults.

A machine takes an event and returns instructions, which are performed in order. The scheduler delivers
messages in any order, loses and repeats them, lets clocks tick, and kills machines: between two events,
or between two instructions of one. A seed says all of it, so a run can be repeated, and with some of
its faults left out.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Struct

_CROWDED = 150  # messages in flight; more are lost
_OLD = 400  # messages that may turn up again very late


class Broken(Exception):
    """An invariant does not hold."""


# -- events and instructions --------------------------------------------------------------------


class Boot(Struct, frozen=True):
    """The process has started."""


class Tick(Struct, frozen=True):
    """Time has passed: send again what has not been answered."""


class Received(Struct, frozen=True):
    """A message has come."""

    source: str
    message: Any


class Append(Struct, frozen=True):
    """Add a record to the log."""

    record: Any


class Store(Struct, frozen=True):
    """Replace these fields on the disk, all of them or none; the field "log" is the log."""

    fields: dict[str, Any]


class WriteFile(Struct, frozen=True):
    """Write a whole file."""

    name: Any
    content: Any


class Send(Struct, frozen=True):
    """Send a message, which may be lost, doubled or late."""

    to: str
    message: Any


class Die(Struct, frozen=True):
    """End, and be started again by the launcher."""


Instruction = Append | Store | WriteFile | Send | Die


class Machine(Protocol):
    """A state machine. What it knows after a crash is what is on its disk."""

    def handle(self, event: Any) -> list[Instruction]:
        """Take an event; what is to be done about it, in order."""


@dataclass
class Disk:
    """What survives a machine: a log, fields that are replaced at once, files."""

    log: list[Any] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    files: dict[Any, Any] = field(default_factory=dict)

    def perform(self, instruction: Append | Store | WriteFile) -> None:
        """Change the disk."""
        match instruction:
            case Append(record):
                self.log.append(record)
            case Store(fields):
                self.fields.update({k: v for k, v in fields.items() if k != "log"})
                self.log = list(fields.get("log", self.log))
            case WriteFile(name, content):
                self.files[name] = content


@dataclass(frozen=True)
class Chances:
    """What may go wrong, and how often.

    Attributes:
        steps: Of the scheduler while there are faults.
        deliver: Below this a message is delivered, above it a clock ticks.
        drop, duplicate: Of a delivery.
        fault: That a step is one of `Scheduler.random_fault`.
        torn: That a machine dies between two instructions.
        old: That a step delivers a message from long ago once more.
        decisive: How many times as often a machine dies within a decision: these are rare and worth
            more than their share.
    """

    steps: int = 300
    deliver: float = 0.9
    drop: float = 0.1
    duplicate: float = 0.1
    fault: float = 0.015
    torn: float = 0.001
    old: float = 0.01
    decisive: float = 5.0

    @classmethod
    def drawn(cls, dice: random.Random, **fixed: Any) -> "Chances":
        """Random chances, but for those that are given."""
        drawn = {
            "steps": dice.choice([300, 800, 2000]),
            "deliver": dice.choice([0.85, 0.93]),
            "drop": dice.choice([0, 0.05, 0.2]),
            "duplicate": dice.choice([0, 0.1, 0.3]),
            "fault": dice.choice([0.004, 0.015, 0.05]),
            "torn": dice.choice([0, 0.001, 0.006]),
            "old": dice.choice([0, 0.01, 0.04]),
        }
        return cls(**{**drawn, **fixed})


# -- the scheduler ------------------------------------------------------------------------------


class Scheduler:
    """One run. A subclass makes the machines and says what must hold.

    Args:
        names: Of the machines; each has a disk.
        suppressed: Numbers of faults that are left out this time.

    Attributes:
        faults: What was done to the machines: step and name, in order.
        counts: Of faults by kind, and what else is worth counting.
        patience: Turns without faults in which everything must end.
    """

    patience = 600

    def __init__(
        self, names: Iterable[str], chances: Chances, seed: object, suppressed: Iterable[int] = ()
    ) -> None:
        self.names = list(names)
        self.chances = chances
        self.dice = random.Random(f"{seed}")
        self.disks = {name: self.first_disk(name) for name in self.names}
        self.boots = dict.fromkeys(self.names, 0)
        self.machines: dict[str, Any] = {}
        self.crashed: set[str] = set()
        self.network: list[tuple[str, str, Any]] = []
        self.faults: list[tuple[int, str]] = []
        self.counts: Counter[str] = Counter()
        self.step = 0
        self.is_calm = False
        self._old: list[tuple[str, str, Any]] = []
        self._suppressed = set(suppressed)

    # -- what a subclass says ------------------------------------------------------------------

    def first_disk(self, name: str) -> Disk:
        """The disk of a machine before its first start."""
        return Disk()

    def make(self, name: str, disk: Disk, boot: int) -> Machine:
        """The machine of that name, started for the `boot`-th time."""
        raise NotImplementedError

    def random_fault(self) -> None:
        """Do something to some machine."""
        raise NotImplementedError

    def at(self, address: str, source: str = "") -> str:
        """The machine that gets what another one sends to this address."""
        return address

    def is_closed(self, source: str, to: str) -> bool:
        """Whether what one machine has sent to the other is lost for good."""
        return False

    def lose(self, to: str, source: str, message: Any) -> None:
        """A message gets lost."""

    def may_die(self, name: str) -> bool:
        """Whether a machine may die between two instructions."""
        return True

    def sent(self, source: str, to: str, message: Any) -> None:
        """A message leaves a machine: remember what it promises."""

    def calm(self) -> None:
        """No more faults: bring everything back."""
        for name in sorted(self.crashed):
            self.start(name)

    def nudge(self, turn: int) -> None:
        """Do what somebody outside would, in a turn without faults."""

    def is_over(self) -> bool:
        """Whether all work is done."""
        raise NotImplementedError

    def describe(self) -> str:
        """For whoever looks for the reason of a hang."""
        return ""

    def check(self) -> None:
        """Raise Broken if what must hold at the end does not."""

    # -- running -------------------------------------------------------------------------------

    def run(self) -> None:
        """Faults for some steps, then none until all is over.

        Raises:
            Broken: Something that must hold does not, or the work does not end.
        """
        for name in self.names:
            self.start(name)
        for step in range(self.chances.steps):
            self.step = step
            self._one_step()
            while len(self.network) > _CROWDED:
                self.network.pop(self.dice.randrange(len(self.network)))
        self.is_calm = True
        self.calm()
        for turn in range(self.patience):
            self._calm_turn(turn)
            if turn > 8 and self.is_over():
                break
        else:
            raise Broken(f"it does not end: {self.describe()}")
        self.check()

    def _one_step(self) -> None:
        dice, chances = self.dice, self.chances
        at = dice.random()
        if at < chances.fault:
            self.random_fault()
        elif at < chances.fault + 0.02 and self.crashed:
            self.start(dice.choice(sorted(self.crashed)))
        elif at > 1 - chances.old and self._old:
            self._deliver(*dice.choice(self._old))
        elif at < chances.deliver and self.network:
            place = dice.randrange(len(self.network))
            if dice.random() < chances.drop:
                self.lose(*self.network.pop(place))
            elif dice.random() < chances.duplicate:
                self._deliver(*self.network[place])
            else:
                self._deliver(*self.network.pop(place))
        else:
            self.do(dice.choice(self.names), Tick())

    def _calm_turn(self, turn: int) -> None:
        flying, self.network = self.network, []
        self.dice.shuffle(flying)
        for message in flying:
            self._deliver(*message)
        if turn % 4 == 0:
            for name in self.names:
                self.do(name, Tick())
            self.nudge(turn)

    def _deliver(self, to: str, source: str, message: Any) -> None:
        if not self.is_closed(source, to):
            self.do(self.at(to, source), Received(source, message))

    def do(self, name: str, event: Any) -> None:
        """Let a machine take an event, and perform what it wants; it may die meanwhile."""
        if name not in self.machines:
            return
        instructions = self.machines[name].handle(event)
        dies = (
            not self.is_calm
            and self.dice.random() < self._torn(name, instructions)
            and self.may_die(name)
            and self.fault(f"{name} dies within {type(event).__name__}")
        )
        last = self.dice.randrange(len(instructions) + 1) if dies else len(instructions)
        self.counts["torn"] += dies
        for instruction in instructions[:last]:
            if isinstance(instruction, Die):
                self.crash(name)
                self.start(name)
                return
            if isinstance(instruction, Send):
                self._send(name, instruction)
            else:
                self.disks[name].perform(instruction)
        if dies:
            self.crash(name)

    def _torn(self, name: str, instructions: list[Instruction]) -> float:
        decides = any(isinstance(instruction, Store) for instruction in instructions)
        return self.chances.torn * (self.chances.decisive if decides else 1)

    def _send(self, source: str, send: Send) -> None:
        self.sent(source, send.to, send.message)
        self.network.append((send.to, source, send.message))
        if not self.is_calm and self.chances.old:
            if len(self._old) < _OLD:
                self._old.append(self.network[-1])
            elif self.dice.random() < 0.3:
                self._old[self.dice.randrange(_OLD)] = self.network[-1]

    def start(self, name: str) -> None:
        """Start a machine from its disk."""
        self.boots[name] += 1
        self.crashed.discard(name)
        self.machines[name] = self.make(name, self.disks[name], self.boots[name])
        self.do(name, Boot())

    def crash(self, name: str) -> None:
        """Kill a machine; its disk is kept."""
        self.crashed.add(name)
        self.machines.pop(name, None)

    def fault(self, what: str) -> bool:
        """Note a fault; False: this one is left out."""
        number = len(self.faults)
        self.faults.append((self.step, what))
        return number not in self._suppressed


def run(make: Callable[[Iterable[int]], Scheduler], without: Iterable[int] = ()) -> Scheduler:
    """Run what `make` makes.

    Raises:
        Broken: An invariant does not hold, or a machine fails.
    """
    scheduler = make(without)
    try:
        scheduler.run()
    except Broken as error:
        raise Broken(f"{error} (after {len(scheduler.faults)} faults)") from error
    except Exception as error:  # whatever it is, a machine must not end like that
        raise Broken(f"a machine fails: {error!r}") from error
    return scheduler


def shrink(make: Callable[[Iterable[int]], Scheduler], tries: int = 60) -> list[tuple[int, str]]:
    """The faults of a failing run that it does not fail without, as far as `tries` runs can tell."""

    def fails(without: set[int]) -> list[tuple[int, str]] | None:
        scheduler = make(without)
        try:
            scheduler.run()
        except Exception:
            return scheduler.faults
        return None

    left_out: set[int] = set()
    faults = fails(left_out) or []
    for number in reversed(range(len(faults))[-tries:]):
        fewer = fails(left_out | {number})
        if fewer is not None:
            left_out.add(number)
            faults = fewer
    return [fault for number, fault in enumerate(faults) if number not in left_out]
