"""The content of a table at one moment, while the table goes on: each row is read once.

Either the reader comes to a row first, or it is kept just before it changes. So no row is copied
at the moment itself, and a change costs more only the first time that it touches a row. A slot
whose row was read or kept may change, go and be used again: nobody looks at it any more.

A table has any number of such views; it calls `keep` before it changes, under its lock, and the
view takes the lock for each page, so that a push waits for one page at most.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["PAGE", "FrozenDense", "FrozenRows", "Rows"]

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

SECTIONS = 256
PAGE = 2048
"""Rows that are read at a time: a push waits no longer than that takes."""


class Rows(Protocol):
    """What a memory of rows must tell to be frozen: psfleet.tables.index.Index."""

    def __len__(self) -> int: ...
    @property
    def next_slot(self) -> int:
        """The first slot that no row has had."""

    def free_slots(self) -> Ids:
        """The slots below it that have no row."""

    def section(self, number: int) -> tuple[Ids, Ids]:
        """Ids and slots of one of SECTIONS parts; an id never changes its part."""

    def locate(self, ids: Ids) -> tuple[Ids, int]: ...
    def gather(self, slots: Ids) -> Floats: ...
    def touched(self, ids: Ids, step: int) -> Ids: ...


Page = tuple[Ids, Floats, Ids]
"""Ids, whole rows as they are stored, and the step of each row's last push."""


class FrozenRows:
    """The rows that a memory of rows had when this was made.

    Args:
        rows: The memory.
        lock: Held by whoever changes it, and while this is made.
        step: The table's step, now.
        only: The ids of the rows that are asked for; None: all.

    Attributes:
        count: How many rows `pages` gives.
    """

    def __init__(
        self, rows: Rows, lock: threading.Lock, step: Callable[[], int], only: Ids | None = None
    ) -> None:
        self._rows = rows
        self._lock = lock
        self._step = step
        self._only: tuple[Ids, Ids] | None = None
        self._kept: list[Page] = []
        self._read: NDArray[np.bool_]  # by slot: there is nothing more to read; slot 0 is none
        if only is None:
            self.count = len(rows)
            self._read = np.zeros(rows.next_slot, np.bool_)
            self._read[rows.free_slots()] = True
            self._read[:1] = True
        else:
            slots, unknown = rows.locate(only)
            self._only, self.count = (only, slots), len(only) - unknown
            self._read = np.ones(rows.next_slot, np.bool_)
            self._read[slots[slots != 0]] = False

    def keep(self, ids: Ids) -> None:
        """Rows of these ids are about to change or to go. The caller has the lock."""
        self._keep(ids, self._rows.locate(ids)[0])

    def keep_section(self, number: int) -> None:
        """Any row of this part may be about to change. The caller has the lock."""
        self._keep(*self._rows.section(number))

    def pages(self) -> Iterator[Page]:
        """Every row once, in an order that means nothing."""
        for ids, slots in self._listed():
            for start in range(0, len(ids), PAGE):
                part = slice(start, start + PAGE)
                with self._lock:
                    page = self._take(ids[part], slots[part])
                yield page
        while self._kept:
            yield self._kept.pop()

    def _listed(self) -> Iterator[tuple[Ids, Ids]]:
        if self._only is not None:
            yield self._only
            return
        for number in range(SECTIONS):
            with self._lock:
                found = self._rows.section(number)
            yield found

    def _keep(self, ids: Ids, slots: Ids) -> None:
        page = self._take(ids, slots)
        if len(page[0]):
            self._kept.append(page)

    def _take(self, ids: Ids, slots: Ids) -> Page:
        """Read what nobody has read of these rows."""
        old = slots < len(self._read)
        unread = old & ~self._read[np.where(old, slots, 0)]
        ids, slots = ids[unread], slots[unread]
        self._read[slots] = True
        return ids, self._rows.gather(slots), self._rows.touched(ids, self._step())


class FrozenDense:
    """The arrays that a dense table had when this was made: its weights, then its state slots."""

    def __init__(self, arrays: list[Floats], lock: threading.Lock) -> None:
        self._arrays = arrays
        self._lock = lock
        self._copies: list[Floats] | None = None

    def keep(self) -> None:
        """The arrays are about to change. The caller has the lock."""
        if self._copies is None:
            self._copies = [array.copy() for array in self._arrays]

    def take(self) -> list[Floats]:
        """The arrays as they were."""
        with self._lock:
            self.keep()
        assert self._copies is not None
        return self._copies
