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
from psfleet.tables.copy_on_write import FrozenRows, Listed

__all__ = ["EVERY", "ROW_BYTES", "RowIndex"]

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

EVERY = (0, SEGMENT_COUNT)
"""All segments."""
ROW_BYTES = 144  # of index, for each row of a table that has just grown

_FEWEST_ROWS = 1 << 16
_SPACE = 1 << 47  # bytes of address space of a process
_SHARE = 64  # a table takes at most one in so many of those that are left: there may be hundreds
_BINS = 4096  # of ages
_LINES = 12  # reserved for each row; 9/4 is what a table that only grows takes
_LEAST = (
    115 + (np.arange(SEGMENT_COUNT) * 0x9E3779B1 >> 8) % 64
)  # see `insert` in kernels/probing.py


class RowIndex:
    """Rows of `width` float32 by id. Not thread-safe.

    Attributes:
        address: Of the descriptor, for kernels.
        max_rows: The most rows it can hold.
        views: Of moments whose rows are being read; told of every change before it is made. Whoever
            changes rows by `address` tells them with `keep`.
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
        self.views: list[FrozenRows] = []
        self._kernels = static_kernels("index")
        self._freezing = static_kernels("freezing")

    def __len__(self) -> int:
        return int(self._segments[:, LIVE].sum())

    @property
    def bytes(self) -> int:
        """Memory in use by rows and index."""
        used = int(self._d[NEXT_SLOT])
        return (
            int(self._d[NEXT_LINE]) * 64 + used * self._width * 4 + (used * 8 if self._marks else 0)
        )

    @property
    def spare(self) -> int:
        """Slots that no row has had: at least so many rows can be added. Costs nothing to ask."""
        return self.max_rows + 1 - int(self._d[NEXT_SLOT])

    @property
    def free(self) -> int:
        """Rows that can be added without memory: slots of rows that were removed."""
        return int(self._d[NEXT_SLOT]) - 1 - len(self)

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
        """Whether the index has memory for so many new ids, whatever they are; costs nothing to ask."""
        return 4 * int(self._d[NEXT_LINE]) + 3 * count <= self._lines.size // 64

    def can_hold(self, ids: Ids) -> bool:
        """The same for these unknown ids. False only if most of them fall into few segments."""
        return self.lines_with(ids) <= self._lines.size // 64

    def taken(self, more: int) -> int:
        """Memory that this takes with `more` rows: whole pages, the index as if it had just grown."""
        return self._taken(max(more - self.free, 0) if more else 0)

    def taken_at_most(self, more: int) -> int:
        """As `taken`, as if no row had ever been removed. Costs nothing to ask."""
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
        """Have memory for the next rows made in the background, a part of `room` bytes at most."""
        most = [] if room is None else [max(room, 0) // 8]
        self._rows.keep_ahead(int(self._d[NEXT_SLOT]) * self._width * 4, *most)
        self._lines.keep_ahead(int(self._d[NEXT_LINE]) * 64, *most)

    def reserve(self, rows: int) -> None:
        """Have memory for so many rows in all made now."""
        rows = min(rows, self.max_rows)
        self._rows.populate(0, (rows + 1) * self._width * 4)
        self._lines.populate(0, rows * 9 // 4 * 64)

    def locate(self, ids: Ids) -> tuple[Ids, int]:
        """The slot of each id, 0 for an unknown one, and how many were unknown."""
        slots = np.empty(len(ids), np.int64)
        unknown = self._kernels.locate(self.address, address_of(ids), len(ids), address_of(slots))
        return slots, int(unknown)

    def touch(self, ids: Ids, step: int) -> tuple[Ids, int]:
        """`locate`; the rows that are there count as pushed at this step."""
        self.keep(ids)
        slots = np.empty(len(ids), np.int64)
        unknown = self._kernels.touch(
            self.address, address_of(ids), len(ids), step, address_of(slots)
        )
        return slots, int(unknown)

    def place(self, ids: Ids, steps: Ids) -> Ids:
        """The slot of each id, a new one for an unknown id; its row counts as pushed at its step."""
        self.keep(ids)
        self.expect(len(ids))
        slots = np.empty(len(ids), np.int64)
        self._kernels.place(
            self.address, address_of(ids), len(ids), address_of(steps), address_of(slots)
        )
        return slots

    def remove(self, ids: Ids) -> int:
        """Forget ids; returns how many were there."""
        self.keep(ids)
        return int(self._kernels.forget(self.address, address_of(ids), len(ids)))

    def entries(self) -> tuple[Ids, Ids]:
        """Every id, ascending, and its slot."""
        ids, slots, _ = self.aged(0)
        order = np.argsort(ids)
        return ids[order], slots[order]

    def aged(
        self, step: int, least: int = 0, segments: tuple[int, int] = EVERY, most: int = 2**32
    ) -> tuple[Ids, ...]:
        """Ids, slots and ages of the rows of these segments that are so old, in no good order.

        A segment is chosen by the hash of the id and never changes.
        """
        there = int(self._segments[slice(*segments), LIVE].sum())
        found = [np.empty(there, np.int64) for _ in range(3)]
        count = self._kernels.collect(
            self.address, *segments, step, least, most, *map(address_of, found)
        )
        return tuple(array[:count] for array in found)

    def decay(self, place: int, factors: tuple[float, float, float], least: float) -> Ids:
        """Shrink the shows and clicks that begin with value `place` of each row.

        factors: by which both are multiplied; the worth of a show without a click; that of a click.

        Returns:
            Ids of the rows that are now worth less than `least`.
        """
        self.keep_sections(0, SEGMENT_COUNT)
        ids = np.empty(len(self), np.int64)
        count = self._kernels.decay(self.address, place, *factors, least, address_of(ids))
        return ids[:count]

    def oldest(self, step: int, count: int, least: int) -> Ids:
        """Ids of the `count` rows that were pushed the longest time ago, fewer if fewer are `least` old.

        Of equally old rows those whose ids have the smallest hash.
        """
        bins = np.zeros(_BINS, np.int64)
        for shift in (0, 10, 20):  # the finest bins whose last one need not be opened
            bins[:] = 0
            self._kernels.histogram(self.address, step, shift, _BINS, address_of(bins))
            if bins[-1] < count:
                break
        reach = np.cumsum(bins[::-1])[::-1]  # rows in this bin or in older ones
        enough = np.flatnonzero(reach >= count)
        first = int(enough[-1]) << shift if len(enough) else 0
        ids, _, ages = self.aged(step, max(first, least))
        if len(ids) <= count:
            return np.ascontiguousarray(ids)
        edge = np.partition(ages, len(ages) - count)[len(ages) - count]
        older, level = ids[ages > edge], ids[ages == edge]
        left = count - len(older)
        return np.append(older, level[np.argpartition(hash_ids(level), left - 1)[:left]])

    def restamp(self, old: int, new: int) -> None:
        """The table's step goes from `old` to `new`; rows keep the step of their last push."""
        self._kernels.restamp(self.address, old, new)

    # -- for views of a moment -----------------------------------------------------------------

    def keep(self, ids: Ids) -> None:
        """Rows of these ids are about to change."""
        for view in self.views:
            view.keep(ids)

    def keep_sections(self, first: int, last: int) -> None:
        """Rows of segments first to last - 1 are about to change."""
        for view in self.views:
            for number in range(first, last):
                view.keep_section(number)

    @property
    def next_slot(self) -> int:
        """The first slot that no row has had."""
        return int(self._d[NEXT_SLOT])

    def free_slots(self) -> Ids:
        """The slots below it that have no row; slot 0, which is none, is not among them."""
        slots = np.empty(self.free, np.int64)
        self._kernels.freed(self.address, address_of(slots))
        return slots

    def section(self, number: int, step: int) -> Listed:
        """One segment's rows; an id never changes its segment. `step`: of the table."""
        ids, slots, ages = self.aged(step, segments=(number, number + 1))
        return ids, slots, step - ages

    def recall(self, ids: Ids, step: int) -> Listed:
        """The rows of these ids; slot 0 for an unknown one. `step`: of the table."""
        slots, touched = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        self._freezing.recall(
            self.address, address_of(ids), len(ids), step, address_of(slots), address_of(touched)
        )
        return ids, slots, touched

    # -- whole rows ----------------------------------------------------------------------------

    def gather(self, slots: NDArray[np.int64]) -> Floats:
        """Whole rows: float32 [n, width]."""
        out = np.empty((len(slots), self._width), np.float32)
        self._kernels.gather(
            self.address, address_of(slots), len(slots), self._width, address_of(out)
        )
        return out

    def scatter(self, slots: NDArray[np.int64], rows: Floats) -> None:
        """Set whole rows."""
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
