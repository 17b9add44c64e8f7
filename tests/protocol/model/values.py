"""Values of the model: who is in which round, which samples are whose, and what a log makes of a shard."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = [
    "Close",
    "Closed",
    "Core",
    "Cut",
    "CutNumber",
    "Hold",
    "Key",
    "Life",
    "Plan",
    "Position",
    "Push",
    "Record",
    "Roster",
    "Samples",
    "Stretch",
    "View",
    "digest",
    "key_of",
    "left_at",
    "live",
    "members",
    "open_life",
    "samples_of",
    "stretch_at",
]

View = tuple[int, int]
Key = tuple[str, int]
"""A seat and an incarnation."""
Samples = tuple[int, ...]
Position = tuple[int, int] | None
"""Of the data in async mode: lease and offset."""
CutNumber = tuple[Any, ...]
"""("r", generation, round) or ("a", coordinator's start, number)."""
Gradients = dict[int, int]


def digest(*parts: object) -> int:
    """64 bits that depend on every part and on their order."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


# -- roster and plan ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """One life in a seat. `incarnation` None: the seat is vacant. `last` None: it goes on."""

    incarnation: int | None
    first: int
    last: int | None = None

    def includes(self, number: int) -> bool:
        """Whether it counts in that round."""
        return self.first <= number and (self.last is None or number <= self.last)


Roster = dict[str, tuple[Life, ...]]


def open_life(roster: Roster, seat: str) -> Life | None:
    """The life of the seat that goes on; None: it is removed."""
    lives = roster.get(seat, ())
    return lives[-1] if lives and lives[-1].last is None else None


def members(roster: Roster, number: int) -> dict[str, Life]:
    """Who makes up round `number`."""
    return {seat: life for seat, lives in roster.items() for life in lives if life.includes(number)}


def live(roster: Roster) -> dict[str, int | None]:
    """Every live seat and its incarnation, None for a vacant one."""
    return {
        seat: life.incarnation for seat in roster if (life := open_life(roster, seat)) is not None
    }


@dataclass(frozen=True)
class Stretch:
    """From round `first` on `seats` take their samples from `stream`, in seat order, or stop."""

    first: int
    seats: tuple[str, ...]
    stream: Samples
    stops: bool = False


Plan = tuple[Stretch, ...]


def stretch_at(plan: Plan, number: int) -> Stretch:
    """The stretch of the plan in which the round lies."""
    return [stretch for stretch in plan if stretch.first <= number][-1]


def samples_of(plan: Plan, number: int, seat: str, batch: int) -> Samples:
    """Samples of a seat in a round: a function of the plan alone (R3)."""
    stretch = stretch_at(plan, number)
    if seat not in stretch.seats:
        return ()
    turn = (number - stretch.first) * len(stretch.seats) + stretch.seats.index(seat)
    return stretch.stream[turn * batch : (turn + 1) * batch]


def left_at(plan: Plan, number: int, batch: int) -> Samples:
    """Samples that no round before `number` uses."""
    stretch = stretch_at(plan, number)
    return stretch.stream[(number - stretch.first) * len(stretch.seats) * batch :]


# -- the log and what it makes ------------------------------------------------------------------


@dataclass(frozen=True)
class Hold:
    """Sync mode: a push is held for its round."""

    round: int
    seat: str
    incarnation: int
    gradients: Gradients
    samples: Samples


@dataclass(frozen=True)
class Close:
    """Sync mode: the round closes with these members."""

    round: int
    members: tuple[Key, ...]


@dataclass(frozen=True)
class Push:
    """A push that is applied at once.

    `seen`: of each shard the generation and length of the history that the gradient is computed from.
    """

    seat: str
    incarnation: int
    sequence: int
    gradients: Gradients
    samples: Samples
    position: Position
    seen: dict[int, tuple[int, int]]
    clock: int


@dataclass(frozen=True)
class Cut:
    """A snapshot holds what is before."""

    number: CutNumber
    view: View


@dataclass(frozen=True)
class Closed:
    """What a closed round was, for the checks."""

    round: int
    members: tuple[Key, ...]
    samples: Samples


Record = Hold | Close | Push | Cut


def key_of(record: Record) -> tuple[Any, ...]:
    """Who waits for the record."""
    match record:
        case Hold(number, seat, incarnation):
            return ("hold", number, seat, incarnation)
        case Push(seat, incarnation, sequence):
            return ("push", seat, incarnation, sequence)
        case Close(number):
            return ("close", number)
        case Cut(number):
            return ("cut", number)


@dataclass
class Core:
    """The replicated part of a shard: a function of its log and of nothing else.

    Updates are hash chains, so that a wrong version, order, member or sample changes the final value.
    """

    blocks: dict[int, int]
    closed: int = 0
    held: dict[tuple[int, str, int], Hold] = field(default_factory=dict)
    sequences: dict[Key, tuple[int, Position]] = field(default_factory=dict)
    clocks: dict[Key, int] = field(default_factory=dict)
    history: list[Closed | Push] = field(default_factory=list)

    @classmethod
    def fresh(cls, blocks: Iterable[int]) -> "Core":
        """Before the first record."""
        return cls({block: digest("init", block) for block in blocks})

    def copy(self) -> "Core":
        """What later records do not change."""
        return replace(
            self,
            blocks=dict(self.blocks),
            held=dict(self.held),
            sequences=dict(self.sequences),
            clocks=dict(self.clocks),
            history=list(self.history),
        )

    def apply(self, record: Record) -> None:
        """Let a record take effect."""
        match record:
            case Hold():
                self.held[record.round, record.seat, record.incarnation] = record
            case Close():
                self._close(record)
            case Push():
                for block in self.blocks:
                    self.blocks[block] = digest(
                        self.blocks[block],
                        record.seat,
                        record.incarnation,
                        record.sequence,
                        record.gradients[block],
                    )
                key = (record.seat, record.incarnation)
                self.clocks[key] = record.clock
                self.sequences[key] = (record.sequence, record.position)
                self.history.append(record)
            case Cut():
                pass

    def _close(self, close: Close) -> None:
        assert close.round == self.closed + 1
        parts = [self.held[close.round, *key] for key in sorted(close.members)]
        if any(part.samples for part in parts):
            for block in self.blocks:
                terms = tuple((part.seat, part.gradients[block]) for part in parts)
                self.blocks[block] = digest(self.blocks[block], terms)
        samples = tuple(sample for part in parts for sample in part.samples)
        self.history.append(Closed(close.round, tuple(sorted(close.members)), samples))
        self.held = {key: hold for key, hold in self.held.items() if key[0] > close.round}
        self.closed = close.round
