"""Copy-on-write image of a table at one moment, read for a snapshot while training goes on.

Each row is read once: either the reader comes to the row first, or the row is copied just before it changes.
So making the image copies nothing, and an update is slower only the first time that it changes a row:

    bit of each slot:   1  not read yet       a change copies the row to `_kept` and clears the bit
                        0  read or copied     the slot may change, be freed and be used again

A *slot* is the position of a row in its memory. A table may have several images at a time. It calls the
`keep` method of each image before a change, under the table's lock. The reader takes the lock for one page
of rows at a time, so that a push waits for one page at most.

FrozenRows is the image of the rows in one memory, and FrozenArrays that of a dense table. FrozenSparseTable
and FrozenDenseTable turn these images into the columns of a snapshot.
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
"""Number of rows read under the table's lock at a time. A push waits at most for one such read."""


Page = tuple[Ids, Floats, Ids]
"""Rows of an image: their ids, their content as stored, and the step of each row's last push."""


class FrozenRows:
    """Image of the rows that one memory had when this object was made. Close it after reading.

    Args:
        rows: Memory that stores the rows.
        lock: Lock of the table. The caller holds it now, and during each change of the memory.
        step: Returns the present step of the table.
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
        self._size = rows.next_slot  # later slots had no row when the image was made
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
        """Copy the rows of these ids that were not read yet, before they change.

        The caller holds the lock.
        """
        if self._left:
            self._keep(self._rows.recall(ids, self._step()))

    def keep_segments(self, first: int, last: int) -> None:
        """Copy the unread rows of a range of segments (classes of ids) before the rows change.

        The caller holds the lock of the table.

        Args:
            first: First segment: a class of ids, chosen by their hash.
            last: Segment after the last.
        """
        if self._left:
            self._keep(self._rows.listed(first, last, self._step()))

    def pages(self) -> Iterator[Page]:
        """Yield every row of the image once, in arbitrary order."""
        # A list of slots may be older than the pages that are read by it. A row that has changed since has a
        # clear bit, and its old content is in `_kept`. So each page also yields the rows kept so far.
        for ids, slots, steps in self._listed():
            for start in range(0, len(ids), PAGE):
                part = slice(start, start + PAGE)
                with self._lock:
                    self._keep((ids[part], slots[part], steps[part]))
                    pages, self._kept = self._kept, []
                yield from _joined(pages)
        yield from _joined(self._kept)  # no lock: every bit is clear now, so nothing more is added

    def _listed(self) -> Iterator[Listed]:
        """Yield ids, slots and steps of the rows in parts.

        Rows that change between two parts have been copied.
        """
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
        # Clearing before copying is safe, because the caller holds the lock for both.
        ids, slots, steps = self._claim(rows)
        if len(ids):
            self._left -= len(ids)
            self._kept.append((ids, self._rows.gather(slots), steps))

    def _claim(self, rows: Listed) -> Listed:
        """Return those of these rows that are unread, and clear their bits.

        Rows in slots that were added after the image was made are left out.
        """
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
    """Join small pages to larger pages, because writing a short page takes nearly as long as a full page."""
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
    """Image of a dense table: its weights and optimizer state, copied before the first change or when read.

    Args:
        copies: Returns copies of the arrays in host memory.
        lock: Lock of the table, held during each change.
    """

    def __init__(self, copies: Callable[[], list[Floats]], lock: threading.Lock) -> None:
        self._read = copies
        self._lock = lock
        self._copies: list[Floats] | None = None

    def keep(self) -> None:
        """Copy the arrays before they change, unless they were copied already. The caller holds the lock."""
        if self._copies is None:
            self._copies = self._read()

    def read_arrays(self) -> list[Floats]:
        """Return the arrays as they were when the image was made."""
        with self._lock:
            self.keep()
        assert self._copies is not None
        return self._copies


class FrozenTable(Protocol):
    """Image of one server's part of a table at one moment.

    Any thread may read it, but only once; then close it.
    """

    @property
    def spec(self) -> TableSpec: ...
    @property
    def clock(self) -> TableClock: ...
    def columns(self) -> Columns:
        """Return name, dtype and shape of the columns (arrays) of the snapshot that `pages` fills."""

    def pages(self) -> Iterator[Mapping[str, NDArray[Any]]]:
        """Yield parts of columns by name. Each part continues its column after the part before."""

    def close(self) -> None:
        """End the image, so that later changes of the table copy nothing for it. Safe to call twice."""


class FrozenSparseTable:
    """Image of a sparse table as columns: rows, candidates, removed ids and evictions.

    Args:
        spec: Definition of the table.
        clock: Clock of the table (number of updates, times of shrinks) when the image was made.
        rows: Image of each memory that stores rows of the table.
        candidates: Ids that have not yet been pushed often enough to get a row.
        removals: Ids removed since the snapshot that a delta is based on, or None for a full snapshot.
        evictions: Columns of the recorded evictions, or empty if the table records none.
        as_rows: Converts ids, stored rows and steps of a page to RowData.
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
        """Yield the columns other than rows: removed ids, candidates (ids without a row), evictions."""
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
    """Image of a dense table: a column for the weights ("value") and one for each optimizer state value."""

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
