"""Scan of a sparse table's rows: in order, and their changes since a mark."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.core.engine.evictions import EvictedIds, EvictionCause
from psfleet.core.engine.kernels.dedup import ascending
from psfleet.core.engine.tables.row_data import EVICTED, HistoryPoint, TableChanges
from psfleet.core.engine.tables.row_memory import EVERY, RowMemory

Ids = NDArray[np.int64]
Column = NDArray[Any]


class EvictionStream:
    """A ring of a fixed number of evictions. Not thread-safe.

    The positions and what they hold are a function of the table's updates: a server that replays its log
    has the same ones.

    Args:
        table: Its name.
        keep: Number of evictions that are remembered.

    Attributes:
        next: The position of the next eviction.
        bytes: Memory that it takes when it is full.
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
        """Remember evictions of one step; their order is that of the ids, whatever it is in memory."""
        ids = np.sort(ids)
        self.next += len(ids)
        ids = ids[-self._keep :]
        self._held = min(self._held + len(ids), self._keep)
        places = self._places(self.next - len(ids), self.next)
        self._ids[places], self._steps[places], self._causes[places] = ids, step, cause

    def read(self, position: int, limit: int) -> EvictedIds:
        """Up to `limit` evictions from a position on.

        Raises:
            UsageError: The table has not come so far.
        """
        if not 0 <= position <= self.next:
            raise UsageError(
                f"table {self._table!r}: evictions are read from position {position} and this server has "
                f"come to {self.next}, perhaps because an earlier snapshot was loaded; begin anew without one"
            )
        first = max(position, self.next - self._held)
        last = min(first + limit, self.next)
        at = self._places(first, last)
        return EvictedIds(
            self._ids[at], self._steps[at], self._causes[at], (last,), first - position
        )

    @property
    def point(self) -> tuple[int, int]:
        """Present point of the stream, from which `columns` lists later evictions."""
        return self._sets, self.next

    def columns(self, since: tuple[int, int] | None = None) -> dict[str, Column]:
        """Return the remembered evictions as columns of a snapshot.

        Args:
            since: Only evictions after this point, of a snapshot that holds those before; None: all.
        """
        first = self.next - self._held
        if since is not None and since[0] == self._sets:
            first = max(first, since[1])
        evictions = self.read(first, self._held)
        values = (evictions.ids, evictions.steps, evictions.causes, np.array([self.next], np.int64))
        return dict(zip(EVICTED, values, strict=True))

    def set(self, columns: Mapping[str, Column]) -> None:
        """Remember what `columns` gave; of too many the latest.

        Raises:
            ShapeError: They are none of a stream.
        """
        *values, following = (columns.get(name, np.zeros(0, np.int64)) for name in EVICTED)
        count = len(values[0])
        if following.shape != (1,) or any(column.shape != (count,) for column in values):
            raise ShapeError(
                f"table {self._table!r}: the columns {sorted(columns)} of its evictions do not fit each other"
            )
        self._sets += 1
        self.next, self._held = int(following[0]), min(count, self._keep)
        places = self._places(self.next - self._held, self.next)
        ids, steps, causes = (column[count - self._held :] for column in values)
        self._ids[places], self._steps[places], self._causes[places] = ids, steps, causes

    def _places(self, first: int, last: int) -> Ids:
        return np.arange(first, last) % self._keep


@dataclass
class ChangeHistory:
    """Events since the oldest mark that is held; nothing is kept while none is.

    Attributes:
        era: Goes up when the table's step is set, after which steps say nothing about order.
        first: Number of the first event that is kept.
        marks: Numbers of the events at which marks are held.
        bounded: Likewise of marks that are given up when the events have more ids than `limit`.
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
        """True if a reader may ask for the history."""
        return bool(self.marks or self.bounded)

    def mark(self, *, bounded: bool = False) -> int:
        """Hold a mark here; returns the number of the next event."""
        event = self.first + len(self._removed)
        (self.bounded if bounded else self.marks).append(event)
        return event

    def release(self, event: int, *, bounded: bool = False) -> None:
        """Let a mark go, and with the oldest one what only it needed; a bounded one may have gone."""
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
        """Rows were removed, or set."""
        if self.is_kept:
            nothing = np.zeros(0, np.int64)
            self._removed.append(nothing if removed is None else removed.copy())
            self._written.append(nothing if written is None else written.copy())
            self._count += len(self._removed[-1]) + len(self._written[-1])
            if self.bounded and self._count > self.limit:
                self.bounded.clear()
                self._trim()

    def since(self, event: int) -> tuple[Ids, Ids]:
        """Ids removed and ids set since a mark, ascending, whatever became of them later."""
        start = event - self.first
        return ascending(self._removed[start:]), ascending(self._written[start:])


class RowScan:
    """The one place where a row goes. Not thread-safe.

    Args:
        index: Index of the table.
        rests: Every update changes every row.
        stream: Remembers evicted rows; None: they are not asked for.

    Attributes:
        dropped: Rows that went so far, for displays.
        changed: Called with the ids of rows that were set or have gone; None: all may have changed.
        pushed: Called with the ids that an update has named, its step, and the number of rows.
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
        """Remove rows that are there at this step of the table; how many they are.

        cause: Reason of the removal; None: they are no evictions.
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
        """Rows were set otherwise than by an update."""
        self._history.add(written=ids)
        self.changed(ids)

    def updated(self, ids: Ids, step: int) -> None:
        """The update of this step of the table has named these ids."""
        if self._rests:
            self.changed(None)
        else:
            self.pushed(ids, step, len(self._index))

    def has(self, ids: Ids) -> NDArray[np.bool_]:
        """Return a mask of the ids that have a row."""
        mask: NDArray[np.bool_] = self._index.locate(ids)[0] != 0
        return mask

    def restamped(self) -> None:
        """The table's step was set: steps before it say nothing about order any more."""
        self._history.era += 1
        self.changed(None)

    def ascending(self) -> Ids:
        """Every id in order; kept for the next page."""
        if self._ids is None or len(self._ids) != len(self._index):
            self._ids = self._index.entries()[0]
        return self._ids

    def mark(self, step: int, *, bounded: bool = False) -> HistoryPoint:
        point = None if self._stream is None else self._stream.point
        event = self._history.mark(bounded=bounded)
        return HistoryPoint(self._history.era, step, event, point, bounded)

    def before(self, step: int) -> HistoryPoint:
        """Return the point before this update, for `pushed_since` alone."""
        return HistoryPoint(self._history.era, step - 1, 0)

    def knows(self, mark: HistoryPoint) -> bool:
        """Return whether `changed_since` can look back to a held mark; a bounded one may be given up."""
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
        # A row whose stamp is the mark's own step was pushed before the mark.
        return self._index.aged(step, segments=segments, most=step - mark.step - 1)[0]

    def release(self, mark: HistoryPoint) -> None:
        self._history.release(mark.event, bounded=mark.bounded)
