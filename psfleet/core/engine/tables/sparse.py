"""SparseTable: one server's part of a sparse table, rows of weights and optimizer state by 64-bit id.

This module holds the lock and the order of steps; the steps are elsewhere. A push asks the entry which ids
get a row (admission.py), charges the memory budget (budget.py), updates the rows (row_update.py) and
removes rows that have expired (lifetime.py). Where the rows are is decided by the memory kind
(memory_choice.py).

Rows, candidates and clock are read with `rows`, `candidates` and `clock`, and restored with `write`,
`write_candidates` and `set_clock`. A mark makes later deltas possible:

    mark = table.mark()                     # from here on removed ids are remembered
    changes = table.changed_since(mark)     # ids to write again, ids to delete
    delta = table.rows(changes.ids)
    table.release(mark)
"""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.evictions import EvictedIds, EvictionCause
from psfleet.core.engine.kernels.dedup import ascending
from psfleet.core.engine.kernels.rule_source import scalars_of
from psfleet.core.engine.schema.entry import EvictionStreamEntry, part_of
from psfleet.core.engine.schema.table import Device, TableSpec
from psfleet.core.engine.tables.admission import AdmissionFilter, admission_rule
from psfleet.core.engine.tables.budget import MemoryAccount, MemoryBudget
from psfleet.core.engine.tables.eviction_ranking import eviction_ranking
from psfleet.core.engine.tables.lifetime import RowLifetime
from psfleet.core.engine.tables.memory_choice import KINDS
from psfleet.core.engine.tables.row_data import (
    CandidateData,
    HistoryPoint,
    PackedRows,
    RowData,
    TableChanges,
    TableClock,
)
from psfleet.core.engine.tables.row_memory import EVERY, RowLimits, RowTraffic
from psfleet.core.engine.tables.row_scan import EvictionStream, RowScan
from psfleet.core.engine.tables.row_snapshot import FrozenRows, FrozenSparseTable
from psfleet.core.engine.tables.row_update import PlacedRows, RowValues, placed_rows

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class SparseTable:
    """Rows that are added when an id is first pushed, and removed as the table's entry says. Thread-safe.

    Attributes:
        spec: Definition of the table.
        step: Number of updates that the table has had.
        device: Memory that holds the rows.
        traffic: Counts of rows, for displays.
        scan: Ordered scans of the rows, and what has changed since a mark.
        paging: Traffic with the disk, for displays, or None if the rows are in memory.
        evictions: The ids that were evicted last, or None if the entry has no EvictionStreamEntry.
    """

    def __init__(
        self,
        spec: TableSpec,
        max_rows: int = 2**28,
        servers: int = 1,
        budget: MemoryBudget | None = None,
        device: Device = "cpu",
        device_budget: MemoryBudget | None = None,
    ) -> None:
        """Make an empty table.

        Args:
            spec: Definition of the table.
            max_rows: Largest number of rows of this part, even if the entry allows more.
            servers: Number of parts of the table, which share the limits of the entry.
            budget: Host memory that this table shares with others, or None for no limit.
            device: Memory that holds the rows.
            device_budget: Memory of that device that this table shares with others, or None for no limit.

        Raises:
            UsageError: There is no memory for the table.
        """
        self.spec = spec
        self.step = 0
        self.device = device
        self.traffic = RowTraffic()
        self._packed = layout = PackedRows(spec)
        limits = RowLimits.from_spec(spec, layout.width, servers, max_rows)
        budget, kind_budget = budget or MemoryBudget(), device_budget or MemoryBudget()
        index, self._rule, budget = KINDS[device].sparse(spec, limits.held, budget, kind_budget)
        self._index, self.paging = index, index.paging
        self._ranking = ranking = eviction_ranking(spec, index, layout.scores)
        rule = admission_rule(spec, servers)
        self._waiting = waiting = None if rule is None else rule.candidates
        entry = part_of(spec.entry, EvictionStreamEntry)
        stream = None if entry is None else EvictionStream(spec.name, -(-entry.keep // servers))
        self.evictions, self._stream_bytes = stream, 0 if stream is None else stream.bytes
        self.scan = scan = RowScan(index, spec.every_row, stream)
        self._account = MemoryAccount(
            spec, index, waiting, self._stream_bytes, budget, limits.pushed
        )
        self._admission = AdmissionFilter(index, scan, self._account, rule, ranking)
        self._lifetime = RowLifetime(spec, index, scan, waiting, layout.scores, ranking)
        self._counts = spec.counts_frequency
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def bytes(self) -> int:
        """Bytes of rows, optimizer state, index, candidates and remembered evictions."""
        waiting = 0 if self._waiting is None else self._waiting.index.bytes
        return self._index.bytes + waiting + self._stream_bytes

    @property
    def device_bytes(self) -> int:
        """The part of `bytes` that is in a device's memory."""
        return self._index.device_bytes

    @property
    def spilled(self) -> int:
        """Rows of a table on a device that are in host memory, for displays."""
        return sum(map(len, self._index.stores[1:]))

    @property
    def dropped(self) -> int:
        """Rows that were evicted, shrunk or removed so far, for displays."""
        return self.scan.dropped

    @property
    def admitted(self) -> int:
        """Rows that pushes have added so far, for displays."""
        return len(self._index) + self.scan.dropped - self.traffic.restored

    @property
    def waiting(self) -> int:
        """Number of candidates: ids that have been pushed too seldom for a row. For displays."""
        return 0 if self._waiting is None else len(self._waiting.index)

    def pull_into(self, ids: Ids, out: Floats) -> int:
        """Write the weights of these ids to `out`, and the first values for ids without a row.

        Returns the number of ids without a row, which a pull does not add.

        Args:
            ids: int64 [n], repeats allowed, any alignment.
            out: float32 [n, dim], side by side, any alignment.
        """
        with self._lock:
            unknown = self._rule.pull_into(np.ascontiguousarray(ids), out)
            self.traffic.pulled += len(ids)
            self.traffic.unknown += unknown
        return unknown

    def push(self, ids: Ids, gradients: Floats, learning_rate: float) -> None:
        """Update rows, adding those of unknown ids (that the entry admits) with their first values.

        Shapes are not checked here: the caller has done that (ShardTables.check_gradient).

        Args:
            ids: int64 [n], no id twice, any alignment.
            gradients: float32 [n, dim], any alignment; in a table that counts shows and clicks
                [n, dim + 2], with the two counts behind each gradient.
            learning_rate: Learning rate of this push.

        Raises:
            UsageError: The table is full; nothing was changed.
        """
        with self._lock:
            self._push(np.ascontiguousarray(ids), np.ascontiguousarray(gradients), learning_rate)

    def placed(self) -> PlacedRows | None:
        """Return pulls and pushes by address, for small calls, or None if this table has none."""
        if not self._admission.admits_all or self._counts or self.spec.every_row:
            return None
        return placed_rows(self, self._lock, self._rule, self._index, self._account, self._lifetime)

    def push_mean(self, parts: Sequence[tuple[Ids, Floats]], learning_rate: float) -> None:
        """Push the mean of several gradients, summed in their order. Shows and clicks are summed, too."""
        if len(parts) == 1:
            self.push(*parts[0], learning_rate)
            return
        with self._lock:
            self._push(*self._rule.mean(parts), learning_rate)

    def _push(self, ids: Ids, gradients: RowValues, learning_rate: float) -> None:
        ids, gradients = self._admission.admit(ids, gradients, self.step)
        self._update(ids, gradients, learning_rate)
        self._lifetime.age(self.step)

    def _update(self, ids: Ids, gradients: RowValues, learning_rate: float) -> None:
        rule, decay = self.spec.rule, self.spec.decay
        # Snapshots in progress copy the rows before they change, so this comes before the rule.
        if self.spec.every_row:
            self._index.keep_segments(*EVERY)
        else:
            self._index.keep(ids)
        scalars = scalars_of(rule, decay, learning_rate, self.step + 1)
        self.step += 1
        self.traffic.updated += len(ids)
        if self._counts:
            self._ranking.count_update(ids, self.step)
        self._rule.push(ids, gradients, scalars, self.step)
        self.scan.updated(ids, self.step)
        self._account.charge_budget()
        if self.spec.every_row:
            self._rule.update_other_rows(
                scalars_of(rule, decay, learning_rate, self.step, True), self.step
            )

    @property
    def evicts(self) -> bool:
        """True if rows are evicted when others need their places."""
        return self._account.evicts

    def check_room(self, parts: Sequence[Ids], written: bool = False, evicted: int = 0) -> None:
        """Refuse ids that the table cannot all take with its next update.

        Each id counts once. Ids with a row do not count, nor ids that the entry would not admit.

        Args:
            parts: The ids.
            written: True if the rows are written or restored; the entry then admits every id.
            evicted: Number of other rows that will be evicted before, see `surplus`.

        Raises:
            UsageError: The table would be full.
        """
        # Without the lock: in the common case a push need not wait here for a pull that holds it.
        if not self._account.can_surely_add(sum(map(len, parts))):
            with self._lock:
                self._admission.check(parts, self.step, written, evicted)

    def growth_bound(self, parts: Sequence[Ids], *, counts_rows: bool) -> float:
        """Return an upper bound of the bytes that the next update needs if it names `parts`.

        See MemoryAccount.growth_bound. It is cheap, since it does not look the ids up.
        """
        return self._account.growth_bound(sum(map(len, parts)), counts_rows=counts_rows)

    def reserve(self, rows: int) -> None:
        """Prepare memory for `rows` rows in all now, so that no push waits for it.

        Raises:
            UsageError: The table may not have that much memory.
        """
        with self._lock:
            self._account.reserve(rows)

    def surplus(self, parts: Sequence[Ids]) -> Ids:
        """Return the ids of rows to evict, so that there is memory for the next update, which names `parts`.

        These are the rows that the ranking lets go first, at least 1/16 of the table and none of `parts`.
        Returns none if there is enough memory, if the table may not evict, or if evicting everything else
        would not be enough.
        """
        if not self._account.evicts_for_memory or self._account.can_surely_add(
            sum(map(len, parts))
        ):
            return np.zeros(0, np.int64)
        with self._lock:
            return self._admission.surplus(parts, self.step)

    def count_update(self, ids: Ids) -> None:
        """Count an update of these ids that did not go through `push` (geo mode adds deltas)."""
        if self._counts:
            with self._lock:
                self._ranking.count_update(ids, self.step)

    def remove(self, ids: Ids, cause: EvictionCause | None = None) -> int:
        """Remove rows and candidates; return the number of rows. The ids start again at their next push.

        Args:
            ids: The ids, in any order; they may have no row.
            cause: Reason to note in the eviction stream, or None if the removal is no eviction.
        """
        ids = np.ascontiguousarray(ids)
        with self._lock:
            if self._waiting is not None:
                self._waiting.index.remove(ids)
            present = ids[self._index.locate(ids)[0] != 0]
            return self.scan.drop(ascending([present]), self.step, cause)

    def evict(self, count: int) -> int:
        """Remove the `count` rows that are evicted first; return the number of removed rows."""
        with self._lock:
            first = self._ranking.first(self.step, count, 0)
            return self.scan.drop(first, self.step, EvictionCause.CAPACITY)

    def evicted(self, position: int, limit: int) -> EvictedIds:
        """Return up to `limit` evictions, from a position on.

        Raises:
            UsageError: The entry has no EvictionStreamEntry, or the position is in the future.
        """
        if self.evictions is None:
            why = "does not remember evicted ids; join its entry with an EvictionStreamEntry"
            raise UsageError(f"table {self.spec.name!r} {why}")
        with self._lock:
            return self.evictions.read(position, limit)

    def set_evictions(self, columns: Mapping[str, NDArray[Any]]) -> None:
        """Remember the evictions that a snapshot holds, if the entry asks for them."""
        if self.evictions is not None:
            with self._lock:
                self.evictions.set(columns)

    @property
    def tick_every(self) -> float:
        """Seconds between calls of `tick` that the table needs. 0 means that it does not depend on time."""
        return self._lifetime.tick_every

    def tick(self, seconds: float) -> int:
        """Remove rows that have expired, as these seconds have passed; return their number."""
        with self._lock:
            return self._lifetime.tick(seconds, self.step)

    def shrink(self, threshold: float | None = None, unseen: int | None = None) -> int:
        """Remove rows that are worth little or not in use; return their number.

        Args:
            threshold: Lowest score of a row that stays, in a table that counts shows and clicks (None stands
                for the threshold of its entry) or whose eviction policy has scores (with None all rows
                stay). Other tables use it as `unseen`.
            unseen: Remove rows that no push has named since the shrink that many shrinks ago. None stands
                for the entry's delete_after_unseen; in tables without it no row is removed.
        """
        with self._lock:
            return self._lifetime.shrink(threshold, unseen, self.step)

    def ids(self) -> Ids:
        """Return the ids of all rows, ascending: int64 [n]."""
        with self._lock:
            return self.scan.ascending().copy()

    def segment_ids(self, first: int, last: int, since: HistoryPoint | None = None) -> Ids:
        """Return the ids of rows in these segments, in any order; with a mark, of rows updated since."""
        with self._lock:
            return self.scan.pushed_since(since, self.step, (first, last))

    def rows(self, ids: Ids) -> RowData:
        """Return the rows of these ids with optimizer state, scores and last steps, without unknown ids."""
        ids = np.ascontiguousarray(ids, np.int64)
        with self._lock:
            _, slots, steps = self._index.recall(ids, self.step)
            present = slots != 0
            rows = self._index.gather(slots[present])
        return self._packed.unpack(ids[present], rows, steps[present])

    def write(self, rows: RowData) -> None:
        """Set rows to what `rows` has returned. Adds rows for unknown ids; rows of other ids stay.

        Set the clock first, so that a table that evicts knows how old rows are.

        Raises:
            UsageError: The table is full; nothing was changed.
        """
        ids, words = np.ascontiguousarray(rows.ids, np.int64), self._packed.pack(rows)
        steps = np.ascontiguousarray(rows.touched, np.int64)
        index = self._index
        with self._lock:
            new = ids[index.locate(ids)[0] == 0]
            self._account.check_update(len(ids), new, len(new), written=True)
            if len(new) > index.max_rows - len(index):
                later = max(self.step, int(steps.max(initial=0))) + 1
                self._admission.make_places(len(ids), later, index.max_rows)
            index.put(ids, steps, words)
            self.scan.wrote(ids)
            self.traffic.restored += len(new)
            self._account.charge_budget()

    def candidates(self) -> CandidateData:
        """Return the candidates: the ids that have been pushed too seldom for a row."""
        with self._lock:
            return CandidateData() if self._waiting is None else self._waiting.read(self.step)

    def write_candidates(self, candidates: CandidateData) -> None:
        """Set candidates to what `candidates` has returned. If they are too many, the latest stay."""
        if self._waiting is None:
            if len(candidates):
                raise UsageError(
                    f"table {self.spec.name!r} gives every id a row; it has no place for "
                    f"{len(candidates)} that wait for one"
                )
            return
        with self._lock:
            self._waiting.write(candidates, self.step)

    @property
    def clock(self) -> TableClock:
        """Clock of the table."""
        return self._lifetime.clock(self.step)

    def set_clock(self, clock: TableClock) -> None:
        """Set the clock to an earlier value of `clock`. Rows keep the steps at which they were pushed."""
        with self._lock:
            self._lifetime.set_clock(clock, self.step)
            self.step = clock.step

    def page(self, offset: int, limit: int) -> RowData:
        """Return the rows `offset` to `offset + limit` in ascending order of id."""
        with self._lock:
            ids = self.scan.ascending()[offset : offset + limit].copy()
        return self.rows(ids)

    def state(self, offset: int, limit: int) -> tuple[Ids, Floats]:
        """Return the ids and values of such a page, without scores and steps."""
        rows = self.page(offset, limit)
        return rows.ids, rows.values

    def restore(
        self, ids: Ids, values: Floats, touched: Ids | None = None, scores: Floats | None = None
    ) -> None:
        """Write rows. Without `touched` and `scores` they count as first pushed by the last update."""
        touched = np.full(len(ids), self.step) if touched is None else touched
        if scores is None:
            scores = np.zeros((len(ids), self.spec.scores), np.float32)
        self.write(RowData(ids, values, touched, scores))

    def restore_step(self, step: int) -> None:
        """Set how many updates the table has had, and nothing else of its clock."""
        self.set_clock(dataclasses.replace(self.clock, step=step))

    def freeze(self, changes: TableChanges | None = None) -> FrozenSparseTable:
        """Return an image of the table as it is now, to be read while training goes on. Close it after that.

        It costs one bit a row now, and a copy of each row that changes before it is read (row_snapshot.py).

        Args:
            changes: Changes that the image contains, for a delta, or None for the whole table.
        """
        with self._lock:
            waiting = CandidateData() if self._waiting is None else self._waiting.read(self.step)
            stores, clock = self._index.stores, self.clock
            only = None if changes is None else changes.ids
            rows = [FrozenRows(store, self._lock, lambda: self.step, only) for store in stores]
            since = None if changes is None else changes.evicted
            evictions = {} if self.evictions is None else self.evictions.columns(since)
        contents = None if changes is None else changes.removed, evictions, self._packed.unpack
        return FrozenSparseTable(self.spec, clock, rows, waiting, *contents)

    def mark(self, *, bounded: bool = False) -> HistoryPoint:
        """Mark the present state, so that `changed_since` can list later changes. Release the mark after use.

        Args:
            bounded: Give the mark up beyond 4 million removed ids. Ask `scan.has_history_since` before use.
        """
        with self._lock:
            return self.scan.mark(self.step, bounded=bounded)

    def changed_since(self, mark: HistoryPoint) -> TableChanges:
        """Return the ids of rows that are new or may differ since the mark, and of those removed since.

        Costs one look at the index (3 to 8 ns a row), and nothing while the table trains. Candidates and the
        clock are not part of it: they are small, and written whole.
        """
        with self._lock:
            return self.scan.changed_since(mark, self.step)

    def set_since(self, mark: HistoryPoint) -> tuple[Ids, Ids]:
        """Return the ids of rows that were written since a mark (not pushed), and of removed rows."""
        with self._lock:
            return self.scan.set_since(mark)

    def release(self, mark: HistoryPoint) -> None:
        """Drop a mark, because changes since it are no longer needed."""
        with self._lock:
            self.scan.release(mark)
