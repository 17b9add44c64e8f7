"""What happens to a shard, and what it asks its shell to do about it.

A `call` is whatever the shell uses to name an open request; the shard only hands it back.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import PsfleetError
from psfleet.runtime.interface import Gradient, Read
from psfleet.schema.table import TableSpec
from psfleet.settings.mode import Mode
from psfleet.shard.membership_view import Freeze, Install, Position, Report
from psfleet.shard.shard_snapshot import FrozenShard
from psfleet.shard.snapshot_cuts import Cutting
from psfleet.tables.row_data import Clock

__all__ = [
    "Answer",
    "BeginCut",
    "Call",
    "Close",
    "Create",
    "Cut",
    "EndCut",
    "Event",
    "Evict",
    "Expire",
    "Fill",
    "Instruction",
    "Join",
    "Journal",
    "Keep",
    "Leave",
    "MarkCut",
    "Outcome",
    "Pull",
    "Push",
    "Record",
    "Refuse",
    "Retry",
    "Serve",
    "Shrink",
    "State",
    "Tell",
    "Tick",
    "Write",
]

Call = Hashable
Outcome = Literal["applied", "held"]


@dataclass(frozen=True, slots=True)
class Join:
    """A worker's life begins, or goes on after a rest. Answered with the last round or sequence.

    Attributes:
        staleness: Ssp mode: how many pushes a worker may be ahead of the slowest.
        switch: 0, or n: all workers have met, nothing is under way, and from now on the fleet
            runs in this mode, which is its n-th change.
        last: With a change, the highest round or push of any worker before it.
    """

    worker: int
    incarnation: int
    mode: Mode
    staleness: int = 0
    switch: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class Leave:
    """A worker pushes no more after push `last`.

    With `rest` = n, the n-th rest of this life, it comes back once every other worker rests or has
    left too: that is how workers with unequal amounts of data meet at a barrier without holding back
    anyone's round.
    """

    worker: int
    incarnation: int
    last: int
    rest: int = 0


@dataclass(frozen=True, slots=True)
class Correction:
    """How a push that arrives late is corrected, see psfleet.shard.stale_gradients; 0: not at all."""

    damping: float = 0.0
    compensation: float = 0.0


@dataclass(frozen=True, slots=True)
class Push:
    """A worker's gradients for this shard: of its `sequence`-th push, or of round `sequence`.

    Sparse gradients carry unique ids; dense ones this server's slice. Every table of the push is
    named on every server, with no rows where none fall, so that all servers count the same steps.
    In geo mode it brings what is to be added to the weights.

    Attributes:
        clock: Ssp mode: the worker's pushes since all last met.
        cut: The last snapshot that the worker has marked, and its last push in it.
        position: Other modes than sync: how far the worker is with its data after this push.
        correction: Async, ssp and half-async mode: how it is corrected if it is late; None: as it is.
        progress: Other modes than sync: how far its script is, for its later lives; empty: not said.
    """

    worker: int
    incarnation: int
    sequence: int
    gradients: tuple[Gradient, ...]
    samples: int = 0
    loss: float | None = None
    clock: int = 0
    cut: tuple[int, int] | None = None
    position: Position | None = None
    correction: Correction | None = None
    progress: str = ""


@dataclass(frozen=True, slots=True)
class Pull:
    """A worker wants values.

    `commit` (sync mode): "every server holds my push of this round"; the pull waits for that round.
    `clock` (ssp mode): that of its last push; the pull waits for workers too far behind it.
    `keeps`: The server remembers the values, to compensate the delay of the push that comes of them.
    `progress` (sync mode): with a commit, how far the worker's script is, for its later lives.
    """

    worker: int
    incarnation: int
    reads: tuple[Read, ...]
    commit: int = 0
    clock: int = 0
    keeps: bool = False
    progress: str = ""


@dataclass(frozen=True, slots=True)
class Expire:
    """The deadline of a waiting call has passed."""


@dataclass(frozen=True, slots=True)
class State:
    """Weights and optimizer state of a part of a table.

    Attributes:
        values: Sparse: float32 [n, dim * (1 + slots)]. Dense: float32 [1 + slots, n].
        ids: Sparse: int64 [n]. Dense: None.
        step: Updates of the table so far.
        touched, scores: Sparse: as psfleet.tables.row_data.Rows has them. None: not known; the rows count
            as pushed by the last update, and as never shown.
        start: Dense: of this server's values the first one here.
    """

    table: int
    step: int
    values: NDArray[np.float32]
    ids: NDArray[np.int64] | None = None
    touched: NDArray[np.int64] | None = None
    scores: NDArray[np.float32] | None = None
    start: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """Parts of tables are set: by the `number`-th write of a worker's life, or by none (0)."""

    states: tuple[State, ...]
    worker: int = 0
    incarnation: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class Shrink:
    """Rows that are worth little or not in use go, see SparseTable.shrink. Answered with how many.

    Attributes:
        table: Its key; 0: every sparse table.
        number: As for Write, with which it shares the count.
    """

    table: int = 0
    threshold: float | None = None
    unseen: int | None = None
    worker: int = 0
    incarnation: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class Tick:
    """So many seconds have passed since the last tick, or since this process began."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Fill:
    """A part of a table as a snapshot holds it is set, with all that is known of it.

    Attributes:
        clock: Of the table.
        columns: As psfleet.tables.row_snapshot names them; `removed`: ids that are to go.
    """

    table: int
    clock: Clock
    columns: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class BeginCut:
    """A snapshot is wanted; one that was under way is given up. Answered with the last round."""

    cutting: Cutting


@dataclass(frozen=True, slots=True)
class MarkCut:
    """A worker's stream is cut after its push `last`."""

    number: int
    worker: int
    incarnation: int
    last: int


@dataclass(frozen=True, slots=True)
class Retry:
    """There may be room in the log again: do what had to wait for it."""


@dataclass(frozen=True, slots=True)
class EndCut:
    """A snapshot is complete, or given up.

    Attributes:
        base: Moments before that of this snapshot need not be remembered; 0: none need be.
    """

    number: int
    base: int = 0


Event = (
    Join
    | Leave
    | Push
    | Pull
    | Write
    | Shrink
    | Tick
    | Fill
    | BeginCut
    | MarkCut
    | EndCut
    | Retry
    | Expire
    | Freeze
    | Install
)


@dataclass(frozen=True, slots=True)
class Create:
    """A table is made with this server's part of its first value, for worker `maker` (None: nobody)."""

    spec: TableSpec
    value: NDArray[np.float32]
    maker: int | None = None


@dataclass(frozen=True, slots=True)
class Evict:
    """Memory is short: these rows of a table go."""

    table: int
    ids: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Close:
    """Sync mode: the round closes with the pushes that these seats have held for it.

    Attributes:
        progress: By seat how far its script was when it committed the push, if it has said so.
    """

    round: int
    members: tuple[int, ...]
    progress: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cut:
    """A snapshot holds the shard as it is here."""

    number: int


Record = Create | Join | Leave | Push | Write | Shrink | Tick | Evict | Fill | Close | Cut | Install
"""What changes a shard for good. The same records in the same order give the same shard."""

Journal = Callable[[Record], None]
"""Keeps a record before it takes effect."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Reply to `call`: for a push its outcome, for join and leave a number, for join a clock too."""

    call: Call
    outcome: Outcome | None = None
    number: int = 0
    clock: int = 0


@dataclass(frozen=True, slots=True)
class Serve:
    """Read the tables for `call` (see Tables.read) and reply with the values.

    `keeper`: The worker whose values are remembered, see Pull.keeps; None: they are not.
    """

    call: Call
    reads: tuple[Read, ...]
    keeper: int | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """Reply to `call` with this error; nothing was changed."""

    call: Call
    error: PsfleetError


@dataclass(frozen=True, slots=True)
class Keep:
    """Write this moment of the shard to a snapshot. Nobody's reply."""

    frozen: FrozenShard
    call: Call = None


@dataclass(frozen=True, slots=True)
class Tell:
    """Reply to `call`: where the shard stands now that it is frozen."""

    call: Call
    report: Report


Instruction = Answer | Serve | Refuse | Keep | Tell
