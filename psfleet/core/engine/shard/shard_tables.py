"""ShardTables: creates, validates, reads and restores the tables of one shard.

It also decides which memory stores each table, and has the memory budgets. Shard decides in which order
pushes and pulls use the tables. DeltaBases remembers earlier snapshots, so that a delta can contain only the
changes since an earlier snapshot.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ShapeError, TableConflict, UnknownTable, UsageError
from psfleet.core.engine.eviction_records import EvictedIds, EvictionCause
from psfleet.core.engine.gradient_checks import check_elements
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.schema.table import LARGEST, TableSpec
from psfleet.core.engine.shard.events import PartState, Push, Shrink
from psfleet.core.engine.shard.follower_changes import ChangeLog
from psfleet.core.engine.shard.table_placement import dense_range, group_size
from psfleet.core.engine.tables.budget import MemoryBudget
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.memory_choice import HOST, KINDS, MemoryChoice
from psfleet.core.engine.tables.memory_kind import MemoryKind
from psfleet.core.engine.tables.row_data import HistoryPoint, TableChanges, check_rows
from psfleet.core.engine.tables.row_snapshot import FrozenTable
from psfleet.core.engine.tables.sparse import SparseTable

MOST = 2**62  # largest count of updates or samples; counts on the wire have 64 bits


Floats = NDArray[np.float32]
Table = DenseTable | SparseTable


@dataclass
class ShardCounters:
    """Counts of pushes for metrics. They are not part of the shard's state.

    Attributes:
        pushes: Number of new pushes.
        repeats: Number of pushes that had arrived before.
        samples: For each worker, the number of samples in its pushes.
        losses: For each worker, its last loss.
    """

    pushes: int = 0
    repeats: int = 0
    samples: dict[int, int] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)

    def count(self, push: Push, fresh: bool) -> None:
        """Count a push.

        Args:
            push: The push.
            fresh: False if it is a repeat.
        """
        if not fresh:
            self.repeats += 1
            return
        self.pushes += 1
        samples = self.samples.get(push.worker, 0) + push.samples
        self.samples[push.worker] = min(samples, MOST)
        if push.loss is not None:
            self.losses[push.worker] = push.loss


class ShardTables(dict[int, Table]):
    """Tables of one shard by key. An unknown key raises UnknownTable.

    Only one thread at a time changes tables, under the shard's lock; `read` may run at the same time in other
    threads.

    Attributes:
        index: Index of the shard's server.
        servers: Number of servers.
        makers: For each table key, the worker that made the table. Other tables have no entry.
        budgets: For each kind of memory, the budget that the tables share.
        choice: Decides which memory a table is in.
        changes: Log of the last changes, for followers.
        version: Number that rises when a table is added or replaced.
    """

    def __init__(self, index: int, servers: int) -> None:
        super().__init__()
        self.index = index
        self.servers = servers
        self.makers: dict[int, int] = {}
        self.budgets: dict[str, MemoryBudget] = {HOST.name: HOST.budget()}
        self.choice = MemoryChoice()
        self.changes = ChangeLog()
        self.version = 0

    def __setitem__(self, key: int, table: Table) -> None:
        super().__setitem__(key, table)
        self.version += 1
        add = functools.partial(self.changes.add, key)
        if isinstance(table, DenseTable):
            table.changed = functools.partial(add, None)
        else:
            table.scan.changed = add
            table.scan.pushed = functools.partial(self.changes.update, key)
        add(None)

    def __missing__(self, key: int) -> NoReturn:
        raise UnknownTable(f"table {key:#x} is unknown to server {self.index}; create it first")

    @property
    def budget(self) -> MemoryBudget:
        """Budget of host memory."""
        return self.budgets[HOST.name]

    @property
    def device_limit(self) -> int | None:
        """Bytes that tables may take in memory other than host memory, or None for no limit."""
        limits = [
            budget.limit
            for name, budget in self.budgets.items()
            if budget.limit is not None and not KINDS[name].is_host
        ]
        return sum(limits) if limits else None

    def sparse(self) -> Iterator[tuple[int, SparseTable]]:
        """Return pairs of key and table for all sparse tables."""
        return ((key, table) for key, table in self.items() if isinstance(table, SparseTable))

    def specs(self) -> dict[int, TableSpec]:
        """Return the definition of every table by key, including the servers that store it."""
        return {key: table.spec for key, table in self.items()}

    def has(self, spec: TableSpec) -> bool:
        """Return whether the table exists.

        Raises:
            TableConflict: A table of this name has another definition.
        """
        existing = self.get(spec.key)
        if existing is not None and spec.kind == existing.spec.kind == "dense":
            # The initializer of a dense table no longer matters once the table exists, and may differ:
            # Xavier's values follow from the shape, which `psfleet ckpt migrate` may have enlarged.
            spec = replace(spec, initializer=existing.spec.initializer, seed=existing.spec.seed)
        if existing is not None and existing.spec != spec:
            raise TableConflict(
                f"table {spec.name!r} exists with another definition: "
                f"{_difference(existing.spec, spec)}; declare it alike on all workers, give it another "
                f"name, or, if one comes from a snapshot, use psfleet ckpt migrate with --drop {spec.name}, "
                "or with --shape if it is dense and gets longer axes"
            )
        return existing is not None

    def make(self, spec: TableSpec, value: Floats, may_refuse: bool = True) -> Table:
        """Make a table without adding it to these tables. If it is not added, call `release`.

        Args:
            spec: Definition of the table.
            value: Initial values of this server's range (dense), or empty (sparse).
            may_refuse: True to raise an error if the table's device is missing or full, False to use host
                memory instead.

        Raises:
            UsageError: There is too little memory for the table.
        """
        kind = self.choice.kind_for(spec, may_refuse)
        try:
            return self._made(spec, value, kind)
        except UsageError:
            if kind.is_host or not self.choice.may_be_moved(spec, may_refuse):
                raise
        return self._made(spec, value, HOST)

    def release(self, spec: TableSpec) -> None:
        """Give back the memory of a table that was made and not added."""
        for budget in self.budgets.values():
            budget.release(spec.name)

    def _made(self, spec: TableSpec, value: Floats, kind: MemoryKind) -> Table:
        try:
            return self._allocated(spec, value, kind)
        except BaseException:  # a device may have given memory before the host lacked some
            self.release(spec)
            raise

    def _allocated(self, spec: TableSpec, value: Floats, kind: MemoryKind) -> Table:
        budget = self._budget_of(kind)
        if spec.kind == "sparse":
            parts = group_size(spec, self.servers)
            return SparseTable(
                spec, servers=parts, budget=self.budget, device=kind.name, device_budget=budget
            )
        low, high = dense_range(spec, self.index, self.servers)
        if value.shape != (high - low,):
            raise ShapeError(
                f"table {spec.name!r}: server {self.index} holds {high - low} values, "
                f"the first value has {value.shape}"
            )
        budget.check_charge(spec.name, kind.dense_bytes(spec, len(value)), "be made")
        table = DenseTable(spec, value, kind.name)
        budget.charge(spec.name, table.bytes)
        return table

    def _budget_of(self, kind: MemoryKind) -> MemoryBudget:
        budget = self.budgets.get(kind.name)
        if budget is None:
            budget = self.budgets[kind.name] = kind.budget()
            budget.folder = self.choice.folder
        # Get the limit before the first table is made: free memory is measured without psfleet's tables.
        if budget.limit is None:
            budget.limit = self.choice.limit(kind)
        return budget

    def read(self, reads: Iterable[Read]) -> list[Floats]:
        """Return the values for a pull: float32 [n, dim] for ids, or this server's range of a dense table."""
        reads = list(reads)
        out = [np.empty(shape, np.float32) for shape in map(self.shape_of, reads)]
        self.read_into(reads, out)
        return out

    def shape_of(self, read: Read) -> tuple[int, ...]:
        """Return the shape of the values for a read: (n, dim) if sparse, else (values on this server,)."""
        table = self[read.table]
        if isinstance(table, DenseTable):
            return (table.count,)
        if read.ids is None:
            raise ShapeError(f"table {table.spec.name!r} is sparse; a pull from it needs ids")
        return (len(read.ids), table.spec.dim)

    def read_into(self, reads: Iterable[Read], out: Iterable[Floats]) -> None:
        """Write the values of each read to an array of the shape that `shape_of` returns."""
        for read, values in zip(reads, out, strict=True):
            table = self[read.table]
            if isinstance(table, DenseTable):
                table.pull_into(values)
            else:
                assert read.ids is not None
                table.pull_into(read.ids, values)

    def check_gradient(self, gradient: Gradient) -> None:
        """Raise an error if the gradient does not fit its table."""
        table = self[gradient.table]
        name, shape = table.spec.name, gradient.values.shape
        if not abs(gradient.learning_rate) <= LARGEST:
            raise UsageError(
                f"table {name!r}: the learning rate of a push is {gradient.learning_rate!r}; "
                "it must be a finite float32"
            )
        # Some rules refuse a rate of 0. They must do so before the push has a record, which a restart would
        # replay.
        table.spec.rule.scalars(gradient.learning_rate, 1)
        if isinstance(table, DenseTable):
            if gradient.ids is not None:
                check_elements(table.spec, gradient.values, gradient.ids, table.count)
            elif shape != (table.count,):
                raise ShapeError(
                    f"table {name!r}: server {self.index} holds {table.count} values, "
                    f"the gradient has shape {shape}"
                )
        elif gradient.ids is None:
            raise ShapeError(f"table {name!r} is sparse; a gradient for it needs ids")
        else:
            check_rows(name, gradient.ids, gradient.values, table.spec.push_width)

    def check_state(self, state: PartState) -> None:
        """Raise an error if the state does not fit its table."""
        if state.step > MOST:
            raise UsageError(
                f"a state says that its table has had {state.step} updates; 2^62 is most"
            )
        table, count = self[state.table], 1 + len(self[state.table].spec.rule.slots)
        name, ids, shape = table.spec.name, state.ids, state.values.shape
        if isinstance(table, DenseTable):
            if ids is not None or len(shape) != 2:
                raise ShapeError(f"table {name!r} is dense; its state is [{count}, n] without ids")
            table.check_part(state.start, [shape[1]] * shape[0])
        elif ids is None:
            raise ShapeError(f"table {name!r} is sparse; its state has ids")
        else:
            check_rows(name, ids, state.values, table.spec.dim * count)
            for part, expected_shape in (
                (state.touched, ids.shape),
                (state.scores, (len(ids), table.spec.scores)),
            ):
                if part is not None and part.shape != expected_shape:
                    raise ShapeError(
                        f"table {name!r}: a state of {len(ids)} rows comes with an array {part.shape}"
                    )

    def check_shrink(self, event: Shrink) -> None:
        """Raise an error for shrinking a dense table, or for a threshold that is not finite."""
        if event.table and not isinstance(table := self[event.table], SparseTable):
            raise UsageError(f"table {table.spec.name!r} is dense; only sparse tables shrink")
        if not math.isfinite(event.threshold or 0.0):
            raise UsageError(f"the threshold of a shrink is {event.threshold}; it must be a number")

    def restore(self, state: PartState) -> None:
        """Write a part of a table, which `check_state` has accepted."""
        table = self[state.table]
        if isinstance(table, DenseTable):
            table.restore(state.step, list(state.values), state.start)
        else:
            assert state.ids is not None
            table.restore_step(state.step)
            table.restore(state.ids, state.values, state.touched, state.scores)

    def shrink(self, event: Shrink) -> int:
        """Remove rows with low scores or without recent pushes; return their number."""
        return sum(
            table.shrink(event.threshold, event.unseen)
            for key, table in self.sparse()
            if event.table in (0, key) and not table.spec.rule.counts
        )

    def evicted(self, key: int, position: int, limit: int) -> EvictedIds:
        """Return up to `limit` recorded evictions of a sparse table, beginning at `position`."""
        table = self[key]
        if isinstance(table, DenseTable):
            raise UsageError(f"table {table.spec.name!r} is dense; only rows are evicted")
        return table.evicted(position, limit)

    def evict(self, key: int, ids: NDArray[np.int64]) -> None:
        """Remove these rows of a sparse table because memory is short."""
        table = self[key]
        assert isinstance(table, SparseTable)
        table.remove(ids, EvictionCause.MEMORY)

    @property
    def tick_every(self) -> float:
        """Seconds between the ticks that the tables need, or 0 if no table depends on time."""
        intervals = (table.tick_every for _, table in self.sparse())
        return min((every for every in intervals if every), default=0.0)

    def tick(self, seconds: float) -> None:
        """Tell every sparse table the seconds since the last tick, so that it removes expired rows."""
        for _, table in self.sparse():
            table.tick(seconds)


def _difference(existing: TableSpec, spec: TableSpec) -> str:
    """Return the differences of two definitions in words: "its shape is (4,), not (5,)"."""
    pairs = (
        (part.name, getattr(existing, part.name), getattr(spec, part.name)) for part in fields(spec)
    )
    return "; ".join(
        f"its {name} is {value}, not {other_value}"
        for name, value, other_value in pairs
        if value != other_value
    )


class DeltaBases:
    """Earlier snapshots since which changes are known, so that a delta can contain only these changes.

    A *cut* is the numbered point at which the shard took a snapshot. A restart loses all cuts.

    Args:
        bounded: True to forget a cut once 4 million ids have been removed or written since then
            (SparseTable.mark), False to keep cuts until they are dropped.
    """

    def __init__(self, *, bounded: bool = False) -> None:
        self._bounded = bounded
        self._marks: dict[int, dict[int, HistoryPoint]] = {}  # cut -> table -> mark

    def __iter__(self) -> Iterator[int]:
        """Iterate over the numbers of the known snapshots."""
        return iter(self._marks)

    def freeze(self, tables: Mapping[int, Table], since: int) -> list[FrozenTable]:
        """Return images of the tables, complete or with changes only.

        Sparse tables contain only the changes since snapshot `since`, if that snapshot is known.
        """
        marks = self._marks.get(since, {})
        return [_frozen(table, marks.get(key)) for key, table in tables.items()]

    def last(self) -> Mapping[int, HistoryPoint]:
        """Return the point in each sparse table's history at the last known snapshot, by key.

        Returns an empty mapping if no snapshot is known.
        """
        return self._marks[max(self._marks)] if self._marks else {}

    def remember(self, tables: ShardTables, number: int) -> None:
        """Let all sparse tables record their changes from now on, because snapshot `number` is taken now."""
        marks = {key: table.mark(bounded=self._bounded) for key, table in tables.sparse()}
        self._marks[number] = marks

    def advance(self, tables: ShardTables, number: int) -> None:
        """Do as `remember` for snapshot `number`, and forget all snapshots before the last one."""
        self.drop_before(tables, max(self._marks, default=0))
        self.remember(tables, number)

    def changed_since(
        self, tables: ShardTables, number: int
    ) -> dict[int, TableChanges | None] | None:
        """Return for each table its changes since a snapshot, or None for a table that must be copied whole.

        Returns None instead of a mapping if the snapshot is no longer known.
        """
        marks = self._marks.get(number)
        sparse = dict(tables.sparse())
        if marks is None or not all(
            sparse[key].scan.has_history_since(mark) for key, mark in marks.items()
        ):
            return None
        changed = {key: sparse[key].changed_since(mark) for key, mark in marks.items()}
        return {key: changed.get(key) for key in tables}

    def drop_before(self, tables: Mapping[int, Table], base: int) -> None:
        """Forget the snapshots before `base`, the oldest that deltas may refer to. 0 forgets all of them."""
        for number in [n for n in self._marks if not 0 < base <= n]:
            for key, mark in self._marks.pop(number).items():
                table = tables[key]
                assert isinstance(table, SparseTable)
                table.release(mark)


def _frozen(table: Table, mark: HistoryPoint | None) -> FrozenTable:
    if isinstance(table, DenseTable) or mark is None:
        return table.freeze()
    return table.freeze(table.changed_since(mark))
