"""The memory of one sparse table: index lines, rows, and the descriptor that kernels read."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import UsageError
from psfleet.kernels.generate import static_kernels
from psfleet.kernels.initial import address_of
from psfleet.kernels.probing import (
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
)
from psfleet.tables.arena import Arena

__all__ = ["Index"]

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_FEWEST_ROWS = 1 << 16


class Index:
    """Rows of `width` float32 by id. Not thread-safe.

    Attributes:
        address: Of the descriptor, for kernels.
        max_rows: The most rows it can hold.
    """

    def __init__(self, width: int, max_rows: int, marks: bool) -> None:
        """Reserve memory for `max_rows` rows, or as many as there is address space for.

        `marks`: and an int64 beside each.
        """
        if not 1 <= max_rows < 2**32 - 2:
            raise UsageError(f"max_rows is {max_rows}; it must be in [1, 2**32 - 3]")
        self._width = width
        first = FIRST_LINES * (SEGMENT_COUNT + 1)
        # Lines: a segment doubles at 45 to 70 % load and leaves its old ones: at most 9/4 per row.
        self.max_rows, (self._lines, self._rows, *mark_arenas) = _reserve(
            max_rows,
            lambda rows: [
                (first + rows * 9 // 4 + SEGMENT_COUNT * 8) * 64,
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
        self._kernels = static_kernels("index")

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

    def keep_ahead(self) -> None:
        """Have memory for the next rows made in the background."""
        self._rows.keep_ahead(int(self._d[NEXT_SLOT]) * self._width * 4)
        self._lines.keep_ahead(int(self._d[NEXT_LINE]) * 64)

    def reserve(self, rows: int) -> None:
        """Have memory for so many rows in all made now."""
        rows = min(rows, self.max_rows)
        self._rows.populate(0, (rows + 1) * self._width * 4)
        self._lines.populate(0, rows * 9 // 4 * 64)

    def locate(self, ids: Ids, *, add: bool) -> tuple[NDArray[np.int64], int]:
        """The slot of each id and how many were unknown: those get slot 0, or are added if `add`."""
        slots = np.empty(len(ids), np.int64)
        unknown = self._kernels.locate(
            self.address, address_of(ids), len(ids), address_of(slots), add
        )
        return slots, int(unknown)

    def remove(self, ids: Ids) -> int:
        """Forget ids; returns how many were there."""
        return int(self._kernels.forget(self.address, address_of(ids), len(ids)))

    def entries(self) -> tuple[Ids, NDArray[np.int64]]:
        """Every id, ascending, and its slot."""
        ids, slots = np.empty(len(self), np.int64), np.empty(len(self), np.int64)
        self._kernels.collect(self.address, address_of(ids), address_of(slots))
        order = np.argsort(ids)
        return ids[order], slots[order]

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
    """Arenas of `sizes(rows)` bytes; with half the rows, and again, where they cannot be had."""
    while True:
        try:
            return rows, [Arena(size) for size in sizes(rows)]
        except UsageError:
            if rows < 2 * _FEWEST_ROWS:
                raise
            rows //= 2
