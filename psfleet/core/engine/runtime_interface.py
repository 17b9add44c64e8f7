"""Runtime: the interface through which a process reads and updates the parameters of a fleet.

It consists of four protocols: Tensors (calls of a training step), CollectiveCalls, Storage (whole tables) and
Counts (metrics). `psfleet.core.runtime.embedded_runtime` implements it within this process, and
`psfleet_worker.cluster_runtime` with the servers of a cluster; both give bit-identical results. Other
runtimes wrap one of these two, or can only read.
"""

import importlib.metadata
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.memory import value_class
from psfleet.core.base.settings.kinds import Format
from psfleet.core.engine.device_arrays import DeviceReader
from psfleet.core.engine.eviction_records import EvictedIds
from psfleet.core.engine.kernels.bags import RowBags, pool_parts, spread_parts
from psfleet.core.engine.schema.table import OWN, TableSpec

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class ReadVersion:
    """Version of the values that one pull has returned.

    Attributes:
        rounds: In sync mode, the lowest and the highest number of the last closed round among the servers. If
            both are equal, the values are bit-identical to the parameters after this round. (0, 0) in other
            modes.
        steps: Maps a table's name to a pair: the lowest and the highest number of updates that the table has
            had, among the servers. In modes other than sync the values may contain more updates.
    """

    rounds: tuple[int, int]
    steps: Mapping[str, tuple[int, int]]

    @property
    def is_cut(self) -> bool:
        """True if all servers returned values of the same closed round."""
        return self.rounds[0] == self.rounds[1] > 0


@dataclass(frozen=True)
class FollowedCut:
    """State of the training that a follower (a process with an up-to-date copy of the weights) has copied.

    Attributes:
        round: Last closed round in sync mode, or None in other modes.
        pushes: For each server, a mapping from worker rank to the pair (incarnation, push): the last push of
            this worker that the copy contains. The incarnation counts restarts of the worker.
        at: Time (time.monotonic) at which this state was the newest.
        number: Number that rises with each change: the round, or the number of all pushes.
    """

    round: int | None
    pushes: tuple[Mapping[int, tuple[int, int]], ...]
    at: float
    number: int

    @property
    def age(self) -> float:
        """Seconds since this state was the newest."""
        return max(time.monotonic() - self.at, 0.0)


@value_class
class Read:
    """Request for values of one table, part of a pull.

    Attributes:
        ids: Ids of a sparse table: int64 of any shape, repeats allowed. None for a dense table.
        format: Number format in which a server sends the values. Runtimes set it according to their strategy.
        bags: Groups of the ids (bags) whose rows are pooled, for example summed. The values are then float32
            [all bags, dim]. Only for sparse tables, and if the runtime `pools`. None for one row per id.
    """

    table: int
    ids: Ids | None = None
    format: Format = "float32"
    bags: Sequence[RowBags] | None = None


@value_class
class Gradient:
    """Gradient for one table, part of a push.

    Attributes:
        values: For a sparse table float32 [n, dim]; row i belongs to ids[i]. For a dense table float32 of the
            table's shape, or [k] with ids.
        ids: For a sparse table int64 [n]; rows of repeated ids are summed in the given order. For a dense
            table None, or int64 [k], ascending: positions in the flattened array. The gradient is zero
            elsewhere.
        precision: Number format of the values during transfer. For 16 bits, values are rounded after rows of
            repeated ids were summed. An embedded runtime rounds in the same way.
        scale: Factor that multiplies the values before rounding and divides them afterwards.
        bags: Bags of the ids, if the rows of each bag were pooled in the pull. The values are then float32
            [all bags, dim]: the gradient of the pooled values. Only for sparse tables, and if the runtime
            `pools`. None for one row per id.
    """

    table: int
    values: Floats
    ids: Ids | None = None
    learning_rate: float = 0.0
    precision: Precision = "float32"
    scale: float = 1.0
    bags: Sequence[RowBags] | None = None

    def spread(self) -> "Gradient":
        """Return the same gradient with one row for each id instead of one for each bag (group of ids)."""
        if self.bags is None:
            return self
        return replace(self, values=spread_parts(self.values, self.bags), bags=None)

    def untravelled(self) -> "Gradient":
        """Return the gradient without settings for the transfer: float32, not scaled."""
        return replace(self, precision="float32", scale=1.0)


@dataclass(slots=True)
class TableState:
    """Whole content of one table: weights and optimizer state.

    Attributes:
        step: Number of updates of the table so far.
        values: The weights, then one array for each value of optimizer state, in the order of the rule. Each
            array has the shape of a dense table, or [n, dim] for a sparse table, with rows in ascending order
            of id.
        ids: Ids of a sparse table: int64 [n], ascending. None for a dense table.
        touched: Step of each row's last push in a sparse table: int64 [n]. If it is None in a write, the last
            update counts as the last push of each row.
        scores: Shows, clicks and frequency of each row in a sparse table: float32 [n, TableSpec.scores], as
            in psfleet.core.engine.tables.row_data.RowData.
    """

    step: int
    values: list[Floats]
    ids: Ids | None = None
    touched: Ids | None = None
    scores: Floats | None = None


class PendingPush(Protocol):
    """Push that was sent and may not be acknowledged yet."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every server has acknowledged the push.

        In async mode the push is then applied. In sync mode it waits on the servers until its round closes:
        all workers must have pushed, and this worker must pull or flush.

        Args:
            timeout: Seconds to wait, or None for the runtime's own timeout.

        Raises:
            DeadlineExceeded: The push was not acknowledged in this time.
        """


class PushCounter(Protocol):
    """Counter whose counts are sent to the servers with the worker's pushes, for example for a metric.

    Each push contains the counts since the push before.
    """

    def leave(self) -> Gradient | None:
        """Return the counts as a gradient for the next push, or None if there is nothing to push.

        The gradient is for a table whose rule adds counts. The runtime calls `arrived` after the push. If
        `leave` is called again without that, the earlier push was not made, and its counts are included
        again.
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
    """Pull that was requested and may not be answered yet."""

    def wait(self) -> list[Floats]:
        """Wait for the values and return them as `Runtime.pull` does.

        Further calls return the same values.
        """


class CompletedPush:
    """PendingPush for a push that is already acknowledged."""

    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""


class CompletedPull:
    """PendingPull for a pull that is already answered."""

    def __init__(self, values: list[Floats]) -> None:
        self._values = values

    def wait(self) -> list[Floats]:
        """Return the values."""
        return self._values


class ClosedRuntime:
    """Replacement for a closed object: every access to an attribute raises UsageError."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def __getattr__(self, name: str) -> Any:
        raise UsageError(self._sentence)


class Tensors(Protocol):
    """Calls of a training step: create tables, pull values, push gradients.

    Not thread-safe: one thread trains.

        rows, weights = runtime.pull([Read(users, ids), Read(dense)])
        runtime.push([Gradient(users, row_gradients, ids, learning_rate=0.1)])
    """

    @property
    def pools(self) -> bool:
        """True if the runtime can pool rows of groups of ids, so that reads and gradients may have `bags`."""

    @property
    def reads_ahead(self) -> bool:
        """True if `pull_ahead` reads while the worker computes, False if it waits like `pull`."""
        return False

    def create(self, spec: TableSpec, value: Floats | None = None) -> int:
        """Create the table unless it exists, and return its key.

        The values of the first worker that creates a dense table become its content; later ones are ignored.

        Args:
            value: Initial values of a dense table, or None for a sparse table.

        Raises:
            TableConflict: A table of that name has another definition.
        """

    def open(self, name: str) -> TableSpec:
        """Return the definition of an existing table, and allow this worker to pull from it.

        Raises:
            UnknownTable: There is no table of that name.
        """

    def specs(self) -> dict[int, TableSpec]:
        """Return the definitions of the tables that this worker has created or opened, by key."""

    def pull(self, reads: Sequence[Read]) -> list[Floats]:
        """Return current values, one float32 array for each read: of the table's shape, or [*ids.shape, dim].

        In sync mode the call first confirms that all servers have this worker's last push (the push is then
        *committed*), and waits until the round of that push has closed. A row that no push has updated has
        its initial value; a pull does not create the row.
        """

    def pull_ahead(self, reads: Sequence[Read]) -> PendingPull:
        """Request values now, and return before the values arrive.

        The values contain every earlier push of this worker, and no later push. A later pull or push first
        waits for this pull. If `reads_ahead` is False, this call itself waits for the values.
        """
        return CompletedPull(self.pull(reads))

    def reader_to_device(self, table: int) -> DeviceReader | None:
        """Return an object that writes rows of a sparse table to arrays on the GPU, or None.

        None unless the table is on a GPU of this process. If there is an object, the values of a gradient
        for the table may be `DeviceSums`.
        """
        return None

    def push(
        self, gradients: Sequence[Gradient], *, samples: int = 0, loss: float | None = None
    ) -> PendingPush:
        """Send the gradients of one step, without waiting until they are applied.

        Args:
            gradients: At most one for each table. In sync mode they are this worker's part of the round.
            samples: Number of samples that the step has used, for the progress display.
            loss: Loss of the step, for the progress display.

        Raises:
            UsageError: A gradient is not valid, or a server has refused an earlier push. These gradients were
                not sent; after the refusal of an earlier push they may be pushed again.
        """

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every push of this worker is applied on every server.

        Args:
            timeout: Seconds to wait, or None for the runtime's own timeout.
        """


class CollectiveCalls(Protocol):
    """Calls that all workers of a fleet make together, the worker's rank and the number of workers."""

    @property
    def worker_index(self) -> int: ...
    @property
    def worker_num(self) -> int: ...

    @property
    def passes(self) -> bool:
        """True if the script's next collective (a barrier, say) was already complete before the last restart.

        A worker that restarts runs its script from the beginning and reaches such collectives again.
        """
        return False

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every worker has called this method.

        Args:
            timeout: Seconds to wait, or None for the runtime's own timeout.
        """

    def all_reduce(self, value: NDArray[Any], mode: str = "sum") -> NDArray[Any]:
        """Combine arrays of equal shape from all workers, in the order of ranks; all workers get the result.

        Args:
            mode: "sum", "max" or "min".
        """


class Storage(Protocol):
    """Whole tables: contents, snapshots and statistics."""

    def read_table(self, table: int) -> TableState:
        """Return the whole content of a table, including optimizer state."""

    def write_table(self, table: int, state: TableState) -> None:
        """Overwrite weights, optimizer state and step of a dense table or of given rows of a sparse table."""

    def shrink(
        self, table: int = 0, threshold: float | None = None, unseen: int | None = None
    ) -> int:
        """Remove rows with low scores or without recent pushes, and return their number.

        Args:
            table: Key of a sparse table, or 0 for every sparse table.
            threshold, unseen: Limits, as explained in `psfleet.fleet.shrink`.
        """

    def evictions(self, table: int, position: Sequence[int], limit: int) -> list[EvictedIds]:
        """Return recorded evictions of a sparse table from each server, without waiting for pushes.

        Args:
            position: For each server, the position of the first eviction to return. 0 begins with the oldest
                eviction that the server has recorded.
            limit: Largest number of evictions from each server.

        Raises:
            UsageError: The table records no evictions, or a position is beyond its last eviction.
        """

    def save(self, path: str, *, delta: bool = False, base: bool = False) -> str:
        """Write all tables to a folder, and return the folder's path.

        After a failure the folder does not exist.

        Args:
            path: Folder to write, or empty for the folder in which the job stores its snapshots.
            delta: True to write only the changes since the last base or delta.
            base: True to let later deltas refer to this snapshot.

        Raises:
            CheckpointError: The folder cannot be written, or a delta has no base. An existing folder is
                unchanged.
        """

    def load(self, path: str) -> None:
        """Restore every table from a folder that `save` has written, with any number of servers."""

    def stats(self) -> list[dict[str, Any]]:
        """Return one dictionary per server: tables (name, rows, bytes, step), pushes, samples, loss."""


class Counts(Protocol):
    """Counts that are sent with a worker's pushes, such as the sums of metrics.

    Attributes:
        counters: Counters of this worker. Append a counter to include it from the next push on.
    """

    counters: list[PushCounter]

    @property
    def in_round(self) -> bool:
        """True in a step of `fleet.dataset`. Such a step makes only one push, so counts are sent with it."""
        return False


class Runtime(Tensors, CollectiveCalls, Storage, Counts, Protocol):
    """Parameters of a fleet as one worker uses them: the calls that tables, optimizers and metrics need.

    Runtimes derive from psfleet.core.runtime.script_runtime.ScriptRuntime, which adds the calls that a whole
    script needs.
    """

    @property
    def server_num(self) -> int: ...

    def push_counts(self) -> None:
        """Push the counts without gradients. In sync mode the push is this worker's part of a round."""
        self.push([])

    def close(self) -> None:
        """Wait for pushes, leave the fleet and release every resource. Safe to call twice."""


def missing_table(name: str, names: Sequence[str]) -> str:
    """Return the error message for a table that does not exist.

    Args:
        names: Names of all tables, including internal ones, which the message leaves out.
    """
    table_names = ", ".join(table for table in names if not table.startswith(OWN)) or "none"
    return f"there is no table {name!r}, and without an optimizer none is made; the tables are: {table_names}"


def is_trained(runtime: Storage, tables: Collection[str]) -> bool:
    """Return whether at least one of these tables has been updated by a push.

    A worker that sees such a table before its own first push has joined a running job. The worker must then
    neither write the initial rows of the tables nor wait for other workers to do so.
    """
    entries = (table for server in runtime.stats() for table in server["tables"])
    return any(table["step"] > 0 for table in entries if table["name"] in tables)


def load_runtime(name: str, *arguments: Any, **keywords: Any) -> Any:
    """Return a new runtime of the class registered as `name` in the entry-point group `psfleet.runtimes`.

    The class is loaded by name because it may be in another distribution, such as psfleet-worker. The caller
    annotates the result with a protocol that the class implements.

    Raises:
        ConfigError: No class of this name is installed.
    """
    return _runtime_class(name)(*arguments, **keywords)


@cache  # the search takes 10 to 50 ms
def _runtime_class(name: str) -> Any:
    for entry in importlib.metadata.entry_points(group="psfleet.runtimes", name=name):
        return entry.load()
    raise ConfigError(f"runtime {name!r} is not installed; reinstall psfleet")


@dataclass(frozen=True, slots=True, eq=False)
class PooledIds:
    """Ids of a sparse table, in groups (bags) whose rows are pooled to one row each when they are pulled.

    Attributes:
        ids: Ids of all bags: int64 [n].
        parts: For each feature, the division of its ids into bags. All bags together have n ids.
    """

    ids: Ids
    parts: tuple[RowBags, ...]

    def __len__(self) -> int:
        """Return the number of bags."""
        return sum(map(len, self.parts))

    def pool(self, rows: Floats) -> Floats:
        """Pool the rows of the ids, float32 [n, dim], to one row for each bag: float32 [all bags, dim]."""
        return pool_parts(rows, self.parts)

    def matches(self, other: "PooledIds") -> bool:
        """Return whether both have the same ids and pool them in the same way."""
        return (
            len(self.parts) == len(other.parts)
            and (self.ids is other.ids or np.array_equal(self.ids, other.ids))
            and all(
                part.matches(other_part)
                for part, other_part in zip(self.parts, other.parts, strict=True)
            )
        )

    def copy(self) -> "PooledIds":
        """Return a copy that does not change if the caller later overwrites the arrays of this object."""
        return PooledIds(frozen(self.ids), tuple(part.copy() for part in self.parts))


Asked = Ids | PooledIds
"""Ids argument of a pull from a sparse table: plain ids, or ids in bags whose rows are pooled."""


def read_of(table: int, ids: Asked, pools: bool) -> Read:
    """Return the Read for a pull from a sparse table.

    Args:
        ids: Ids to pull, or ids in bags whose rows are pooled.
        pools: True if the runtime pools rows itself. If False, the Read requests a row for each id.
    """
    if isinstance(ids, PooledIds):
        return Read(table, ids.ids, bags=ids.parts if pools else None)
    return Read(table, ids)


def as_asked(ids: Any, read: Read, values: Floats) -> Floats:
    """Return pulled values as the caller requested them: pooled here if the runtime does not pool.

    Args:
        ids: Argument of the pull.
        read: Result of `read_of` for these ids.
        values: Values that the runtime has returned for the read.
    """
    return ids.pool(values) if isinstance(ids, PooledIds) and read.bags is None else values


def joined_ids(lookups: Sequence[PooledIds]) -> PooledIds:
    """Join the ids and bags of several look-ups, one after the other. Returns a single look-up unchanged."""
    if len(lookups) == 1:
        return lookups[0]
    ids = np.concatenate([lookup.ids for lookup in lookups])
    return PooledIds(ids, tuple(part for lookup in lookups for part in lookup.parts))


def frozen(ids: Ids) -> Ids:
    """Return a read-only copy of ids, so that a runtime need not check whether they were changed."""
    copied = ids.copy()
    copied.flags.writeable = False
    return copied
