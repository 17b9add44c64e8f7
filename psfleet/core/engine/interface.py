"""Runtime: the interface through which a process reads and updates the parameters of a fleet.

It consists of four protocols: tensors (a training step), collectives, storage (whole tables) and counts.
`psfleet.core.runtime.embedded_runtime` implements it in this process, and `psfleet_worker.cluster_runtime` on
the servers of a cluster, with the same bits. Other runtimes stand in front of one of these, or only read.
"""

import importlib.metadata
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.memory import value_class
from psfleet.core.base.settings.kinds import Format
from psfleet.core.engine.evictions import EvictedIds
from psfleet.core.engine.kernels.bags import RowBags, pool_parts, spread_parts
from psfleet.core.engine.schema.table import OWN, TableSpec

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class ReadVersion:
    """Version of the values of one pull.

    Attributes:
        rounds: In sync mode, the lowest and the highest last closed round of all servers. If both are equal,
            the values are those of this round, bit for bit. In other modes (0, 0).
        steps: For each table, the lowest and the highest number of updates of all servers. In modes other
            than sync the values may have more updates than that.
    """

    rounds: tuple[int, int]
    steps: Mapping[str, tuple[int, int]]

    @property
    def is_cut(self) -> bool:
        """True if all servers gave values of the same closed round."""
        return self.rounds[0] == self.rounds[1] > 0


@dataclass(frozen=True)
class FollowedCut:
    """Cut of the training that a follower has.

    Attributes:
        round: Last closed round in sync mode, None in other modes.
        pushes: For each server, each worker's incarnation and its last push in the cut.
        at: Time (time.monotonic) at which the cut was the newest.
        number: Number that rises with each change: the round, or the number of all pushes.
    """

    round: int | None
    pushes: tuple[Mapping[int, tuple[int, int]], ...]
    at: float
    number: int

    @property
    def age(self) -> float:
        """Seconds since the cut was the newest."""
        return max(time.monotonic() - self.at, 0.0)


@value_class
class Read:
    """A read of one table in a pull.

    Attributes:
        table: Key of the table.
        ids: Ids of a sparse table: int64 of any shape, repeats allowed. None for a dense table.
        format: Format in which a server sends the values; runtimes set it as their strategy says.
        bags: Bags of the ids, to pool their rows: the values are then float32 [all bags, dim]. Only for
            sparse tables and a runtime that `pools`. None for one row per id.
    """

    table: int
    ids: Ids | None = None
    format: Format = "float32"
    bags: Sequence[RowBags] | None = None


@value_class
class Gradient:
    """Gradient of one table in a push.

    Attributes:
        table: Key of the table.
        values: For a sparse table float32 [n, dim], where row i belongs to ids[i]. For a dense table float32
            of the table's shape, or [k] with ids.
        ids: For a sparse table int64 [n]; rows of repeated ids are summed in order. For a dense table None,
            or int64 [k], ascending: positions in the flattened array, and the gradient is zero elsewhere.
        learning_rate: Learning rate of this push.
        precision: Precision of the values on the wire. In 16 bits they are rounded after rows of repeated
            ids were summed, in an embedded runtime too.
        scale: Factor that multiplies the values before they are rounded and divides them afterwards.
        bags: Bags of the ids; the values are then float32 [all bags, dim], the gradient of the pooled values
            of a Read with these bags. Only for sparse tables and a runtime that `pools`. None for one row
            per id.
    """

    table: int
    values: Floats
    ids: Ids | None = None
    learning_rate: float = 0.0
    precision: Precision = "float32"
    scale: float = 1.0
    bags: Sequence[RowBags] | None = None

    def spread(self) -> "Gradient":
        """Return the gradient with a row for each id."""
        if self.bags is None:
            return self
        return replace(self, values=spread_parts(self.values, self.bags), bags=None)

    def untravelled(self) -> "Gradient":
        """Return the gradient without the settings for the wire: float32, not scaled."""
        return replace(self, precision="float32", scale=1.0)


@dataclass(slots=True)
class TableState:
    """Whole content of one table: weights and optimizer state.

    Attributes:
        step: Number of updates that the table has had.
        values: Weights first, then one array per state slot, in the rule's order. Each array has the shape of
            a dense table, or [n, dim] for a sparse table, with rows in ascending order of id.
        ids: Ids of a sparse table: int64 [n], ascending. None for a dense table.
        touched: Step of each row's last push in a sparse table: int64 [n]. A write without it counts the rows
            as named by the last update.
        scores: Scores of each row in a sparse table: float32 [n, TableSpec.scores], as in
            psfleet.core.engine.tables.row_data.RowData.
    """

    step: int
    values: list[Floats]
    ids: Ids | None = None
    touched: Ids | None = None
    scores: Floats | None = None


class PendingPush(Protocol):
    """Ticket of a push that is under way."""

    def wait(self, timeout: float | None = None) -> None:
        """Return once every server has acknowledged the push.

        In async mode the push is then applied. In sync mode it is held for its round, which closes when all
        workers have pushed and this worker pulls or flushes.

        Args:
            timeout: Seconds to wait, or None for the runtime's own timeout.

        Raises:
            DeadlineExceeded: The push was not acknowledged in this time.
        """


class PushCounter(Protocol):
    """Counter of something in a worker's steps. Each push takes along the counts since the push before."""

    def leave(self) -> Gradient | None:
        """Return the counts as a gradient for the next push, or None if there is nothing to push.

        The gradient is for a table whose rule counts. Counts of an earlier `leave` that was not confirmed by
        `arrived` are included again, because that push was not made.
        """

    def arrived(self) -> None:
        """Confirm that the last gradient that `leave` returned has been applied."""


def with_counts(
    gradients: Sequence[Gradient], counters: Sequence[PushCounter]
) -> Sequence[Gradient]:
    """Return the gradients of a push, followed by those of the counters."""
    counts = [gradient for counter in counters if (gradient := counter.leave()) is not None]
    return [*gradients, *counts] if counts else gradients


class PendingPull(Protocol):
    """Ticket of a pull that is under way."""

    def wait(self) -> list[Floats]:
        """Return the values as `Runtime.pull` does. Further calls return the same values."""


class CompletedPush:
    """Ticket of a push that has already ended."""

    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""


class CompletedPull:
    """Ticket of a pull that has already ended."""

    def __init__(self, values: list[Floats]) -> None:
        self._values = values

    def wait(self) -> list[Floats]:
        """Return the values."""
        return self._values


class ClosedRuntime:
    """Replacement for a closed object: every access to an attribute raises UsageError.

    Args:
        sentence: Text of the error.
    """

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def __getattr__(self, name: str) -> Any:
        raise UsageError(self._sentence)


class Tensors(Protocol):
    """Tables and their values, as a training step uses them. Not thread-safe: one thread trains.

    rows, weights = runtime.pull([Read(users, ids), Read(dense)])
    runtime.push([Gradient(users, row_gradients, ids, learning_rate=0.1)])
    """

    @property
    def pools(self) -> bool:
        """True if reads and gradients may have bags."""

    @property
    def reads_ahead(self) -> bool:
        """True if `pull_ahead` reads while the worker computes, False if it is a plain pull."""
        return False

    def create(self, spec: TableSpec, value: Floats | None = None) -> int:
        """Make sure the table exists and return its key.

        The first worker's `value` (dense only) becomes the content; later ones are ignored.

        Raises:
            TableConflict: A table of that name has another definition.
        """

    def open(self, name: str) -> TableSpec:
        """Return the definition of an existing table; from then on this worker can pull from it.

        Raises:
            UnknownTable: There is no table of that name.
        """

    def specs(self) -> dict[int, TableSpec]:
        """Return the definitions of the tables that this worker knows, by key."""

    def pull(self, reads: Sequence[Read]) -> list[Floats]:
        """Return current values, a float32 array per read: of the table's shape, or [*ids.shape, dim].

        In sync mode the call commits this worker's last push and waits until its round has closed. A row that
        no push has updated has its initial value; a pull does not create it.
        """

    def pull_ahead(self, reads: Sequence[Read]) -> PendingPull:
        """Begin a pull whose values contain every earlier push of this worker and no later one.

        A later pull or push first waits for this pull. If `reads_ahead` is False, the pull has ended when the
        ticket is returned.
        """
        return CompletedPull(self.pull(reads))

    def push(
        self, gradients: Sequence[Gradient], *, samples: int = 0, loss: float | None = None
    ) -> PendingPush:
        """Send the gradients of one step. At most one gradient per table.

        Args:
            gradients: One per table; in sync mode they make up this worker's part of the round.
            samples: Number of samples that the step has used, for the progress display.
            loss: The step's loss, for the progress display.
        """

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every push of this worker is applied on every server."""


class CollectiveCalls(Protocol):
    """Calls that all workers of a fleet make together, and the worker's number among them."""

    @property
    def worker_index(self) -> int: ...
    @property
    def worker_num(self) -> int: ...

    @property
    def passes(self) -> bool:
        """True if an earlier incarnation of this worker has already completed the next collective."""
        return False

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every worker has called this."""

    def all_reduce(self, value: NDArray[Any], mode: str = "sum") -> NDArray[Any]:
        """Combine equal-shaped arrays of all workers, in worker order: sum, max or min."""


class Storage(Protocol):
    """Whole tables: contents, snapshots and statistics."""

    def read_table(self, table: int) -> TableState:
        """Return the whole content of a table, optimizer state included."""

    def write_table(self, table: int, state: TableState) -> None:
        """Set weights, state and step of a dense table, or of the given rows of a sparse table."""

    def shrink(
        self, table: int = 0, threshold: float | None = None, unseen: int | None = None
    ) -> int:
        """Remove rows that are worth little or not in use, and return their number.

        Args:
            table: Key of a sparse table, or 0 for every sparse table.
            threshold, unseen: Limits as for `psfleet.fleet.shrink`.
        """

    def evictions(self, table: int, position: Sequence[int], limit: int) -> list[EvictedIds]:
        """Return up to `limit` evictions of a sparse table from each server, starting at its position.

        Does not wait for pushes. Position 0 gives the oldest evictions that the server remembers.

        Raises:
            UsageError: The table does not remember evictions, or a position is beyond its last one.
        """

    def save(self, path: str, *, delta: bool = False, base: bool = False) -> str:
        """Write every table to a folder, which appears whole or not at all, and return the folder's path.

        Args:
            path: Folder to write, or empty to write where the job keeps its snapshots.
            delta: True to write only the changes since the last base or delta.
            base: True if the next delta is to contain the changes since this snapshot.

        Raises:
            CheckpointError: The folder cannot be written, or a delta has no base. An existing folder is
                unchanged.
        """

    def load(self, path: str) -> None:
        """Set every table from a folder written by `save`, by any number of servers."""

    def stats(self) -> list[dict[str, Any]]:
        """Return one entry per server: tables (name, rows, bytes, step), pushes, samples, loss."""


class Counts(Protocol):
    """Counts that travel with a worker's pushes, such as the sums of metrics.

    Attributes:
        counters: Counters of this worker. A counter that is appended leaves with the next push.
    """

    counters: list[PushCounter]

    @property
    def in_round(self) -> bool:
        """True in a step of `fleet.dataset`, which has one push only; counts then travel with that push."""
        return False


class Runtime(Tensors, CollectiveCalls, Storage, Counts, Protocol):
    """Parameters of a fleet as one worker sees them: the calls that tables, optimizers and metrics need.

    Runtimes derive from psfleet.core.runtime.script_runtime.ScriptRuntime, which adds the calls that a whole
    script needs.
    """

    @property
    def server_num(self) -> int: ...

    def push_counts(self) -> None:
        """Push the counts without gradients. In sync mode the push is this worker's part of a round."""
        self.push([])

    def close(self) -> None:
        """Flush, leave the fleet and release every resource. Safe to call twice."""


def missing_table(name: str, names: Sequence[str]) -> str:
    """Return the error sentence for a table that does not exist.

    Args:
        name: Name of the missing table.
        names: Names of all tables, including those that psfleet makes for itself.
    """
    table_names = ", ".join(table for table in names if not table.startswith(OWN)) or "none"
    return f"there is no table {name!r}, and without an optimizer none is made; the tables are: {table_names}"


def is_trained(runtime: Storage, tables: Collection[str]) -> bool:
    """Return whether one of these tables has been pushed to.

    If so before a worker's first push, the worker joins a running job. It must then neither write the first
    rows of the tables nor wait for other workers to do so.

    Args:
        runtime: Runtime of the worker.
        tables: Names of the tables.
    """
    entries = (table for server in runtime.stats() for table in server["tables"])
    return any(table["step"] > 0 for table in entries if table["name"] in tables)


def load_runtime(name: str, *arguments: Any, **keywords: Any) -> Any:
    """Return a new runtime of the class registered as `name` in the entry-point group `psfleet.runtimes`.

    The caller annotates the result with the protocol that this class derives from.
    """
    for entry in importlib.metadata.entry_points(group="psfleet.runtimes", name=name):
        return entry.load()(*arguments, **keywords)
    raise ConfigError(f"runtime {name!r} is not installed; reinstall psfleet")


@dataclass(frozen=True, slots=True, eq=False)
class PooledIds:
    """Ids of a table whose rows are pooled when they are pulled.

    Attributes:
        ids: Ids of all bags: int64 [n].
        parts: Bags of each feature, one feature after the other; together they have n ids.
    """

    ids: Ids
    parts: tuple[RowBags, ...]

    def __len__(self) -> int:
        """Return the number of bags."""
        return sum(map(len, self.parts))

    def pool(self, rows: Floats) -> Floats:
        """Pool the rows of the ids, [n, dim], to float32 [all bags, dim]."""
        return pool_parts(rows, self.parts)

    def matches(self, other: "PooledIds") -> bool:
        """Return whether both pull the same ids with the same pooling."""
        return (
            len(self.parts) == len(other.parts)
            and (self.ids is other.ids or np.array_equal(self.ids, other.ids))
            and all(
                part.matches(other_part)
                for part, other_part in zip(self.parts, other.parts, strict=True)
            )
        )

    def copy(self) -> "PooledIds":
        """Return a copy that does not change when the arrays of this one are written."""
        return PooledIds(frozen(self.ids), tuple(part.copy() for part in self.parts))


Asked = Ids | PooledIds
"""Argument of a pull from a sparse table: ids, or ids whose rows are pooled."""


def read_of(table: int, ids: Asked, pools: bool) -> Read:
    """Return the read for a pull from a sparse table.

    Args:
        table: Key of the table.
        ids: Ids to pull, or ids whose rows are pooled.
        pools: True if the runtime pools rows itself.
    """
    if isinstance(ids, PooledIds):
        return Read(table, ids.ids, bags=ids.parts if pools else None)
    return Read(table, ids)


def as_asked(ids: Any, read: Read, values: Floats) -> Floats:
    """Return the values in the form of the request: pooled here if the runtime does not pool."""
    return ids.pool(values) if isinstance(ids, PooledIds) and read.bags is None else values


def joined_ids(lookups: Sequence[PooledIds]) -> PooledIds:
    """Return the bags of all look-ups, one after the other. A single look-up is returned as it is."""
    if len(lookups) == 1:
        return lookups[0]
    ids = np.concatenate([lookup.ids for lookup in lookups])
    return PooledIds(ids, tuple(part for lookup in lookups for part in lookup.parts))


def frozen(ids: Ids) -> Ids:
    """Return a read-only copy, so that a runtime need not check whether its content has changed."""
    copied = ids.copy()
    copied.flags.writeable = False
    return copied
