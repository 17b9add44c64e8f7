"""The decoded rows of row groups: piece by piece in the order of the file, or whole."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.datasets.packed_bags import BagBuffer, PackedBags
from psfleet.datasets.parquet_rows import Rows, joined_rows
from psfleet.feature_sets.jagged import Jagged

__all__ = ["RowBuffers", "RowGroupStream"]


class RowGroupStream:
    """The rows of a row group in the order of the file, decoded as they are asked for.

    A decoded piece stays in the processor's cache, and its memory is used again for the next one. To ask for
    rows before those of the last piece begins anew.

    Args:
        size: Rows of the group.
        begin: Begins to decode; what it lacks at the end cannot be read.
    """

    def __init__(self, size: int, begin: Callable[[], Iterator[Rows]]) -> None:
        self._size = size
        self._begin = begin
        self._restart()

    def _restart(self) -> None:
        self._pieces = self._begin()
        self._piece: Rows | None = None
        self._first = self._end = 0  # rows of the piece

    def rows(self, low: int, high: int) -> Iterator[Rows | int]:
        """The rows `low` to `high` - 1 in parts; a number stands for so many that cannot be read."""
        if low < self._first:
            self._restart()
        while low < high:
            while low >= self._end:
                self._next()
            upto, first = min(high, self._end), self._first
            yield self._chosen(slice(low - first, upto - first))
            low = upto

    def _next(self) -> None:
        self._piece = next(self._pieces, None)
        rows = self._size - self._end if self._piece is None else len(self._piece)
        self._first, self._end = self._end, self._end + rows

    def _chosen(self, rows: slice) -> Rows | int:
        return rows.stop - rows.start if self._piece is None else self._piece.chosen(rows)


class RowBuffers:
    """Row groups in another order than that of the file, in memory that is used again.

    Fresh memory from the system costs as much time as decoding into it.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, BagBuffer] = {}
        self._free: dict[tuple[str, np.dtype[Any]], list[NDArray[Any]]] = {}

    def ordered(self, pieces: Iterator[Rows], order: NDArray[np.int64]) -> Rows | None:
        """The rows of a row group in this order, as far as they are in the pieces; None: there is none.

        Each piece is copied while it is in the processor's cache. Bags are `PackedBags`.
        """
        for buffer in self._buffers.values():
            buffer.clear(len(order))
        others = [self._without_bags(piece, len(order)) for piece in pieces]
        if not others:
            return None
        rows = joined_rows(others)
        order = order if len(rows) == len(order) else order[order < len(rows)]
        rows = rows.chosen(order)
        for name, buffer in self._buffers.items():
            rows.features[name] = buffer.chosen(order, functools.partial(self._memory, name))
        return rows

    def _without_bags(self, piece: Rows, size: int) -> Rows:
        """What there is of a piece besides bags, which are copied."""
        others = {}
        for name, value in piece.features.items():
            if not isinstance(value, Jagged):
                others[name] = value
                continue
            if name not in self._buffers:
                self._buffers[name] = BagBuffer()
                self._buffers[name].clear(size)
            self._buffers[name].append(value)
        return replace(piece, features=others)

    def _memory(self, name: str, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        held = self._free.get((name, dtype), [])
        held.sort(key=len)
        largest = held.pop() if held else np.empty(0, dtype)
        return largest if len(largest) >= count else np.empty(count + count // 8, dtype)

    def give_back(self, rows: Rows) -> None:
        """Use the memory of these rows again: nothing may refer to it any longer."""
        for name, value in rows.features.items():
            if isinstance(value, PackedBags):
                for array in (value.values, value.weights):
                    if array is not None:
                        base = array.base
                        assert isinstance(base, np.ndarray)
                        self._free.setdefault((name, base.dtype), []).append(base)
