"""What servers, workers and the coordinator of the model say to each other."""

from dataclasses import dataclass
from typing import Any

from tests.protocol.model.settings import Mode
from tests.protocol.model.values import (
    Core,
    CutNumber,
    Key,
    Plan,
    Position,
    Record,
    Roster,
    Samples,
    View,
)

Call = tuple[Any, ...]
"""Names a call; its answers name it too."""
Mark = tuple[CutNumber, View, int]
"""A snapshot, the view in which it is taken, and the last push before it."""

# -- workers to servers -------------------------------------------------------------------------


@dataclass(frozen=True)
class PushCall:
    """A gradient for round or sequence `number`."""

    call: Call
    seat: str
    incarnation: int
    number: int
    gradients: dict[int, int]
    samples: Samples
    term: int = 0
    position: Position = None
    seen: dict[int, tuple[int, int]] | None = None
    mark: Mark | None = None
    clock: int = 0


@dataclass(frozen=True)
class PullCall:
    """Wants values of round or clock `number`; `commit`: every server holds the push of the round."""

    call: Call
    seat: str
    incarnation: int
    number: int
    commit: bool
    term: int = 0


@dataclass(frozen=True)
class MarkNote:
    """The stream of a worker is cut here."""

    seat: str
    incarnation: int
    mark: Mark
    term: int = 0


@dataclass(frozen=True)
class IdleNote:
    """After push `last` the worker waits for data."""

    seat: str
    incarnation: int
    last: int
    term: int = 0


# -- answers to workers -------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """The push is durable and counts if the round includes its life."""

    call: Call
    shard: int


@dataclass(frozen=True)
class Applied:
    """The push has taken effect."""

    call: Call
    shard: int


@dataclass(frozen=True)
class Values:
    """Weights of a shard, after round `version` (sync) or `length` entries of its history."""

    call: Call
    shard: int
    version: int
    blocks: dict[int, int]
    plan: Plan
    length: int
    generation: int
    clocks: dict[str, int] | None


@dataclass(frozen=True)
class Seated:
    """The worker has a seat from `first` on (round, or ssp clock)."""

    call: Call
    incarnation: int
    first: int
    mode: Mode


@dataclass(frozen=True)
class Leased:
    """The `number`-th part of the data of a life."""

    call: Call
    chunk: Samples


@dataclass(frozen=True)
class Ended:
    """There is nothing left to train."""

    call: Call


@dataclass(frozen=True)
class Fenced:
    """The life is over."""

    call: Call
    incarnation: int


@dataclass(frozen=True)
class Gap:
    """A push before this one has not come."""

    call: Call


Answer = Held | Applied | Values | Seated | Leased | Ended | Fenced | Gap

# -- workers and the coordinator ----------------------------------------------------------------


@dataclass(frozen=True)
class Register:
    """A process has started."""

    call: Call
    seat: str
    boot: int


@dataclass(frozen=True)
class Next:
    """Wants the `number`-th lease of its life."""

    call: Call
    seat: str
    incarnation: int
    number: int


@dataclass(frozen=True)
class Alive:
    """A beat."""

    seat: str
    incarnation: int


@dataclass(frozen=True)
class Leave:
    """The worker is done."""

    seat: str
    incarnation: int


@dataclass(frozen=True)
class Drained:
    """Nothing of the worker is under way."""

    call: Call
    seat: str
    incarnation: int
    boot: int


@dataclass(frozen=True)
class AskMap:
    """Wants to know who serves which shard."""


@dataclass(frozen=True)
class Map:
    """Of each shard its term and primary."""

    primaries: dict[int, tuple[int, str]]


@dataclass(frozen=True)
class SnapshotWanted:
    """A snapshot is taken; mark it."""

    number: CutNumber
    view: View
    incarnation: int


@dataclass(frozen=True)
class Drain:
    """Finish your pushes: the mode changes."""

    incarnation: int


# -- servers and the coordinator ----------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """A beat of a server; `caught_up`: a standby that has everything, and its attachment."""

    name: str
    shard: int
    boot: int
    caught_up: tuple[str, int] | None


@dataclass(frozen=True)
class Freeze:
    """Close nothing, refuse `removed`, and report."""

    view: View
    term: int
    boot: int
    standby: tuple[str, int] | None
    floor: int
    removed: tuple[Key, ...]


@dataclass(frozen=True)
class Report:
    """What a frozen server holds."""

    view: View
    shard: int
    term: int
    generation: int
    lost: bool
    closed: int
    commits: dict[Key, int]
    sequences: dict[Key, tuple[int, Position]]
    clocks: dict[Key, int]
    standby: tuple[str, int] | None


@dataclass(frozen=True)
class Install:
    """The view in force. `attach`: begin to keep this standby. `base`: where a generation begins."""

    view: View
    term: int
    boot: int
    generation: int
    base: CutNumber | None
    roster: Roster
    plan: Plan
    mode: Mode
    attach: tuple[str, int] | None


@dataclass(frozen=True)
class Installed:
    """The view has come."""

    view: View
    shard: int


@dataclass(frozen=True)
class SnapshotDone:
    """A server has written its part."""

    number: CutNumber
    view: View | None
    shard: int
    generation: int
    term: int
    sequences: dict[Key, tuple[int, Position]]
    closed: int


@dataclass(frozen=True)
class SnapshotNoted:
    """That is known."""

    number: CutNumber


# -- primary and standby ------------------------------------------------------------------------


@dataclass(frozen=True)
class Replicate:
    """Records from `start` on; `full`: all of them, and what they begin with."""

    term: int
    attachment: int
    start: int
    records: tuple[Record, ...]
    generation: int
    full: bool = False
    base: Core | None = None


@dataclass(frozen=True)
class Replicated:
    """The standby has so many records."""

    attachment: int
    length: int
