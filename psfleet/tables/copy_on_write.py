"""The content of a table at one moment, while the table goes on: each row is read once.

Either the reader comes to a row first, or it is kept just before it changes. So no row is copied
at the moment itself, and a change costs more only the first time that it touches a row. A slot
whose row was read or kept may change, go and be used again: nobody looks at it any more.

A table has any number of such views; it calls `keep` before it changes, under its lock, and the
view takes the lock for each page, so that a push waits for one page at most.
"""

import threading
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.generate import static_kernels
from psfleet.kernels.initial_values import address_of
from psfleet.tables.row_memory import EVERY, Listed, RowStore

__all__ = ["PAGE", "FrozenArrays", "FrozenRows"]

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
        lock: Held by whoever changes it, and while this is made.
        step: The table's step, now.
        only: The ids of the rows that are asked for; None: all.

    Attributes:
        count: How many rows `pages` gives.
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
        # A bit for each slot: nothing is left to read there. Slot 0 is none.
        self._done = np.zeros(self._size // 64 + 1, np.uint64)
        self._done[0] = 1
        if only is None:
            free = rows.free_slots()
            self._claim((free, free, free))
            self.count = len(rows)
        else:
            self._only = rows.recall(only, step())
            self.count = len(self._claim(self._only)[0])
            np.invert(self._done, self._done)
            self._done[0] |= np.uint64(1)
        self._left = self.count
        rows.views.append(self)

    def close(self) -> None:
        """The memory need not remember the moment any more. Safe to call twice."""
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
        for ids, slots, touched in self._listed():
            for start in range(0, len(ids), PAGE):
                part = slice(start, start + PAGE)
                with self._lock:
                    self._keep((ids[part], slots[part], touched[part]))
                    kept, self._kept = self._kept, []
                yield from _joined(kept)
        yield from _joined(self._kept)  # since the last page: there is nothing left to keep

    def _listed(self) -> Iterator[Listed]:
        """What was there, in parts; a row that has changed since was kept before."""
        if self._only is not None:
            yield self._only
            return
        for first in range(*EVERY, self._rows.listed_at_once):
            with self._lock:
                last = first + self._rows.listed_at_once
                found = self._rows.listed(first, last, self._step())
            yield found

    def _keep(self, listed: Listed) -> None:
        """Read what nobody has read of these rows."""
        ids, slots, touched = self._claim(listed)
        if len(ids):
            self._left -= len(ids)
            self._kept.append((ids, self._rows.gather(slots), touched))

    def _claim(self, listed: Listed) -> Listed:
        """Those of them that nobody has claimed."""
        count = len(listed[0])
        ids, slots, touched = (np.empty(count, np.int64) for _ in range(3))
        found = self._kernels.claim(
            address_of(self._done),
            self._size,
            count,
            *map(address_of, listed),
            *map(address_of, (ids, slots, touched)),
        )
        return ids[:found], slots[:found], touched[:found]


def _joined(pages: list[Page]) -> Iterator[Page]:
    """All of them, small ones put together: each costs whoever writes it much the same."""
    while pages:
        group = [pages.pop()]
        while pages and sum(len(page[0]) for page in group) < PAGE:
            group.append(pages.pop())
        ids, rows, touched = zip(*group, strict=True)
        yield np.concatenate(ids), np.concatenate(rows), np.concatenate(touched)


class FrozenArrays:
    """The arrays that a dense table had when this was made: its weights, then its state slots.

    Args:
        copies: Copies the arrays, wherever they lie.
        lock: Held by whoever changes them.
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
