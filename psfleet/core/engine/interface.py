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
        rounds: Sync mode: the last closed round of the server that is behind and of the one that is ahead.
            Equal: the values are those of this round, bit for bit. Other modes: (0, 0).
        steps: By table how many updates its values have, on the server with the fewest and on the one with
            the most. In modes other than sync at least so many.
    """

    rounds: tuple[int, int]
    steps: Mapping[str, tuple[int, int]]

    @property
    def is_cut(self) -> bool:
        """True if all servers gave values of the same round, of which there is at least one."""
        return self.rounds[0] == self.rounds[1] > 0


@dataclass(frozen=True)
class FollowedCut:
    """The cut of the training that a follower has.

    Attributes:
        round: Sync mode: the last closed round. Other modes: None.
        pushes: By server, for each worker: its incarnation, and its last push in the cut.
        at: Time (time.monotonic) at which it was the newest.
        number: Rises with each change: the round, or the number of all pushes.
    """

    round: int | None
    pushes: tuple[Mapping[int, tuple[int, int]], ...]
    at: float
    number: int

    @property
    def age(self) -> float:
        """Seconds since it was the newest."""
        return max(time.monotonic() - self.at, 0.0)


@value_class
class Read:
    """A read of one table in a pull.

    Attributes:
        table: The table's key.
        ids: Sparse: any number of ids, repeats allowed, any shape. Dense: None.
        format: Format in which a server sends the values; runtimes set it as their strategy says.
        bags: Sparse, for a runtime that `pools`: the ids' rows are pooled by these, one after the other, and
            the values are float32 [all bags, dim]. None: a row for each id.
    """

    table: int
    ids: Ids | None = None
    format: Format = "float32"
    bags: Sequence[RowBags] | None = None


@value_class
class Gradient:
    """One table's part of a push.

    Attributes:
        table: The table's key.
        values: Sparse: float32 [n, dim], row i belongs to ids[i]. Dense: float32 of the table's shape,
            or [k] with ids.
        ids: Sparse: int64 [n], repeats allowed (their rows are summed in order). Dense: None, or int64
            [k], ascending: the positions in the flattened array that values belong to; the gradient is
            zero everywhere else.
        learning_rate: The rate of this push.
        precision: Precision of the values on the wire. In 16 bits they are rounded, embedded too,
            after rows of repeated ids were summed.
        scale: Factor applied to the values before they are rounded, and divided out afterwards.
        bags: Sparse, for a runtime that `pools`: values are float32 [all bags, dim], the gradients of what a
            Read with these bags gives. None: a row for each id.
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
        """Return the gradient as it is when it does not travel."""
        return replace(self, precision="float32", scale=1.0)


@dataclass(slots=True)
class TableState:
    """The whole content of one table, weights and optimizer state.

    Attributes:
        step: Number of updates that the table has had.
        values: Weights first, then one array per state slot, in the rule's order. Dense: the table's
            shape. Sparse: [n, dim], rows in ascending order of id.
        ids: Sparse: int64 [n], ascending. Dense: None.
        touched: Sparse: int64 [n], the table's step when each row was last pushed. Left out of a
            write: as if the last update had named them.
        scores: Sparse: float32 [n, TableSpec.scores], see psfleet.core.engine.tables.row_data.RowData.
    """

    step: int
    values: list[Floats]
    ids: Ids | None = None
    touched: Ids | None = None
    scores: Floats | None = None


class PendingPush(Protocol):
    """A push under way."""

    def wait(self, timeout: float | None = None) -> None:
        """Return once every server has acknowledged the push.

        Async mode: it is applied. Sync mode: it is held for its round, which closes when all workers
        have pushed and this one pulls or flushes.

        Raises:
            DeadlineExceeded: Not acknowledged within `timeout` seconds (None: the runtime's own).
        """


class PushCounter(Protocol):
    """Counts something of a worker's steps; each push takes along what has been counted since the last."""

    def leave(self) -> Gradient | None:
        """Return the gradient of the next push, in a table whose rule counts; None: nothing to push.

        What left before without `arrived` is in it again: that push was not made.
        """

    def arrived(self) -> None:
        """Confirm that the last gradient that `leave` returned has been applied."""


def with_counts(
    gradients: Sequence[Gradient], counters: Sequence[PushCounter]
) -> Sequence[Gradient]:
    """Return the gradients of a push, and what leaves with it."""
    counts = [gradient for counter in counters if (gradient := counter.leave()) is not None]
    return [*gradients, *counts] if counts else gradients


class PendingPull(Protocol):
    """A pull under way."""

    def wait(self) -> list[Floats]:
        """Return the values, as `Runtime.pull` gives them; the same each time it is asked."""


class CompletedPush:
    """Ticket of a push that is over when it is given out."""

    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""


class CompletedPull:
    """Ticket of a pull that is over when it is given out."""

    def __init__(self, values: list[Floats]) -> None:
        self._values = values

    def wait(self) -> list[Floats]:
        """Return the values."""
        return self._values


class ClosedRuntime:
    """Stands where something was that is closed: whatever is asked of it is refused.

    Args:
        sentence: Text of the refusal.
    """

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def __getattr__(self, name: str) -> Any:
        raise UsageError(self._sentence)


class Tensors(Protocol):
    """Tables and their values, as a training step uses them. Not thread-safe: one thread trains."""

    @property
    def pools(self) -> bool:
        """True if reads and gradients may have bags."""

    @property
    def reads_ahead(self) -> bool:
        """True if `pull_ahead` reads while the worker computes; else it is a plain pull."""
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
            UnknownTable: There is none of that name.
        """

    def specs(self) -> dict[int, TableSpec]:
        """Return the tables this worker knows, by key."""

    def pull(self, reads: Sequence[Read]) -> list[Floats]:
        """Return current values, one array per read: dense in the table's shape, sparse [*ids.shape, dim].

        Sync mode: waits for the round of this worker's last push to close, and commits it.
        A row that no push has touched has its initial value; pulling does not create it.
        """

    def pull_ahead(self, reads: Sequence[Read]) -> PendingPull:
        """Begin a pull: every push before it is in the values, none after it.

        One at a time: a later pull or push first waits for this one. Without `reads_ahead` the pull is over
        when its ticket is returned.
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
    """The workers of a fleet, and the calls that all of them make together."""

    @property
    def worker_index(self) -> int: ...
    @property
    def worker_num(self) -> int: ...

    @property
    def passes(self) -> bool:
        """True if an earlier incarnation of this worker has already completed the next collective."""
        return False

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every worker is here."""

    def all_reduce(self, value: NDArray[Any], mode: str = "sum") -> NDArray[Any]:
        """Combine equal-shaped arrays of all workers, in worker order: sum, max or min."""


class Storage(Protocol):
    """Whole tables: contents, snapshots and statistics."""

    def read_table(self, table: int) -> TableState:
        """Return the whole content of a table, optimizer state included."""

    def write_table(self, table: int, state: TableState) -> None:
        """Set weights, state and step; sparse: of the rows given, leaving the others."""

    def shrink(
        self, table: int = 0, threshold: float | None = None, unseen: int | None = None
    ) -> int:
        """Remove rows that are worth little or not in use, and return their number.

        Args:
            table: The key of a sparse table; 0: every one.
            threshold, unseen: As for `psfleet.fleet.shrink`.
        """

    def evictions(self, table: int, position: Sequence[int], limit: int) -> list[EvictedIds]:
        """Return up to `limit` evictions of a sparse table from each server, starting at its position.

        Does not wait for pushes. Position 0 gives the oldest that the server remembers.

        Raises:
            UsageError: The table does not remember evictions, or a position is beyond its last one.
        """

    def save(self, path: str, *, delta: bool = False, base: bool = False) -> str:
        """Write every table to a folder, which appears whole or not at all, and return the folder's path.

        Args:
            path: The folder; empty: where the job keeps its snapshots.
            delta: Only what has changed since the last base or delta.
            base: The next delta says the changes since this one.

        Raises:
            CheckpointError: It cannot be written, or there is no base; what was there is untouched.
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
        """True in a step of `fleet.dataset` that may have one push only, so that counts travel with that."""
        return False


class Runtime(Tensors, CollectiveCalls, Storage, Counts, Protocol):
    """Parameters of a fleet as one worker sees them; what tables, optimizers and metrics ask for.

    Runtimes derive from psfleet.core.runtime.script_runtime.ScriptRuntime, which adds what a whole script
    asks for.
    """

    @property
    def server_num(self) -> int: ...

    def push_counts(self) -> None:
        """Push the counts by themselves. In sync mode the push is this worker's part of a round."""
        self.push([])

    def close(self) -> None:
        """Flush, leave the fleet and release every resource. Safe to call twice."""


def missing_table(name: str, names: Sequence[str]) -> str:
    """Return the error sentence for a table that does not exist.

    Args:
        name: Its name.
        names: The tables that there are, OWN ones included.
    """
    table_names = ", ".join(table for table in names if not table.startswith(OWN)) or "none"
    return f"there is no table {name!r}, and without an optimizer none is made; the tables are: {table_names}"


def is_trained(runtime: Storage, tables: Collection[str]) -> bool:
    """Return whether one of these tables has been pushed to.

    A worker that finds so before its first push joins a job under way: it must neither write the
    tables' first rows nor wait for workers that have long done so.

    Args:
        tables: Their names.
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
        ids: int64 [n].
        parts: The bags of each feature, one feature after the other; they have n rows.
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
        """Return a copy, whatever becomes of the arrays that this was made of."""
        return PooledIds(frozen(self.ids), tuple(part.copy() for part in self.parts))


Asked = Ids | PooledIds
"""Argument of a pull from a sparse table: ids, or ids whose rows are pooled."""


def read_of(table: int, ids: Asked, pools: bool) -> Read:
    """Return the read that the runtime is asked for.

    Args:
        table: The table's key.
        ids: The ids to pull, or the ids to pool.
        pools: True if the runtime pools by itself.
    """
    if isinstance(ids, PooledIds):
        return Read(table, ids.ids, bags=ids.parts if pools else None)
    return Read(table, ids)


def as_asked(ids: Any, read: Read, values: Floats) -> Floats:
    """Return the values in the form of the request: pooled here if the runtime does not pool."""
    return ids.pool(values) if isinstance(ids, PooledIds) and read.bags is None else values


def joined_ids(lookups: Sequence[PooledIds]) -> PooledIds:
    """Return all bags, one after the other. A single one is not copied."""
    if len(lookups) == 1:
        return lookups[0]
    ids = np.concatenate([lookup.ids for lookup in lookups])
    return PooledIds(ids, tuple(part for lookup in lookups for part in lookup.parts))


def frozen(ids: Ids) -> Ids:
    """Return a copy that is never changed: a runtime need not check whether it is the same."""
    copied = ids.copy()
    copied.flags.writeable = False
    return copied
