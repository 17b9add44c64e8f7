"""Events that a shard handles, records that it logs, and instructions that it returns.

Server code turns requests into events and carries out the instructions; the shard does no I/O. A `call`
identifies an open request for that code, and the shard only returns it. A record is a change that must
survive the process; some events are records too. The messages on the wire are in protos/psfleet/v1.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import PsfleetError
from psfleet.core.base.memory import value_class
from psfleet.core.engine.consistency import ConsistencyMode
from psfleet.core.engine.interface import Gradient, Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.membership_view import InstallView, Position, PrepareView, ViewReport
from psfleet.core.engine.shard.snapshot_cuts import PendingCut
from psfleet.core.engine.tables.row_data import TableClock

if TYPE_CHECKING:
    from psfleet.core.engine.shard.shard_state import ShardState
    from psfleet.core.engine.tables.row_snapshot import (
        FrozenTable,  # workers have events, but no tables
    )


Call = Hashable
Outcome = Literal["applied", "held"]


@dataclass(frozen=True)
class FrozenShard:
    """A shard as it was at one moment, for a snapshot or a standby. Read it once, then close it.

    Attributes:
        number: Number of the cut, or 0 if no snapshot was asked for.
        index, servers: Number of the shard's server, and number of all servers.
        tables: Images of the tables.
        state: State of the shard without its tables.
        mode, round: Mode and round of the fleet.
        pushes: For each seat its incarnation and the last push that the image contains.
        since: Number of the cut since which the tables contain the changes, or 0 if they contain all rows.
    """

    number: int
    index: int
    servers: int
    tables: "Sequence[FrozenTable]"
    state: "ShardState"
    mode: str = ""
    round: int = 0
    pushes: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    since: int = 0

    def close(self) -> None:
        """Release the images of the tables, which then no longer copy rows before they change."""
        for table in self.tables:
            table.close()


@value_class
class Join:
    """An incarnation of a worker begins, or continues after a rest. The reply has its last round or sequence.

    Attributes:
        mode: Mode of the fleet, with the settings that servers know.
        switch: Number of a mode switch: all workers have arrived with nothing in flight, and from now on
            the fleet runs in `mode`. 0 if the worker joins without a switch.
        last: With a switch, the highest round or push of any worker before it.
    """

    worker: int
    incarnation: int
    mode: ConsistencyMode
    switch: int = 0
    last: int = 0


@value_class
class Leave:
    """A worker makes no push after push `last`: it leaves or rests.

    With `rest` = n, the n-th rest of this incarnation, the worker returns once every other worker rests or
    has left too. So workers with unequal amounts of data can wait at a barrier without delaying the rounds
    of workers that still have data.
    """

    worker: int
    incarnation: int
    last: int
    rest: int = 0


@value_class
class Push:
    """A worker's gradients for this shard: of its `sequence`-th push, or of round `sequence`.

    Sparse gradients carry unique ids; dense ones this server's slice. Every table of the push is
    named on every server that holds it, with no rows where none fall, so that all count the same steps.
    In a mode that adds deltas, `gradients` are the deltas to add to the weights.

    Attributes:
        clock: Ssp mode: the worker's pushes since the last collective.
        cut: The last snapshot that the worker has marked, and the worker's last push in it.
        position: Every mode but sync: the worker's position in its leases after this push.
        progress: Every mode but sync: loop position of the worker's script, or empty if it is not known.
        skipped: Number of pushes just before this one that were not sent to this server.
        addressed: On server 0, for each server the last push that was sent to it. Empty if this push was
            sent to all servers.
        withdrawn: True for the empty push that takes the place of one that a server has refused.
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
    progress: str = ""
    skipped: int = 0
    addressed: tuple[int, ...] = ()
    withdrawn: bool = False

    @property
    def follows(self) -> int:
        """Number of the worker's push before this one that was sent to this server."""
        return self.sequence - 1 - self.skipped


@value_class
class Pull:
    """A worker asks for values of tables.

    Attributes:
        reads: Ids or whole parts to read, by table.
        commit: Sync mode: "every server holds my push of this round". The pull waits for that round.
        clock: Ssp mode: clock of the worker's last push. The pull waits for workers too far behind it.
        progress: Sync mode: with a commit, the loop position of the script, for later incarnations.
    """

    worker: int
    incarnation: int
    reads: tuple[Read, ...]
    commit: int = 0
    clock: int = 0
    progress: str = ""


@value_class
class Expire:
    """The deadline of a waiting call has passed."""


@value_class
class PartState:
    """Weights and optimizer state of a part of a table.

    Attributes:
        values: Sparse: float32 [n, dim * (1 + slots)]. Dense: float32 [1 + slots, n].
        ids: Sparse: int64 [n]. Dense: None.
        step: Updates of the table so far.
        touched, scores: Sparse: as in psfleet.core.engine.tables.row_data.RowData. None if they are not
            known; the rows then count as pushed by the last update, and as never shown.
        start: Offset of the first value within this server's range (dense tables only).
    """

    table: int
    step: int
    values: NDArray[np.float32]
    ids: NDArray[np.int64] | None = None
    touched: NDArray[np.int64] | None = None
    scores: NDArray[np.float32] | None = None
    start: int = 0


@value_class
class WriteState:
    """Set parts of tables: the `number`-th write of an incarnation, or of no worker (0)."""

    states: tuple[PartState, ...]
    worker: int = 0
    incarnation: int = 0
    number: int = 0


@value_class
class Shrink:
    """Remove rows with low scores or out of use, see SparseTable.shrink. The reply has their number.

    Attributes:
        table: Key of the table, or 0 for every sparse table.
        number: Number as for WriteState; both are counted together.
    """

    table: int = 0
    threshold: float | None = None
    unseen: int | None = None
    worker: int = 0
    incarnation: int = 0
    number: int = 0


@value_class
class Tick:
    """Time has passed, in seconds since the last tick or the start of this process."""

    seconds: float


@value_class
class RestorePart:
    """Restore a part of a table from a snapshot.

    Attributes:
        clock: Clock of the table.
        columns: Columns of psfleet.core.engine.tables.row_data; `removed`: ids to remove.
    """

    table: int
    clock: TableClock
    columns: Mapping[str, NDArray[Any]]


@value_class
class BeginCut:
    """Begin a snapshot and abandon an earlier incomplete one. The reply has the last round."""

    cutting: PendingCut


@value_class
class MarkCut:
    """A worker's stream is cut after its push `last`.

    Attributes:
        addressed: The last push up to `last` that was sent to this server, or None if that is `last` itself.
    """

    number: int
    worker: int
    incarnation: int
    last: int
    addressed: int | None = None


@value_class
class RetryRoom:
    """The log may have room again: retry what waited for it."""


@value_class
class EndCut:
    """A snapshot is complete or abandoned.

    Attributes:
        base: Oldest snapshot that later deltas may refer to. 0 drops all delta bases.
    """

    number: int
    base: int = 0


Event = (
    Join
    | Leave
    | Push
    | Pull
    | WriteState
    | Shrink
    | Tick
    | RestorePart
    | BeginCut
    | MarkCut
    | EndCut
    | RetryRoom
    | Expire
    | PrepareView
    | InstallView
)


@value_class
class CreateTable:
    """Create a table with this server's part of its first value, for worker `maker` if that is not None."""

    spec: TableSpec
    value: NDArray[np.float32]
    maker: int | None = None


@value_class
class Evict:
    """Evict these rows of a table, because memory is short."""

    table: int
    ids: NDArray[np.int64]


@value_class
class CloseRound:
    """Sync mode: close the round with the held pushes of these seats.

    Attributes:
        progress: By seat the loop position of its script when it committed the push, if known.
    """

    round: int
    members: tuple[int, ...]
    progress: Mapping[int, str] = field(default_factory=dict)


@value_class
class MakeCut:
    """The cut of a snapshot: it holds the shard as it is at this record."""

    number: int


Record = (
    CreateTable
    | Join
    | Leave
    | Push
    | WriteState
    | Shrink
    | Tick
    | Evict
    | RestorePart
    | CloseRound
    | MakeCut
    | InstallView
)
"""A durable change of a shard. The same records in the same order give the same shard."""

Journal = Callable[[Record], None]
"""Stores a record before it takes effect."""


@value_class
class SendOutcome:
    """Reply to `call`: for a push its outcome, for join and leave a number, for join a clock too."""

    call: Call
    outcome: Outcome | None = None
    number: int = 0
    clock: int = 0


@value_class
class SendValues:
    """Read the tables for `call` (see Tables.read) and reply with the values."""

    call: Call
    reads: tuple[Read, ...]


@value_class
class SendError:
    """Reply to `call` with this error; nothing was changed."""

    call: Call
    error: PsfleetError


@value_class
class WriteSnapshot:
    """Write the frozen shard to a snapshot. This is not a reply."""

    frozen: FrozenShard
    call: Call = None


@value_class
class SendReport:
    """Reply to `call` with the report of the prepared shard."""

    call: Call
    report: ViewReport


Instruction = SendOutcome | SendValues | SendError | WriteSnapshot | SendReport
