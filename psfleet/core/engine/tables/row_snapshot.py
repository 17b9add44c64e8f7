"""Copy-on-write image of a table at one moment, read for a snapshot while training goes on.

Each row is read once. Either the reader comes to a row first, or the row is copied just before it changes. So
no row is copied at the moment itself, and a change costs more only the first time that it touches a row:

    bit of each slot:   1  not read yet       a change copies the row to `_kept` and clears the bit
                        0  read or copied     the slot may change, be freed and be used again

A table has any number of such views. It calls their `keep` before each change, under its lock, and the view
takes the lock for each page, so that a push waits for one page at most. FrozenRows is the image of one
memory, FrozenArrays of a dense table; FrozenSparseTable and FrozenDenseTable turn them into the columns of a
snapshot.
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
"""Number of rows read under the lock at a time; a push waits at most as long as that takes."""


Page = tuple[Ids, Floats, Ids]
"""Ids, whole rows as they are stored, and the step of each row's last push."""


class FrozenRows:
    """Image of the rows that one memory had when this was made. Close it when it is read.

    Args:
        rows: Memory of the rows.
        lock: Lock of the table, held by the caller now and during each change of the memory.
        step: Gives the present step of the table.
        only: Ids of the rows to read, for a delta, or None for all rows.

    Attributes:
        count: Number of rows that `pages` yields.
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
        # A bit for each slot, set while its row has to be read. Rows that are added later get slots from
        # `_size` on, or slots whose bit is clear: neither is read.
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
        """End the image: later changes no longer copy rows for it. Safe to call twice."""
        # Under the lock: a change may be iterating over the views, and would skip one if another is removed.
        with self._lock:
            if self in self._rows.views:
                self._rows.views.remove(self)

    def keep(self, ids: Ids) -> None:
        """Copy the unread rows of these ids before they change. The caller holds the lock."""
        if self._left:
            self._keep(self._rows.recall(ids, self._step()))

    def keep_segments(self, first: int, last: int) -> None:
        """Copy all unread rows of segments `first` to `last` - 1. The caller holds the lock."""
        if self._left:
            self._keep(self._rows.listed(first, last, self._step()))

    def pages(self) -> Iterator[Page]:
        """Yield every row once, in arbitrary order."""
        # The lists of slots are older than the pages read by them. Rows that have changed since have a clear
        # bit and are in `_kept`, with the content of the moment, so that each page also takes what was kept.
        for ids, slots, steps in self._listed():
            for start in range(0, len(ids), PAGE):
                part = slice(start, start + PAGE)
                with self._lock:
                    self._keep((ids[part], slots[part], steps[part]))
                    pages, self._kept = self._kept, []
                yield from _joined(pages)
        yield from _joined(self._kept)  # no lock: every bit is clear now, so nothing more is added

    def _listed(self) -> Iterator[Listed]:
        """Yield ids, slots and steps of the rows in parts; rows that change in between have been kept."""
        if self._only is not None:
            yield self._only
            return
        count = self._rows.listed_at_once
        while count < EVERY[1] and 2 * count * self.count <= PAGE * EVERY[1]:
            count *= 2  # until these segments have about one page of rows
        for first in range(*EVERY, count):
            with self._lock:
                last = first + count
                rows = self._rows.listed(first, last, self._step())
            yield rows

    def _keep(self, rows: Listed) -> None:
        """Copy those of these rows that are unread, and clear their bits."""
        ids, slots, steps = self._claim(rows)
        if len(ids):
            self._left -= len(ids)
            self._kept.append((ids, self._rows.gather(slots), steps))

    def _claim(self, rows: Listed) -> Listed:
        """Return those of these rows whose bit was set, and clear it. Later slots are left out."""
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
    """Yield all pages, and join small ones: a page costs its writer much the same, however short it is."""
    while pages:
        group = [pages.pop()]
        while pages and sum(len(page[0]) for page in group) < PAGE:
            group.append(pages.pop())
        if len(group) == 1:
            yield group[0]
            continue
        ids, rows, steps = zip(*group, strict=True)
        yield np.concatenate(ids), np.concatenate(rows), np.concatenate(steps)


class FrozenArrays:
    """Image of a dense table: its weights, then its state slots, copied at the first change or when read.

    Args:
        copies: Copies the arrays to host memory.
        lock: Lock of the table, held during each change.
    """

    def __init__(self, copies: Callable[[], list[Floats]], lock: threading.Lock) -> None:
        self._read = copies
        self._lock = lock
        self._copies: list[Floats] | None = None

    def keep(self) -> None:
        """Copy the arrays, which are about to change, unless they are copied. The caller holds the lock."""
        if self._copies is None:
            self._copies = self._read()

    def read_arrays(self) -> list[Floats]:
        """Return the arrays as they were when this was made."""
        with self._lock:
            self.keep()
        assert self._copies is not None
        return self._copies


class FrozenTable(Protocol):
    """Image of one server's part of a table at one moment. Any thread may read it, once; then close it."""

    @property
    def spec(self) -> TableSpec: ...
    @property
    def clock(self) -> TableClock: ...
    def columns(self) -> Columns:
        """Return the columns that `pages` fills."""

    def pages(self) -> Iterator[Mapping[str, NDArray[Any]]]:
        """Yield parts of columns, each to be appended to the part before."""

    def close(self) -> None:
        """End the image: later changes no longer copy for it. Safe to call twice."""


class FrozenSparseTable:
    """Image of a sparse table as columns: rows, candidates, removed ids and evictions.

    Args:
        spec: Definition of the table.
        clock: Clock of the table at the moment.
        rows: Images of the memories that have its rows.
        candidates: Ids that wait for a row.
        removals: Ids removed since the base of a delta, or None in a full snapshot.
        evictions: Columns of the eviction stream; empty if the table has none.
        as_rows: Unpacks ids, stored rows and steps of a page.
    """

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
        """Yield the columns besides those of rows: removed ids, candidates, evictions."""
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
        arrays = self._arrays.read_arrays()
        for name, array in zip(self.spec.slot_names, arrays, strict=True):
            yield {name: self._spread(array)}

    def close(self) -> None:
        if self._forget is not None:
            self._forget(self._arrays)
            self._forget = None
