"""Events that a shard handles, records that it logs, and instructions that it returns.

Server code turns requests into events and carries out the instructions; the shard does no I/O. Each event
comes with a `call`, which identifies the open request; the shard returns it with the reply. A record is a
change that must survive the process; some events are also records. The messages on the wire are in
protos/psfleet/v1.

In this module a *seat* is a worker's rank in the fleet, and an *incarnation* is one process that takes a
seat: a worker that restarts is a new incarnation. A *cut* is a position in each worker's stream of pushes: a
snapshot contains the pushes before the cut.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import PsfleetError
from psfleet.core.base.memory import value_class
from psfleet.core.engine.consistency import ConsistencyMode
from psfleet.core.engine.runtime_interface import Gradient, Read
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
    """Image of a shard at one moment, for a snapshot or a standby. Read it once, then close it.

    Attributes:
        number: Number of the snapshot that the image is for, or 0 if it is for another use.
        index, servers: Index of the shard's server, and number of all servers.
        tables: Images of the tables.
        state: State of the shard without its tables.
        mode, round: Consistency mode of the fleet, and last closed round.
        pushes: Maps a seat (worker rank) to the pair (incarnation, push): the worker process, and its last
            push that the image contains.
        since: For a delta, number of the snapshot that it is based on: the image has only the changes since
            then. 0 if the image has all rows.
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
        """Close the images of the tables, which then no longer copy rows before they change."""
        for table in self.tables:
            table.close()


@value_class
class Join:
    """A worker process (incarnation) begins, or continues after a wait at a collective (a barrier, say).

    The reply has the last closed round in sync mode, or the worker's last push in other modes.

    Attributes:
        mode: Mode of the fleet, with the settings that servers know.
        switch: Number of a mode switch, or 0 if the worker joins without one. At a switch all workers have
            come to the same point of the script, with no push outstanding, and go on in `mode`.
        last: With a switch, the highest round or push number of any worker before it.
    """

    worker: int
    incarnation: int
    mode: ConsistencyMode
    switch: int = 0
    last: int = 0


@value_class
class Leave:
    """Notice that a worker makes no pushes after push `last`, because it leaves or waits at a collective.

    A collective is an operation of all workers, such as a barrier. A worker that waits there (*rests*)
    sends `rest` = n for its n-th wait. The wait ends once every other worker waits or has left too. So
    workers with unequal amounts of data can wait at a barrier without delaying the rounds of workers that
    still have data. `rest` is 0 if the worker leaves for good.
    """

    worker: int
    incarnation: int
    last: int
    rest: int = 0


@value_class
class Push:
    """A worker's gradients for this shard.

    `sequence` numbers the worker's pushes; in sync mode it is the round.

    A sparse gradient contains each id once; a dense gradient contains the slice that this server stores. For
    each table, every server that stores a part of the table gets a gradient, if necessary with no rows, so
    that all these servers count the same number of steps. In a mode that adds deltas (geo), `gradients` are
    deltas to add to the weights.

    Attributes:
        clock: Ssp mode: number of the worker's pushes since the last collective, such as a barrier.
        cut: Pair of numbers: the last snapshot for which the worker has said which of its pushes is the last
            one in it (the worker's *mark*), and that push.
        position: Modes other than sync: the worker's position in its data after this push.
        progress: Modes other than sync: loop position of the worker's script, or empty if it is not known.
        skipped: Number of pushes just before this push that were not sent to this server.
        addressed: On server 0, the last push that was sent to each server. Empty if this push was sent to
            all servers.
        withdrawn: True for an empty push in place of a push that another server has refused.
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
        """Number of the push that the worker sent to this server before this one."""
        return self.sequence - 1 - self.skipped


@value_class
class Pull:
    """Request of a worker for values of tables.

    Attributes:
        reads: The values to read: for each table, ids or this server's whole part of a dense table.
        commit: Sync mode: number of a round. All servers have this worker's push of that round, and the pull
            waits until the round is closed. 0 if the pull waits for no round.
        clock: Ssp mode: number of the worker's pushes since the last collective, such as a barrier. The pull
            waits for workers that are too far behind.
        progress: Sync mode: position of the worker's script in its loops after the push of that round. A
            restarted worker continues there.
    """

    worker: int
    incarnation: int
    reads: tuple[Read, ...]
    commit: int = 0
    clock: int = 0
    progress: str = ""


@value_class
class Expire:
    """Notice that the deadline of the waiting pull `call` has passed."""


@value_class
class PartState:
    """Weights and optimizer state of a part of a table.

    Attributes:
        values: Sparse: float32 [n, dim * (1 + slots)]. Dense: float32 [1 + slots, n]. A slot is one value of
            optimizer state.
        ids: Sparse: int64 [n]. Dense: None.
        step: Number of updates of the table so far.
        touched, scores: Sparse: as in psfleet.core.engine.tables.row_data.RowData. None if they are not
            known; the rows then count as pushed by the last update, and their scores are 0.
        start: Dense: index of the first value within this server's range.
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
    """Request to overwrite parts of tables.

    `number` counts the writes and shrinks of one worker process, so that a repeated request is recognised.
    Callers that are no workers send 0.
    """

    states: tuple[PartState, ...]
    worker: int = 0
    incarnation: int = 0
    number: int = 0


@value_class
class Shrink:
    """Request to remove rows with low scores or without recent pushes. The reply has the number of rows.

    Attributes:
        table: Key of the table, or 0 for every sparse table.
        threshold, unseen: Arguments of SparseTable.shrink.
        number: Number of the request among the writes and shrinks of a worker process, or 0 if the caller is
            no worker.
    """

    table: int = 0
    threshold: float | None = None
    unseen: int | None = None
    worker: int = 0
    incarnation: int = 0
    number: int = 0


@value_class
class Tick:
    """Notice of the seconds that have passed since the last tick or the start of this process."""

    seconds: float


@value_class
class RestorePart:
    """Restore a part of a table from a snapshot.

    Attributes:
        clock: Number of the table's updates in the snapshot, and the times of its shrinks.
        columns: Maps the name of a column to its array, as described in
            psfleet.core.engine.tables.row_data. The column `removed` has ids to remove.
    """

    table: int
    clock: TableClock
    columns: Mapping[str, NDArray[Any]]


@value_class
class BeginCut:
    """Begin a snapshot, and give up an earlier one that is not complete.

    The reply has the last closed round.
    """

    cutting: PendingCut


@value_class
class MarkCut:
    """Notice that a snapshot contains the worker's pushes up to push `last`.

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
    """Notice that the log's disk may have space again: the shard closes a round that waited for space."""


@value_class
class EndCut:
    """Notice that a snapshot is complete or was given up.

    Attributes:
        base: Number of the oldest snapshot that later deltas may refer to. The shard then forgets changes
            before it. 0 means that no delta will refer to a snapshot.
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
    """Create a table with this server's part of its initial values.

    Attributes:
        spec: Definition of the table.
        value: Initial values of this server's range of a dense table, or empty for a sparse table.
        maker: Worker that creates the table, or None if no worker does.
    """

    spec: TableSpec
    value: NDArray[np.float32]
    maker: int | None = None


@value_class
class Evict:
    """Remove these rows of a table, because memory is short."""

    table: int
    ids: NDArray[np.int64]


@value_class
class CloseRound:
    """Sync mode: close the round with the pushes that the shard has received from these seats (worker ranks).

    Attributes:
        progress: For each seat, the loop position of the worker's script when it confirmed that all servers
            have its push. Seats for which it is not known have no entry.
    """

    round: int
    members: tuple[int, ...]
    progress: Mapping[int, str] = field(default_factory=dict)


@value_class
class MakeCut:
    """Log record that marks where a snapshot was taken: it contains the effects of all earlier records."""

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
"""A durable change of a shard. Applying the same records in the same order gives the same shard."""

Journal = Callable[[Record], None]
"""Function that stores a record. The shard calls it before the record takes effect."""


@value_class
class SendOutcome:
    """Reply to `call` with an outcome or with numbers.

    Attributes:
        outcome: Outcome of a push, or None for other calls.
        number: Result of the call, as documented with its event.
        clock: For a join in ssp mode, the initial value of the worker's clock: the number of its pushes since
            the last collective.
    """

    call: Call
    outcome: Outcome | None = None
    number: int = 0
    clock: int = 0


@value_class
class SendValues:
    """Read these parts of tables (ShardTables.read) and reply to `call` with the values."""

    call: Call
    reads: tuple[Read, ...]


@value_class
class SendError:
    """Reply to `call` with this error. Nothing was changed."""

    call: Call
    error: PsfleetError


@value_class
class WriteSnapshot:
    """Write this image of the shard to a snapshot. Not a reply to a call."""

    frozen: FrozenShard
    call: Call = None


@value_class
class SendReport:
    """Reply to `call` with the report of a shard that waits for a new view (membership of the fleet)."""

    call: Call
    report: ViewReport


Instruction = SendOutcome | SendValues | SendError | WriteSnapshot | SendReport
