"""The memory of one sparse table: index lines, rows, and the descriptor that kernels read."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import UsageError
from psfleet.kernels.generate import static_kernels
from psfleet.kernels.hash_index import (
    BASE,
    DESCRIPTOR_SIZE,
    FIRST_LINES,
    LINES,
    LIVE,
    MARKS,
    MASK,
    NEXT_LINE,
    NEXT_SLOT,
    ROWS,
    SEGMENT_COUNT,
    SEGMENT_FIELDS,
    SEGMENTS,
    STRIDE,
    USED,
)
from psfleet.kernels.hashing import hash_ids
from psfleet.kernels.initial_values import address_of
from psfleet.tables.arena import Arena
from psfleet.tables.row_memory import EVERY, ROW_BYTES, Listed, RowMemory, RowView

__all__ = ["RowIndex"]

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_FEWEST_ROWS = 1 << 16
_SPACE = 1 << 47  # bytes of address space of a process
_SHARE = 64  # a table takes at most one in so many of those that are left: there may be hundreds
_LINES = 12  # reserved for each row; 9/4 is what a table that only grows takes
_LEAST = (
    115 + (np.arange(SEGMENT_COUNT) * 0x9E3779B1 >> 8) % 64
)  # see `insert` in kernels/hash_index.py


class RowIndex(RowMemory):
    """See RowMemory.

    Attributes:
        address: Of the descriptor, for kernels. Whoever changes rows by it tells the views with `keep`.
    """

    def __init__(self, width: int, max_rows: int, marks: bool) -> None:
        """Reserve memory for `max_rows` rows, or as many as there is address space for.

        `marks`: and an int64 beside each.
        """
        if not 1 <= max_rows < 2**32 - 2:
            raise UsageError(f"max_rows is {max_rows}; it must be in [1, 2**32 - 3]")
        self._width = width
        max_rows = min(max_rows, _most_rows(width * 4 + ROW_BYTES))
        first = FIRST_LINES * (SEGMENT_COUNT + 1)
        # Lines: a segment doubles at 45 to 70 % load and leaves its old ones: up to 3 per row where
        # rows come and go. The rest is there so that `check_lines` need not look closely.
        self.max_rows, (self._lines, self._rows, *mark_arenas) = _reserve(
            max_rows,
            lambda rows: [
                (first + rows * _LINES + SEGMENT_COUNT * 8) * 64,
                (rows + 1) * width * 4,
                *([(rows + 1) * 8] if marks else []),
            ],
        )
        self._marks = mark_arenas[0] if marks else None
        self._segments = np.zeros((SEGMENT_COUNT, SEGMENT_FIELDS), np.int64)
        self._segments[:, BASE] = np.arange(1, SEGMENT_COUNT + 1) * FIRST_LINES
        self._segments[:, MASK] = FIRST_LINES - 1
        self._d = np.zeros(DESCRIPTOR_SIZE, np.int64)
        self._d[[LINES, ROWS, SEGMENTS]] = (
            self._lines.address,
            self._rows.address,
            address_of(self._segments),
        )
        self._d[[NEXT_SLOT, NEXT_LINE, STRIDE]] = 1, first, width * 4
        self._d[MARKS] = self._marks.address if self._marks else 0
        self.address = address_of(self._d)
        self.views: list[RowView] = []
        self._kernels = static_kernels("index")
        self._freezing = static_kernels("freezing")

    def __len__(self) -> int:
        return int(self._segments[:, LIVE].sum())

    @property
    def bytes(self) -> int:
        """See RowMemory."""
        used = int(self._d[NEXT_SLOT])
        return (
            int(self._d[NEXT_LINE]) * 64 + used * self._width * 4 + (used * 8 if self._marks else 0)
        )

    @property
    def next_slot(self) -> int:
        """See RowMemory."""
        return int(self._d[NEXT_SLOT])

    def free_slots(self) -> Ids:
        """See RowMemory."""
        slots = np.empty(self.free, np.int64)
        self._kernels.freed(self.address, address_of(slots))
        return slots

    def lines_with(self, ids: Ids) -> int:
        """How many lines are in use at most once these unknown ids have been added."""
        used = self._segments[:, USED] + np.bincount(
            (hash_ids(ids) >> np.uint64(56)).astype(np.int64), minlength=SEGMENT_COUNT
        )
        sizes, lines = self._segments[:, MASK] + 1, int(self._d[NEXT_LINE])
        while (full := used * 256 > sizes * 4 * _LEAST).any():
            sizes = np.where(full, 2 * sizes, sizes)
            lines += int(sizes[full].sum())
        return lines

    def has_lines(self, count: int) -> bool:
        """See RowMemory."""
        return 4 * int(self._d[NEXT_LINE]) + 3 * count <= self._lines.size // 64

    def can_hold(self, ids: Ids) -> bool:
        """See RowMemory."""
        return self.lines_with(ids) <= self._lines.size // 64

    def taken(self, more: int) -> int:
        """See RowMemory."""
        return self._taken(max(more - self.free, 0) if more else 0)

    def taken_at_most(self, more: int) -> int:
        """See RowMemory."""
        return self._taken(more)

    def _taken(self, slots: int) -> int:
        slots += int(self._d[NEXT_SLOT])
        lines = max(int(self._d[NEXT_LINE]) * 64, (slots - 1) * ROW_BYTES)
        marks = self._marks.taken(slots * 8) if self._marks is not None else 0
        return self._rows.taken(slots * self._width * 4) + self._lines.taken(lines) + marks

    def expect(self, more: int) -> None:
        """Prepare the memory for `more` unknown ids. Call it before a push; it costs next to nothing."""
        slots = int(self._d[NEXT_SLOT]) + more
        self._rows.expect(slots * self._width * 4)
        self._lines.expect(int(self._d[NEXT_LINE]) * 64 + more * ROW_BYTES)
        if self._marks is not None:
            self._marks.expect(slots * 8)

    def keep_ahead(self, room: int | None = None) -> None:
        """See RowMemory."""
        most = [] if room is None else [max(room, 0) // 8]
        self._rows.keep_ahead(int(self._d[NEXT_SLOT]) * self._width * 4, *most)
        self._lines.keep_ahead(int(self._d[NEXT_LINE]) * 64, *most)

    def reserve(self, rows: int) -> None:
        """See RowMemory."""
        rows = min(rows, self.max_rows)
        self._rows.populate(0, (rows + 1) * self._width * 4)
        self._lines.populate(0, rows * 9 // 4 * 64)

    def locate(self, ids: Ids) -> tuple[Ids, int]:
        """See RowMemory."""
        slots = np.empty(len(ids), np.int64)
        unknown = self._kernels.locate(self.address, address_of(ids), len(ids), address_of(slots))
        return slots, int(unknown)

    def touch(self, ids: Ids, step: int) -> tuple[Ids, int]:
        """See RowMemory."""
        self.keep(ids)
        slots = np.empty(len(ids), np.int64)
        unknown = self._kernels.touch(
            self.address, address_of(ids), len(ids), step, address_of(slots)
        )
        return slots, int(unknown)

    def place(self, ids: Ids, steps: Ids) -> Ids:
        """See RowMemory."""
        self.keep(ids)
        self.expect(len(ids))
        slots = np.empty(len(ids), np.int64)
        self._kernels.place(
            self.address, address_of(ids), len(ids), address_of(steps), address_of(slots)
        )
        return slots

    def remove(self, ids: Ids) -> int:
        """See RowMemory."""
        self.keep(ids)
        return int(self._kernels.forget(self.address, address_of(ids), len(ids)))

    def count(self, ids: Ids, step: int, needed: int) -> None:
        """See RowMemory."""
        self.expect(len(ids))
        passed = np.empty(len(ids), np.int64)
        self._kernels.count(
            self.address, address_of(ids), len(ids), step, needed, address_of(passed)
        )

    def aged(
        self, step: int, least: int = 0, segments: tuple[int, int] = EVERY, most: int = 2**32
    ) -> Listed:
        """See RowMemory."""
        there = int(self._segments[slice(*segments), LIVE].sum())
        ids, slots, ages = (np.empty(there, np.int64) for _ in range(3))
        count = self._kernels.collect(
            self.address, *segments, step, least, most, *map(address_of, (ids, slots, ages))
        )
        return ids[:count], slots[:count], ages[:count]

    def histogram(self, step: int, shift: int, bins: int) -> Ids:
        """See RowMemory."""
        counts = np.zeros(bins, np.int64)
        self._kernels.histogram(self.address, step, shift, bins, address_of(counts))
        return counts

    def decay(self, place: int, factors: tuple[float, float, float], least: float) -> Ids:
        """See RowMemory."""
        self.keep_segments(0, SEGMENT_COUNT)
        ids = np.empty(len(self), np.int64)
        count = self._kernels.decay(self.address, place, *factors, least, address_of(ids))
        return ids[:count]

    def restamp(self, old: int, new: int) -> None:
        """See RowMemory."""
        self._kernels.restamp(self.address, old, new)

    def recall(self, ids: Ids, step: int) -> Listed:
        """See RowMemory."""
        slots, touched = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        self._freezing.recall(
            self.address, address_of(ids), len(ids), step, address_of(slots), address_of(touched)
        )
        return ids, slots, touched

    def gather(self, slots: NDArray[np.int64]) -> Floats:
        """See RowMemory."""
        out = np.empty((len(slots), self._width), np.float32)
        self._kernels.gather(
            self.address, address_of(slots), len(slots), self._width, address_of(out)
        )
        return out

    def scatter(self, slots: NDArray[np.int64], rows: Floats) -> None:
        """See RowMemory."""
        self._kernels.scatter(
            self.address, address_of(slots), len(slots), self._width, address_of(rows)
        )


def _reserve(rows: int, sizes: Callable[[int], list[int]]) -> tuple[int, list[Arena]]:
    """Arenas of `sizes(rows)` bytes; for fewer rows where that is too much of the address space that is
    left, and for half, and again, where they cannot be had."""
    rows = min(rows, max(rows * (_space_left() // _SHARE) // sum(sizes(rows)), _FEWEST_ROWS))
    while True:
        try:
            return rows, [Arena(size) for size in sizes(rows)]
        except UsageError:
            if rows < 2 * _FEWEST_ROWS:
                raise
            rows //= 2


def _space_left() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(_SPACE - pages * mmap.PAGESIZE, 0)


def _most_rows(row: int) -> int:
    """How many rows of so many bytes twice the machine's memory holds: no table ever has more."""
    memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    return max(2 * memory // row, _FEWEST_ROWS)
