"""Ordered scans of a sparse table, its changes since a mark (for deltas and followers), and evicted ids.

Change tracking costs a push nothing. Rows that were updated since a mark are found by their stamps, the steps
of their last push: every row whose stamp is later than the mark. Only changes that do not show in stamps are
recorded, in a ChangeHistory: removed rows, and rows that were written other than by an update. After the
table's step is set (its clock is restored), marks from before are useless, and every row counts as changed.

RowScan is also the only place where rows are removed, so that each removal is recorded in the history, in the
eviction stream and in the followers' change log. EvictionStream stores the most recently evicted ids.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.core.engine.eviction_records import EvictedIds, EvictionCause
from psfleet.core.engine.kernels.dedup import ascending
from psfleet.core.engine.tables.row_data import EVICTED, HistoryPoint, TableChanges
from psfleet.core.engine.tables.row_memory import EVERY, RowMemory

Ids = NDArray[np.int64]
Column = NDArray[Any]


class EvictionStream:
    """Ring buffer of the last evictions of a table, each with id, step and cause. Not thread-safe.

    Evictions are numbered from 0. The number of an eviction is its *position*, and follows from the table's
    updates alone. So a server that replays its log has the same stream again, and readers continue at their
    position.

    Args:
        table: Name of the table, for messages.
        keep: Number of evictions that are stored.

    Attributes:
        next: Position of the next eviction.
        bytes: Memory of the full ring: 17 bytes for each eviction.
    """

    def __init__(self, table: str, keep: int) -> None:
        self.next = 0
        self.bytes = 17 * keep
        self._table = table
        self._keep = keep
        self._held = 0
        self._sets = 0
        self._ids, self._steps = np.zeros(keep, np.int64), np.zeros(keep, np.int64)
        self._causes = np.zeros(keep, np.uint8)

    def __len__(self) -> int:
        return self._held

    def add(self, ids: Ids, step: int, cause: EvictionCause) -> None:
        """Append the evictions of one step.

        They are sorted by id, because the order of rows in memory is arbitrary.
        """
        ids = np.sort(ids)
        self.next += len(ids)
        ids = ids[-self._keep :]
        self._held = min(self._held + len(ids), self._keep)
        positions = self._places(self.next - len(ids), self.next)
        self._ids[positions], self._steps[positions], self._causes[positions] = ids, step, cause

    def read(self, position: int, limit: int) -> EvictedIds:
        """Return up to `limit` evictions from number `position` on.

        The result says how many of them are no longer stored (`missed`).

        Raises:
            UsageError: The stream has fewer evictions than `position`.
        """
        if not 0 <= position <= self.next:
            raise UsageError(
                f"table {self._table!r}: evictions are read from position {position} and this server has "
                f"come to {self.next}, perhaps because an earlier snapshot was loaded; start without a "
                "position"
            )
        first = max(position, self.next - self._held)
        last = min(first + limit, self.next)
        at = self._places(first, last)
        return EvictedIds(
            self._ids[at], self._steps[at], self._causes[at], (last,), first - position
        )

    @property
    def point(self) -> tuple[int, int]:
        """The present end of the stream. Pass it to `columns` later, to get the evictions since then."""
        return self._sets, self.next

    def columns(self, since: tuple[int, int] | None = None) -> dict[str, Column]:
        """Return the stored evictions as columns (named arrays) of a snapshot.

        Args:
            since: Point of the stream at an earlier snapshot, to leave out evictions that are in that
                snapshot, or None for all stored evictions. A point from before the last `set` is ignored.
        """
        # After `set`, positions belong to another stream, so a point from before is meaningless.
        first = self.next - self._held
        if since is not None and since[0] == self._sets:
            first = max(first, since[1])
        evictions = self.read(first, self._held)
        values = (evictions.ids, evictions.steps, evictions.causes, np.array([self.next], np.int64))
        return dict(zip(EVICTED, values, strict=True))

    def set(self, columns: Mapping[str, Column]) -> None:
        """Restore evictions as returned by `columns`.

        If they are too many for this ring, the latest are kept.

        Raises:
            ShapeError: The columns do not belong to a stream.
        """
        *values, following = (columns.get(name, np.zeros(0, np.int64)) for name in EVICTED)
        count = len(values[0])
        if following.shape != (1,) or any(column.shape != (count,) for column in values):
            raise ShapeError(
                f"table {self._table!r}: the columns {sorted(columns)} of its evictions do not fit each other"
            )
        self._sets += 1
        self.next, self._held = int(following[0]), min(count, self._keep)
        positions = self._places(self.next - self._held, self.next)
        ids, steps, causes = (column[count - self._held :] for column in values)
        self._ids[positions], self._steps[positions], self._causes[positions] = ids, steps, causes

    def _places(self, first: int, last: int) -> Ids:
        return np.arange(first, last) % self._keep


@dataclass
class ChangeHistory:
    """Removals and direct writes of a table's rows, recorded while somebody may ask for changes.

    An event is one removal or one write of any number of rows. Events are numbered. A mark is the number of
    the event that comes next. Events are kept from the oldest mark on.

    Attributes:
        era: Number of times that the table's step was set, or the scores of all rows changed. The steps of
            rows do not tell which rows have changed since an earlier era: any row may have.
        first: Number of the first event that is kept.
        marks: Marks that are kept until they are released.
        bounded: Marks that are given up as soon as the history has more than `limit` ids.
        limit: Largest number of ids in the history while there are bounded marks.
    """

    era: int = 0
    first: int = 0
    marks: list[int] = field(default_factory=list)
    bounded: list[int] = field(default_factory=list)
    limit: int = 4 << 20
    _count: int = 0
    _removed: list[Ids] = field(default_factory=list)
    _written: list[Ids] = field(default_factory=list)

    @property
    def is_kept(self) -> bool:
        """True while there is a mark, so that events must be recorded."""
        return bool(self.marks or self.bounded)

    def mark(self, *, bounded: bool = False) -> int:
        """Record removals and writes from now on. Returns the mark to pass to `since` and `release`.

        The mark is the number of the next event.
        """
        event = self.first + len(self._removed)
        (self.bounded if bounded else self.marks).append(event)
        return event

    def release(self, event: int, *, bounded: bool = False) -> None:
        """Release a mark, and drop the removals and writes that no other mark needs.

        A bounded mark may have been given up before.
        """
        if not bounded:
            self.marks.remove(event)
        elif event in self.bounded:
            self.bounded.remove(event)
        self._trim()

    def _trim(self) -> None:
        first = min(self.marks + self.bounded, default=self.first + len(self._removed))
        count = first - self.first
        self._count -= sum(map(len, self._removed[:count] + self._written[:count]))
        del self._removed[:count], self._written[:count]
        self.first = first

    def add(self, *, removed: Ids | None = None, written: Ids | None = None) -> None:
        """Record that rows were removed, or written other than by an update."""
        if self.is_kept:
            nothing = np.zeros(0, np.int64)
            self._removed.append(nothing if removed is None else removed.copy())
            self._written.append(nothing if written is None else written.copy())
            self._count += len(self._removed[-1]) + len(self._written[-1])
            if self.bounded and self._count > self.limit:
                self.bounded.clear()
                self._trim()

    def since(self, event: int) -> tuple[Ids, Ids]:
        """Return the ids removed and the ids written since a mark, both ascending.

        A removed id may have been added again since, and a written id may have been removed.
        """
        start = event - self.first
        return ascending(self._removed[start:]), ascending(self._written[start:])


class RowScan:
    """Removes rows, lists them in order, and returns changes since a mark. Not thread-safe.

    Args:
        index: Storage of the table's rows.
        rests: True if every update changes every row (TableSpec.every_row).
        stream: Object that records evictions, or None if the table records none.

    Attributes:
        dropped: Number of rows removed so far, for metrics.
        changed: Callback for changes other than pushes. Its argument is the ids of rows that were written or
            removed, or None if any row may have changed.
        pushed: Callback after each update, with the updated ids, the step, and the number of rows.
    """

    def __init__(self, index: RowMemory, rests: bool, stream: EvictionStream | None = None) -> None:
        self._index = index
        self._stream = stream
        self._rests = rests
        self.dropped = 0
        self.changed: Callable[[Ids | None], None] = lambda ids: None
        self.pushed: Callable[[Ids, int, int], None] = lambda ids, step, rows: None
        self._history = ChangeHistory()
        self._ids: Ids | None = None

    def drop(self, ids: Ids, step: int, cause: EvictionCause | None) -> int:
        """Remove rows. Records them in the eviction stream, in the history and in the followers' log.

        Args:
            ids: int64 [n], each with a row.
            step: Present step of the table.
            cause: Reason of the eviction, or None for removals that are no evictions.

        Returns:
            Number of removed rows.
        """
        if not len(ids):
            return 0
        if self._stream is not None and cause is not None:
            self._stream.add(ids, step, cause)
        self._ids = None
        self._history.add(removed=ids)
        self.changed(ids)
        count = self._index.remove(ids)
        self.dropped += count
        return count

    def wrote(self, ids: Ids) -> None:
        """Record that rows were written other than by an update, such as by a load.

        A scan for changed rows compares the steps of last pushes, which a written row does not show. So the
        ids are kept.
        """
        self._history.add(written=ids)
        self.changed(ids)

    def updated(self, ids: Ids, step: int) -> None:
        """Record for followers (processes with a copy of the weights) which ids this update has changed."""
        if self._rests:
            self.changed(None)
        else:
            self.pushed(ids, step, len(self._index))

    def has(self, ids: Ids) -> NDArray[np.bool_]:
        """Return a mask of the ids that have a row."""
        mask: NDArray[np.bool_] = self._index.locate(ids)[0] != 0
        return mask

    def restamped(self) -> None:
        """Begin a new era after the table's number of updates was set.

        The steps of rows' last pushes can then not be compared with marks of earlier eras.
        """
        self._history.era += 1
        self.changed(None)

    def rescored(self) -> None:
        """Begin a new era after the scores of all rows have changed.

        No row has a new step, but a delta since an earlier mark needs the scores of all rows. Followers do
        not: they have no scores.
        """
        self._history.era += 1

    def ascending(self) -> Ids:
        """Return all ids, ascending. The result is cached, since callers read it page by page.

        A removal clears the cache; an added row is noticed by the number of rows.
        """
        if self._ids is None or len(self._ids) != len(self._index):
            self._ids = self._index.entries()[0]
        return self._ids

    def mark(self, step: int, *, bounded: bool = False) -> HistoryPoint:
        point = None if self._stream is None else self._stream.point
        event = self._history.mark(bounded=bounded)
        return HistoryPoint(self._history.era, step, event, point, bounded)

    def before(self, step: int) -> HistoryPoint:
        """Return a mark in the table's history just before update `step`, valid for `pushed_since` only."""
        return HistoryPoint(self._history.era, step - 1, 0)

    def has_history_since(self, mark: HistoryPoint) -> bool:
        """Return whether all removals and direct writes since this mark are still known.

        A bounded mark may have been given up.
        """
        return mark.event >= self._history.first

    def changed_since(self, mark: HistoryPoint, step: int) -> TableChanges:
        writes, removals = self.set_since(mark)
        pushed = self.pushed_since(mark, step)
        return TableChanges(ascending([pushed, writes]), removals, mark.evicted)

    def set_since(self, mark: HistoryPoint) -> tuple[Ids, Ids]:
        removed, written = self._history.since(mark.event)
        return written[self.has(written)], removed[~self.has(removed)]

    def pushed_since(
        self, mark: HistoryPoint | None, step: int, segments: tuple[int, int] = EVERY
    ) -> Ids:
        era = self._history.era
        if mark is None or mark.era != era or (self._rests and step > mark.step):
            return self._index.aged(step, segments=segments)[0]
        # A row whose stamp is the step of the mark was pushed before the mark.
        return self._index.aged(step, segments=segments, most=step - mark.step - 1)[0]

    def release(self, mark: HistoryPoint) -> None:
        self._history.release(mark.event, bounded=mark.bounded)
