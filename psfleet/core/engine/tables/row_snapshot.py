"""The content of a table at one moment, while the table goes on: each row is read once.

Either the reader comes to a row first, or it is kept just before it changes. So no row is copied
at the moment itself, and a change costs more only the first time that it touches a row. A slot
whose row was read or kept may change, go and be used again: nobody looks at it any more.

A table has any number of such views; it calls `keep` before it changes, under its lock, and the
view takes the lock for each page, so that a push waits for one page at most.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.generate import static_kernels
from psfleet.core.engine.kernels.initial_values import address_of
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.row_data import (
    REMOVED,
    CandidateData,
    Columns,
    RowData,
    TableClock,
    candidate_columns,
    column_groups,
    row_columns,
    row_group,
)
from psfleet.core.engine.tables.row_memory import EVERY, Listed, RowStore

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

PAGE = 2048
"""Rows that are read at a time: a push waits no longer than that takes."""


Page = tuple[Ids, Floats, Ids]
"""Ids, whole rows as they are stored, and the step of each row's last push."""


class FrozenRows:
    """The rows that one memory had when this was made. Close it when it is read.

    Args:
        rows: The memory.
        lock: Held during each change of it, and while this is made.
        step: The table's step, now.
        only: The ids of the rows that are asked for; None: all.

    Attributes:
        count: Number of rows that `pages` gives.
    """

    def __init__(
        self, rows: RowStore, lock: threading.Lock, step: Callable[[], int], only: Ids | None = None
    ) -> None:
        self._rows = rows
        self._lock = lock
        self._step = step
        self._only: Listed | None = None
        self._kept: list[Page] = []
        self._kernels = static_kernels("freezing")
        self._size = rows.next_slot  # slots from here on had no row
        # A bit for each slot, set while there is something to read.
        if only is None:
            self._unread = rows.used()
            self.count = len(rows)
        else:
            self._only = rows.recall(only, step())
            self._unread = np.zeros(self._size // 64 + 1, np.uint64)
            slots = self._only[1]
            self.count = self._kernels.choose(
                address_of(self._unread), len(slots), address_of(slots)
            )
        self._left = self.count
        rows.views.append(self)

    def close(self) -> None:
        """The memory need not remember the moment any more. Safe to call twice."""
        with self._lock:  # else a change that goes through the views would pass one over
            if self in self._rows.views:
                self._rows.views.remove(self)

    def keep(self, ids: Ids) -> None:
        """Rows of these ids are about to change or to go. The caller has the lock."""
        if self._left:
            self._keep(self._rows.recall(ids, self._step()))

    def keep_segments(self, first: int, last: int) -> None:
        """Any row of these segments may be about to change. The caller has the lock."""
        if self._left:
            self._keep(self._rows.listed(first, last, self._step()))

    def pages(self) -> Iterator[Page]:
        """Every row once, in an order that means nothing."""
        for ids, slots, steps in self._listed():
            for start in range(0, len(ids), PAGE):
                part = slice(start, start + PAGE)
                with self._lock:
                    self._keep((ids[part], slots[part], steps[part]))
                    pages, self._kept = self._kept, []
                yield from _joined(pages)
        yield from _joined(self._kept)  # since the last page: there is nothing left to keep

    def _listed(self) -> Iterator[Listed]:
        """Yield the rows as they were, in parts; a row that has changed since was kept before."""
        if self._only is not None:
            yield self._only
            return
        count = self._rows.listed_at_once
        while count < EVERY[1] and 2 * count * self.count <= PAGE * EVERY[1]:
            count *= 2  # as many segments as have a page of rows
        for first in range(*EVERY, count):
            with self._lock:
                last = first + count
                rows = self._rows.listed(first, last, self._step())
            yield rows

    def _keep(self, rows: Listed) -> None:
        """Read the unread ones of these rows."""
        ids, slots, steps = self._claim(rows)
        if len(ids):
            self._left -= len(ids)
            self._kept.append((ids, self._rows.gather(slots), steps))

    def _claim(self, rows: Listed) -> Listed:
        """Return the unclaimed ones."""
        count = len(rows[0])
        ids, slots, steps = (np.empty(count, np.int64) for _ in range(3))
        size = self._kernels.claim(
            address_of(self._unread),
            self._size,
            count,
            *map(address_of, rows),
            *map(address_of, (ids, slots, steps)),
        )
        return ids[:size], slots[:size], steps[:size]


def _joined(pages: list[Page]) -> Iterator[Page]:
    """All of them, small ones put together: each costs its writer much the same."""
    while pages:
        group = [pages.pop()]
        while pages and sum(len(page[0]) for page in group) < PAGE:
            group.append(pages.pop())
        ids, rows, steps = zip(*group, strict=True)
        yield np.concatenate(ids), np.concatenate(rows), np.concatenate(steps)


class FrozenArrays:
    """The arrays that a dense table had when this was made: its weights, then its state slots.

    Args:
        copies: Copies the arrays, wherever they lie.
        lock: Held during each change of them.
    """

    def __init__(self, copies: Callable[[], list[Floats]], lock: threading.Lock) -> None:
        self._read = copies
        self._lock = lock
        self._copies: list[Floats] | None = None

    def keep(self) -> None:
        """The arrays are about to change. The caller has the lock."""
        if self._copies is None:
            self._copies = self._read()

    def take(self) -> list[Floats]:
        """The arrays as they were."""
        with self._lock:
            self.keep()
        assert self._copies is not None
        return self._copies


class FrozenTable(Protocol):
    """One server's part of a table at one moment. Read once, by any thread, then closed."""

    @property
    def spec(self) -> TableSpec: ...
    @property
    def clock(self) -> TableClock: ...
    def columns(self) -> Columns:
        """Return the columns that `pages` fills."""

    def pages(self) -> Iterator[Mapping[str, NDArray[Any]]]:
        """Parts of columns, each to be put behind the one before."""

    def close(self) -> None:
        """The table need not remember the moment any more. Safe to call twice."""


class FrozenSparseTable:
    """Rows, candidates and what went, of a sparse table."""

    def __init__(
        self,
        spec: TableSpec,
        clock: TableClock,
        rows: Sequence[FrozenRows],
        candidates: CandidateData,
        removals: Ids | None,
        evictions: Mapping[str, NDArray[Any]],
        as_rows: Callable[[Ids, Floats, Ids], RowData],
    ) -> None:
        self.spec = spec
        self.clock = clock
        self._rows = rows
        self._candidates = candidates
        self._removed = removals
        self._evictions = evictions
        self._as_rows = as_rows

    def columns(self) -> Columns:
        columns = row_group(self.spec).sized(sum(rows.count for rows in self._rows))
        for page in self._others():
            columns |= {name: (column.dtype, column.shape) for name, column in page.items()}
        return columns

    def pages(self) -> Iterator[Mapping[str, NDArray[Any]]]:
        for page in itertools.chain.from_iterable(rows.pages() for rows in self._rows):
            yield row_columns(self._as_rows(*page))
        yield from self._others()

    def _others(self) -> Iterator[Mapping[str, NDArray[Any]]]:
        """The columns besides those of rows."""
        if self._removed is not None:
            yield {REMOVED: self._removed}
        if len(self._candidates):
            yield candidate_columns(self._candidates)
        if self._evictions:
            yield self._evictions

    def close(self) -> None:
        for rows in self._rows:
            rows.close()


class FrozenDenseTable:
    """Snapshot of a dense table: one column for the weights ("value") and each state slot."""

    def __init__(
        self,
        spec: TableSpec,
        step: int,
        count: int,
        arrays: FrozenArrays,
        spread: Callable[[Floats], Floats],
        forget: Callable[[FrozenArrays], None],
    ) -> None:
        self.spec = spec
        self.clock = TableClock(step)
        self._count = count
        self._arrays = arrays
        self._spread = spread
        self._forget: Callable[[FrozenArrays], None] | None = forget

    def columns(self) -> Columns:
        (weights,) = column_groups(self.spec)
        return weights.sized(self._count)

    def pages(self) -> Iterator[Mapping[str, NDArray[Any]]]:
        arrays = self._arrays.take()
        for name, array in zip(self.spec.slot_names, arrays, strict=True):
            yield {name: self._spread(array)}

    def close(self) -> None:
        if self._forget is not None:
            self._forget(self._arrays)
            self._forget = None
