"""SparseTable: one server's part of a sparse table, which stores rows of weights and optimizer state by id.

A push runs these steps under the table's lock: decide which new ids get a row (admission.py), charge the
memory budget (budget.py), update the rows (row_update.py), and remove rows that have expired (row_expiry.py).
memory_choice.py decides whether the rows are in host memory, on disk or on a GPU.

A snapshot consists of the rows, the candidates (ids that have not yet been pushed often enough to get a row)
and the clock (the number of updates and the times of past shrinks). They are read with `rows`, `candidates`
and `clock`, and restored with `write`, `write_candidates` and `set_clock`. For a delta, a snapshot with only
the changes, mark the state first:

    mark = table.mark()                     # from here on the table records removed ids
    changes = table.changed_since(mark)     # ids of changed rows, and ids of removed rows
    delta = table.rows(changes.ids)
    table.release(mark)
"""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.device_arrays import DeviceArray, DeviceSums
from psfleet.core.engine.eviction_records import EvictedIds, EvictionCause
from psfleet.core.engine.kernels.bags import RowBags
from psfleet.core.engine.kernels.dedup import BagSums, UniqueIds, ascending
from psfleet.core.engine.kernels.rule_source import scalars_of
from psfleet.core.engine.schema.entry import EvictionStreamEntry, part_of
from psfleet.core.engine.schema.table import Device, TableSpec
from psfleet.core.engine.tables.admission import AdmissionFilter, admission_rule
from psfleet.core.engine.tables.budget import MemoryAccount, MemoryBudget
from psfleet.core.engine.tables.eviction_choice import eviction_ranking
from psfleet.core.engine.tables.memory_choice import KINDS
from psfleet.core.engine.tables.row_data import (
    CandidateData,
    HistoryPoint,
    PackedRows,
    RowData,
    TableChanges,
    TableClock,
)
from psfleet.core.engine.tables.row_expiry import RowLifetime
from psfleet.core.engine.tables.row_memory import EVERY, RowLimits, RowTraffic
from psfleet.core.engine.tables.row_scan import EvictionStream, RowScan
from psfleet.core.engine.tables.row_snapshot import FrozenRows, FrozenSparseTable
from psfleet.core.engine.tables.row_update import HostRowUpdate, PlacedRows, RowValues, placed_rows

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


# From this many weights of a row on, bags are pooled from the table's own rows, and their gradients are
# summed while rows are updated. For shorter rows, copies and arrays of sums cost less (benchmarks/README.md).
_LONG_ROW = 32


class SparseTable:
    """Rows by id. A push adds rows for new ids. Thread-safe.

    The `entry` of the table's definition may limit which ids get a row, and says which rows are removed.

    Attributes:
        spec: Definition of the table.
        step: Number of updates of the table so far.
        device: Kind of memory that stores the rows.
        traffic: Counts of rows that were read and updated, for metrics.
        scan: Ordered scans of the rows, and the changes since an earlier point in the table's history.
        paging: Counts of rows read from the disk and written to it, for metrics, or None if no row is on
            disk.
        evictions: The most recently evicted ids, or None if `entry` has no EvictionStreamEntry.
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
            max_rows: Largest number of rows in this server's part, even if a CapacityEntry allows more.
            servers: Number of servers that the table is divided among. The limits of a CapacityEntry apply to
                all of them together.
            budget: Host memory that this table shares with the server's other tables, or None for no limit.
            device: Kind of memory that stores the rows.
            device_budget: Memory of the device that this table shares with other tables, or None for no
                limit.

        Raises:
            UsageError: There is no memory for the table.
        """
        self.spec = spec
        self.step = 0
        self.device = device
        self.traffic = RowTraffic()
        self._packed = layout = PackedRows(spec)
        # The default of `max_rows` bounds the address space that a table reserves. No other part of the table
        # needs it: slots allow 2**32 - 3 rows.
        limits = RowLimits.from_spec(spec, layout.width, servers, max_rows)
        budget, kind_budget = budget or MemoryBudget(), device_budget or MemoryBudget()
        # From here on, `budget` is the one that is charged for the rows: the host's or that of the kind.
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
        """Bytes that the table takes: rows with optimizer state, index, recorded evictions, and candidates.

        Candidates are ids that were pushed but have no row yet.
        """
        waiting = 0 if self._waiting is None else self._waiting.index.bytes
        return self._index.bytes + waiting + self._stream_bytes

    @property
    def device_bytes(self) -> int:
        """The part of `bytes` that is in a device's memory."""
        return self._index.device_bytes

    @property
    def spilled(self) -> int:
        """Number of rows that are in host memory because the device is full. 0 for a table in host memory."""
        return sum(map(len, self._index.stores[1:]))

    @property
    def dropped(self) -> int:
        """Number of rows that have been removed so far, for any reason."""
        return self.scan.dropped

    @property
    def admitted(self) -> int:
        """Number of rows that pushes have added so far, including rows that were removed later."""
        return len(self._index) + self.scan.dropped - self.traffic.restored

    @property
    def waiting(self) -> int:
        """Number of candidates: ids that have not yet been pushed often enough to get a row."""
        return 0 if self._waiting is None else len(self._waiting.index)

    def pull_into(self, ids: Ids, out: Floats) -> int:
        """Write the weights of these ids to `out`. Ids without a row get their initial values.

        A pull adds no rows. Returns the number of ids without a row.

        Args:
            ids: int64 [n], repeats allowed, any alignment.
            out: float32 [n, dim], contiguous, any alignment.
        """
        with self._lock:
            unknown = self._rule.pull_into(np.ascontiguousarray(ids), out)
            self.traffic.pulled += len(ids)
            self.traffic.unknown += unknown
        return unknown

    def can_share(self, count: int = 0) -> bool:
        """Return whether a push of `count` ids may now have its arrays on the GPU (DeviceSums).

        The table must be on the GPU with all its rows, give every id a row, count nothing, and have no
        snapshot in progress.
        """
        plain = self._admission.admits_all and not (self._counts or self.spec.pushed_scores)
        return (
            plain
            and not any(store.views for store in self._index.stores)
            and self._rule.can_share(count)
            and self._account.can_surely_add(count)
        )

    def pull_to_device(self, ids: DeviceArray, out: DeviceArray) -> bool:
        """Write weights to an array on the GPU (see DeviceReader). New ids are not counted for metrics."""
        with self._lock:
            is_done = self._rule.pull_to_device(ids, out)
            self.traffic.pulled += len(ids) if is_done else 0
        return is_done

    @property
    def takes_sums(self) -> bool:
        """True if a push of `BagSums` computes the sums while it updates the rows."""
        # `type`, not isinstance: rows on disk are read in parts of a push that are no ranges.
        is_long = self.spec.dim >= _LONG_ROW
        return is_long and type(self._rule) is HostRowUpdate and not self.spec.pushed_scores

    def pool(self, ids: UniqueIds, bags: Sequence[RowBags]) -> Floats | None:
        """Return the pooled weights of bags, float32 [all bags, dim], or None if rows must be copied first.

        The bits are those of `pull_into` followed by `UniqueIds.pool`.

        Args:
            ids: Distinct ids of the batch, in one group.
            bags: Bags of the batch's ids.
        """
        rule, dim = self._rule, self.spec.dim
        if type(rule) is not HostRowUpdate or not rule.is_plain or dim < _LONG_ROW:
            return None
        [unique] = ids.unique
        # The lock is held while rows are pooled, since a push would change rows that are being read.
        with self._lock:
            addresses, unknown = rule.addresses(unique)
            self.traffic.pulled += len(unique)
            self.traffic.unknown += unknown
            return ids.pool_at(addresses, dim, bags)

    def push(
        self, ids: Ids, gradients: Floats | BagSums | DeviceSums, learning_rate: float
    ) -> None:
        """Update the rows of these ids.

        New ids get a row with their initial values first, unless the table's definition (its `entry`) does
        not admit them.

        Shapes are not checked here, because `ShardTables.check_gradient` has checked them before.

        Args:
            ids: int64 [n], without repeats, any alignment.
            gradients: float32 [n, dim], any alignment. In a table that counts shows and clicks
                float32 [n, dim + 2]: each gradient is followed by its two counts. DeviceSums, with their ids,
                are used where they are if `can_share`, and are otherwise copied to the host.
            learning_rate: Learning rate of this push.

        Raises:
            UsageError: The table is full; nothing was changed.
        """
        if isinstance(gradients, DeviceSums):
            with self._lock:
                if self.can_share(len(ids)):
                    self._push(ids, cast(RowValues, gradients), learning_rate)
                    return
        values = cast(RowValues, gradients)
        if not (self.takes_sums and isinstance(gradients, BagSums)):
            values = np.ascontiguousarray(gradients)  # computes such sums too
        with self._lock:
            self._push(np.ascontiguousarray(ids), values, learning_rate)

    def placed(self) -> PlacedRows | None:
        """Return an object for fast small pulls and pushes, which take addresses of arrays instead of arrays.

        Returns None if the table needs more than plain updates: not every id gets a row, frequencies are
        counted, each push updates every row, or rows are on disk or on a GPU.
        """
        if not self._admission.admits_all or self._counts or self.spec.every_row:
            return None
        return placed_rows(self, self._lock, self._rule, self._index, self._account, self._lifetime)

    def push_mean(self, parts: Sequence[tuple[Ids, Floats]], learning_rate: float) -> None:
        """Update rows with the mean of several gradients, summed in the given order.

        Shows and clicks are summed and not averaged.

        Args:
            parts: Ids and gradients of each push, as for `push`.
            learning_rate: Learning rate of this update.
        """
        if len(parts) == 1:  # nothing to sum, which saves a search for distinct ids and a copy
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
        # Before the step, because a user's rule may raise an error here. Step and rows then stay as they are.
        scalars = scalars_of(rule, decay, learning_rate, self.step + 1)
        self.step += 1
        self.traffic.updated += len(ids)
        # Before the rule, which stamps the rows with this step: rows that have the stamp are not counted
        # again. New ids have no row yet. Their rows begin with a frequency of 1.
        if self._counts:
            self._ranking.count_update(ids, self.step)
        self._rule.push(ids, gradients, scalars, self.step)
        self.scan.updated(ids, self.step)
        # The check in `admit` was an upper bound. The budget is charged with what the rows now take.
        self._account.charge_budget()
        if self.spec.every_row:  # after the rule, whose marks show which rows this step has updated
            self._rule.update_other_rows(
                scalars_of(rule, decay, learning_rate, self.step, True), self.step
            )

    @property
    def evicts(self) -> bool:
        """True if the table removes rows to make room for new rows when it is full."""
        return self._account.evicts

    def check_room(
        self,
        parts: Sequence[Ids],
        written: bool = False,
        evicted: int = 0,
        admits_all: bool = False,
    ) -> None:
        """Raise an error if the table cannot take all these ids in its next update. Changes nothing.

        An id that appears in several parts counts once. Ids that have a row, and ids that would not get one
        (by the `entry` of the table's definition), need no room.

        Args:
            parts: Ids of the update.
            written: True if the rows are written or restored instead of pushed. Every id then gets a row.
            evicted: Number of rows that the caller will evict before the update (result of `surplus`).
            admits_all: True if every id of the update gets a row, whatever the table's `entry` says.

        Raises:
            UsageError: The table would be full.
        """
        # Without the lock: in the common case a push need not wait here for a pull that holds it. The answer
        # stays true until the push: only updates make a table grow, and the shard makes one at a time.
        if not self._account.can_surely_add(sum(map(len, parts))):
            with self._lock:
                self._admission.check(parts, self.step, written, evicted, admits_all)

    def growth_bound(self, parts: Sequence[Ids], *, counts_rows: bool) -> float:
        """Return an upper bound of the additional bytes that the next update needs, if it updates these ids.

        This is a cheap estimate that does not look the ids up, so every id may be a new row.

        Args:
            parts: Ids of the update.
            counts_rows: True to take into account that new rows can use the memory of removed rows. The
                result is then smaller, and takes longer to compute.
        """
        return self._account.growth_bound(sum(map(len, parts)), counts_rows=counts_rows)

    def reserve(self, rows: int) -> None:
        """Allocate memory for a total of `rows` rows now, so that later pushes need not wait for it.

        A number above the table's limit allocates memory up to that limit.

        Raises:
            UsageError: The memory budget does not allow that many rows.
        """
        with self._lock:
            self._account.reserve(rows)

    def surplus(self, parts: Sequence[Ids], admits_all: bool = False) -> Ids:
        """Return ids of rows that the caller should evict so that there is memory for the next update.

        The rows are the first in the eviction order, at least 1/16 of the table, and none of `parts`. The
        result is empty if there is enough memory, if the table may not evict rows, or if evicting all other
        rows would not be enough.

        Args:
            parts: Ids of the next update.
            admits_all: The argument of `check_room`.
        """
        # At least 1/16, because each choice ranks the whole table (eviction_choice.py). Without the lock, as
        # in `check_room`.
        if not self._account.evicts_for_memory or self._account.can_surely_add(
            sum(map(len, parts))
        ):
            return np.zeros(0, np.int64)
        with self._lock:
            return self._admission.surplus(parts, self.step, admits_all)

    def begin_update(self, ids: Ids) -> None:
        """Count an update of these ids that does not go through `push`, such as the deltas of geo mode.

        Call `end_update` after the rows were written.
        """
        with self._lock:
            self.step += 1
            if self._counts:
                self._ranking.count_update(ids, self.step)

    def end_update(self) -> None:
        """Remove the rows that have expired with the update that `begin_update` has counted."""
        with self._lock:
            self._lifetime.age(self.step)

    def remove(self, ids: Ids, cause: EvictionCause | None = None) -> int:
        """Remove the rows of these ids, and ids that wait for a row; return the number of removed rows.

        At the next push such an id is treated as a new id.

        Args:
            ids: Ids in any order, with or without a row.
            cause: Reason to record in the eviction stream, or None if the removal is no eviction.
        """
        ids = np.ascontiguousarray(ids)
        with self._lock:
            if self._waiting is not None:
                self._waiting.index.remove(ids)
            present = ids[self._index.locate(ids)[0] != 0]
            # `drop` takes ids with a row, each once, since it records them in streams and histories.
            return self.scan.drop(ascending([present]), self.step, cause)

    def evict(self, count: int) -> int:
        """Remove the `count` rows that are first in the eviction order; return the number of removed rows."""
        with self._lock:
            # Rows of any age, even of the last update: the caller asks between two updates.
            first = self._ranking.first(self.step, count, 0)
            return self.scan.drop(first, self.step, EvictionCause.CAPACITY)

    def evicted(self, position: int, limit: int) -> EvictedIds:
        """Return up to `limit` recorded evictions, from number `position` on, counted from 0 over all time.

        Raises:
            UsageError: The table records no evictions, or it has not reached this position yet.
        """
        if self.evictions is None:
            why = "does not remember evicted ids; join its entry with an EvictionStreamEntry"
            raise UsageError(f"table {self.spec.name!r} {why}")
        with self._lock:
            return self.evictions.read(position, limit)

    def set_evictions(self, columns: Mapping[str, NDArray[Any]]) -> None:
        """Restore the recorded evictions from a snapshot, if the table records evictions."""
        if self.evictions is not None:
            with self._lock:
                self.evictions.set(columns)

    @property
    def tick_every(self) -> float:
        """Seconds between calls of `tick` that the table needs, or 0 if its rows do not expire by time."""
        return self._lifetime.tick_every

    def tick(self, seconds: float) -> int:
        """Advance the table's time and remove rows that have expired; return the number of removed rows."""
        with self._lock:
            return self._lifetime.tick(seconds, self.step)

    def shrink(self, threshold: float | None = None, unseen: int | None = None) -> int:
        """Remove rows with a low score and rows not pushed for long; return the number of removed rows.

        Args:
            threshold: Rows with a lower score are removed. None means the `delete_threshold` of the table's
                ShowClickEntry; with an eviction policy that has scores, None removes no row by score. In a
                table without scores, this is used as `unseen`.
            unseen: Rows that no push has updated since this many shrinks ago are removed. None means the
                `delete_after_unseen` of the table's ShowClickEntry, or without one removes no row by age.
        """
        with self._lock:
            return self._lifetime.shrink(threshold, unseen, self.step)

    def ids(self) -> Ids:
        """Return the ids of all rows, ascending: int64 [n]."""
        with self._lock:
            return self.scan.ascending().copy()  # `scan` keeps the array for later pages

    def segment_ids(self, first: int, last: int, since: HistoryPoint | None = None) -> Ids:
        """Return the ids of the rows in a range of segments, in any order.

        A segment is one of a fixed number of classes of ids, chosen by a hash of the id, so that a large
        table can be scanned in parts.

        Args:
            first: First segment.
            last: Segment after the last.
            since: Result of `mark`, to return only rows updated after that call, or None for all rows.
        """
        with self._lock:
            return self.scan.pushed_since(since, self.step, (first, last))

    def rows(self, ids: Ids) -> RowData:
        """Return the rows of these ids, with optimizer state, scores and the step of each last push.

        Ids without a row are left out.
        """
        ids = np.ascontiguousarray(ids, np.int64)
        with self._lock:
            _, slots, steps = self._index.recall(ids, self.step)
            present = slots != 0
            rows = self._index.gather(slots[present])
        # These rows are a copy. Pulls and pushes go on while they are unpacked.
        return self._packed.unpack(ids[present], rows, steps[present])

    def write(self, rows: RowData) -> None:
        """Write rows as returned by `rows`. New ids get a row; rows of other ids do not change.

        If the table evicts rows, call `set_clock` first: the age of a row is relative to the table's step.

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
                # The age of a row is relative to a step. With a step after every push, any row may be
                # evicted, also one that is written here. It is then added again, so there must be places for
                # all ids and not only for the new ones.
                later = max(self.step, int(steps.max(initial=0))) + 1
                self._admission.make_places(len(ids), later, index.max_rows)
            index.put(ids, steps, words)
            self.scan.wrote(ids)
            self.traffic.restored += len(new)
            self._account.charge_budget()

    def candidates(self) -> CandidateData:
        """Return the candidates: ids that have not yet been pushed often enough to get a row."""
        with self._lock:
            return CandidateData() if self._waiting is None else self._waiting.read(self.step)

    def write_candidates(self, candidates: CandidateData) -> None:
        """Restore candidates (ids without a row yet) as returned by `candidates`.

        If there are too many, the most recently pushed are kept.
        """
        self.check_candidates(len(candidates))
        if self._waiting is not None:
            with self._lock:
                self._waiting.write(candidates, self.step)

    def check_candidates(self, count: int) -> None:
        """Raise UsageError if the table cannot have this number of candidates (ids without a row yet)."""
        if self._waiting is None and count:
            raise UsageError(
                f"table {self.spec.name!r} gives every id a row; it has no place for "
                f"{count} that wait for one"
            )

    @property
    def clock(self) -> TableClock:
        """Number of updates so far, and steps and times of past shrinks and ticks. Part of a snapshot."""
        # Without the lock, which `freeze` holds when it reads this, and which cannot be taken twice.
        return self._lifetime.clock(self.step)

    def set_clock(self, clock: TableClock) -> None:
        """Restore the number of updates and the times of past shrinks.

        Rows keep the step of their last push.
        """
        with self._lock:
            self._set_clock(clock)

    def _set_clock(self, clock: TableClock) -> None:
        # Before the step changes: stamps of rows are rewritten from the old step to the new one.
        self._lifetime.set_clock(clock, self.step)
        self.step = clock.step

    def page(self, offset: int, limit: int) -> RowData:
        """Return up to `limit` rows in ascending order of id, beginning with row number `offset`."""
        with self._lock:
            ids = self.scan.ascending()[offset : offset + limit].copy()
        # `rows` takes the lock itself. It leaves out a row that is removed before that.
        return self.rows(ids)

    def state(self, offset: int, limit: int) -> tuple[Ids, Floats]:
        """Return ids and values (weights and optimizer state) of up to `limit` rows, ordered as in `page`."""
        rows = self.page(offset, limit)
        return rows.ids, rows.values

    def restore(
        self, ids: Ids, values: Floats, touched: Ids | None = None, scores: Floats | None = None
    ) -> None:
        """Write rows from their ids and values.

        Args:
            ids: int64 [n].
            values: float32 weights and optimizer state of each row.
            touched: Step of each row's last push, or None for the present step.
            scores: Shows and clicks, or frequency, of each row, or None for zeros.
        """
        touched = np.full(len(ids), self.step) if touched is None else touched
        if scores is None:
            scores = np.zeros((len(ids), self.spec.scores), np.float32)
        self.write(RowData(ids, values, touched, scores))

    def restore_step(self, step: int) -> None:
        """Set the number of updates so far, and leave the times of past shrinks unchanged."""
        with self._lock:
            self._set_clock(dataclasses.replace(self.clock, step=step))

    def freeze(self, changes: TableChanges | None = None) -> FrozenSparseTable:
        """Return an image of the table as it is now, which can be read while training goes on.

        Close it after reading.

        Making the image costs one bit per row. Later, a row that changes before it was read is copied first
        (row_snapshot.py).

        Args:
            changes: Result of `changed_since`, to make an image of only these changes, or None for the whole
                table.
        """
        with self._lock:
            waiting = CandidateData() if self._waiting is None else self._waiting.read(self.step)
            stores, clock = self._index.stores, self.clock
            only = None if changes is None else changes.ids
            # A function, because an image copies rows later, and computes their steps from the step of that
            # time.
            rows = [FrozenRows(store, self._lock, lambda: self.step, only) for store in stores]
            since = None if changes is None else changes.evicted
            evictions = {} if self.evictions is None else self.evictions.columns(since)
        contents = None if changes is None else changes.removed, evictions, self._packed.unpack
        return FrozenSparseTable(self.spec, clock, rows, waiting, *contents)

    def mark(self, *, bounded: bool = False) -> HistoryPoint:
        """Mark the present state, so that `changed_since` can list later changes. Call `release` when done.

        Args:
            bounded: True to give the mark up after 4 million removed ids, which take 32 MiB: for a mark that
                may be kept for long, such as that of the last snapshot. Before using such a mark, check
                `scan.has_history_since`.
        """
        with self._lock:
            return self.scan.mark(self.step, bounded=bounded)

    def changed_since(self, mark: HistoryPoint) -> TableChanges:
        """Return the ids of rows that are new or may have changed since the mark, and of rows removed since.

        Scans the index once (3 to 8 ns per row); the mark does not slow down training. Candidates (ids
        without a row yet) and the clock are not included, because a delta stores them whole.
        """
        with self._lock:
            return self.scan.changed_since(mark, self.step)

    def set_since(self, mark: HistoryPoint) -> tuple[Ids, Ids]:
        """Return two arrays of ids: the rows that `write` has set since the mark, and the rows removed since.

        A mark is a result of the method `mark`.
        """
        with self._lock:
            return self.scan.set_since(mark)

    def release(self, mark: HistoryPoint) -> None:
        """Drop a mark, so that the table no longer records removed ids for it."""
        with self._lock:
            self.scan.release(mark)
