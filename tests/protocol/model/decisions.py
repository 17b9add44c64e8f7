"""What the coordinator of the model has on its disk, and how decisions change it."""

from dataclasses import dataclass, field

from tests.protocol.model.settings import Mode, Rule, Settings
from tests.protocol.model.values import (
    CutNumber,
    Key,
    Life,
    Plan,
    Position,
    Roster,
    Samples,
    Stretch,
    View,
    left_at,
    stretch_at,
)

__all__ = ["FINISHED", "Decisions", "Leases", "Pair", "Snapshot", "chunks"]

FINISHED = -1
"""In place of an incarnation: the training is over for this process."""
_CHUNK = 4


@dataclass
class Pair:
    """The servers of a shard.

    Attributes:
        standby: Its name and attachment, if it is registered.
        attachment: The highest one given out; `floor`: those up to here are dropped.
    """

    primary: str
    standby: tuple[str, int] | None
    term: int
    attachment: int
    floor: int = 0


@dataclass
class Leases:
    """Data handed to one life, in order. `done` of them are acknowledged everywhere."""

    chunks: list[Samples] = field(default_factory=list)
    done: int = 0
    is_open: bool = True


@dataclass(frozen=True)
class Snapshot:
    """A complete snapshot."""

    closed: int
    sequences: dict[Key, tuple[int, Position]]
    generation: int
    torn: dict[Key, dict[int, int]]
    live: dict[str, int | None]


def chunks(samples: Samples) -> list[Samples]:
    """The samples in leases."""
    return [samples[i : i + _CHUNK] for i in range(0, len(samples), _CHUNK)]


@dataclass
class Decisions:
    """Everything the coordinator remembers. Stored whole before anything of it is told.

    Attributes:
        starts: Of the coordinator; the first half of its views.
        boots: Of servers. `processes`: of each seat, the process and its incarnation or FINISHED.
        wanted: The mode that was asked for.
        pool: Data that nobody has (async).
        torn: Lives whose last push only some servers have: the last of each.
        left: Lives that have said goodbye.
    """

    settings: Settings
    pairs: dict[int, Pair]
    roster: Roster
    plan: Plan
    pool: list[Samples]
    mode: Mode
    starts: int = 0
    view: View = (0, 0)
    generation: int = 0
    base: CutNumber | None = None
    boots: dict[str, int] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=dict)
    processes: dict[str, tuple[int, int]] = field(default_factory=dict)
    snapshots: dict[CutNumber, Snapshot] = field(default_factory=dict)
    wanted: Mode | None = None
    leases: dict[Key, Leases] = field(default_factory=dict)
    torn: dict[Key, dict[int, int]] = field(default_factory=dict)
    left: set[Key] = field(default_factory=set)

    @classmethod
    def first(cls, settings: Settings) -> "Decisions":
        """Before anything has happened: the seats of the configuration, vacant."""
        every = tuple(range(settings.samples))
        attachment = 1 if settings.standby else 0
        return cls(
            settings,
            {
                shard: Pair(
                    f"S{shard}.0", (f"S{shard}.1", 1) if settings.standby else None, 1, attachment
                )
                for shard in range(settings.shards)
            },
            {seat: (Life(None, 1),) for seat in settings.seats} if settings.mode == "sync" else {},
            (Stretch(1, tuple(sorted(settings.seats)), every),),
            chunks(every),
            settings.mode,
        )

    def seat(self, seat: str, boot: int, first: int) -> None:
        """A process takes a seat: an incarnation that was never used."""
        incarnation = self.incarnations.get(seat, 0) + 1
        self.incarnations[seat] = incarnation
        self.processes[seat] = (boot, incarnation)
        self.roster[seat] = (*self.roster.get(seat, ()), Life(incarnation, first))

    def take_back(self, key: Key, position: Position) -> None:
        """What is left of a life's leases behind its position is dealt again."""
        leases = self.leases.get(key)
        if leases is None:
            return
        leases.is_open = False
        at, offset = position or (0, 0)
        for number, chunk in enumerate(leases.chunks):
            rest = chunk[offset:] if number == at else chunk if number > at else ()
            if rest and self.settings.obeys(Rule.LEASE_BACK):
                self.pool.append(rest)

    def roll_back(self) -> None:
        """The fleet goes back to the last complete snapshot."""
        self.generation += 1
        name = next(reversed(self.snapshots), None)
        self.base = name
        base = self.snapshots[name] if name else Snapshot(0, {}, 0, {}, {})
        if self.settings.obeys(Rule.FINISHED_ENDS):
            for seat, (boot, incarnation) in self.processes.items():
                if incarnation == FINISHED:
                    self.processes[seat] = (boot, 0)
        if self.mode == "sync":
            self._roll_back_rounds(base.closed)
        else:
            self._roll_back_leases(base)

    def _roll_back_rounds(self, closed: int) -> None:
        seats = stretch_at(self.plan, closed + 1).seats
        rest = left_at(self.plan, closed + 1, self.settings.batch)
        earlier = tuple(stretch for stretch in self.plan if stretch.first <= closed)
        self.plan = (*earlier, Stretch(closed + 1, seats, rest))
        for seat, lives in self.roster.items():
            self.roster[seat] = tuple(
                Life(
                    life.incarnation,
                    life.first,
                    closed if life.last is None else min(life.last, closed),
                )
                for life in lives
                if life.incarnation is not None and life.first <= closed
            )
        for seat in seats:
            self.roster[seat] = (*self.roster.get(seat, ()), Life(None, closed + 1))

    def _roll_back_leases(self, base: Snapshot) -> None:
        for seat, lives in self.roster.items():
            ended = [Life(x.incarnation, x.first, 0 if x.last is None else x.last) for x in lives]
            if ended and ended[-1].incarnation is None:
                ended.pop()
            self.roster[seat] = tuple(ended)
        used: set[int] = set()
        for key, leases in self.leases.items():
            at, offset = base.sequences.get(key, (0, None))[1] or (-1, 0)
            for number, chunk in enumerate(leases.chunks):
                used |= set(chunk if number < at else chunk[:offset] if number == at else ())
            leases.is_open = False
        self.pool = chunks(tuple(x for x in range(self.settings.samples) if x not in used))
        self.torn = dict(base.torn)
        self.left = set()
