"""Bags of row groups that are read in another order than that of the file, in half the memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.feature_sets.jagged import Jagged
from psfleet.kernels.bags import bags_at, chosen_bags, narrowed

__all__ = ["BagBuffer", "PackedBags"]

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
Array = NDArray[Any]
Memory = Callable[[int, np.dtype[Any]], Array]
"""Gives memory for so many values of a type."""


class PackedBags:
    """Bags of one feature in their final order; int64 values are kept as int32 where all of them fit.

    Args:
        bags: The bags, of which values and weights may be int32 and longer than needed.
        dtype: Of the values that a reader gets.
    """

    def __init__(self, values: Array, weights: Array | None, lengths: Array, dtype: Any) -> None:
        self.values, self.weights = values, weights
        self._lengths, self._dtype = lengths, dtype
        self._offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=self._offsets[1:])

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, rows: slice) -> Jagged:
        """A copy of bags that follow each other."""
        low, high, _ = rows.indices(len(self))
        places = slice(self._offsets[low], self._offsets[high])
        weights = None if self.weights is None else self.weights[places].copy()
        values = self.values[places].astype(self._dtype)
        return Jagged(values, self._lengths[rows], weights=weights)


class BagBuffer:
    """The bags of one feature of one row group, as they are in the file. Its memory is used again."""

    def __init__(self) -> None:
        self._wide = False  # ids do not fit in 32 bits
        self._values: Array = np.empty(0, _INT32)
        self._weights: Array = np.empty(0, np.float32)
        self.clear(0)

    def clear(self, size: int) -> None:
        """Forget the bags; `size` others will be appended at most."""
        self._size, self._bags, self._count = size, 0, 0
        self._offsets = np.zeros(size + 1, np.int64)

    def append(self, piece: Jagged) -> None:
        """Copy bags behind those that are there; all pieces have weights and one type, or none has."""
        self._dtype, self._weighted = piece.values.dtype, piece.weights is not None
        ends = self._offsets[self._bags + 1 : self._bags + len(piece) + 1]
        np.cumsum(piece.lengths, out=ends)
        ends += self._count
        self._bags += len(piece)
        before, self._count = self._count, self._count + len(piece.values)
        if self._dtype != _INT64 or self._wide or not self._narrowed(piece.values, before):
            self._values = self._with_room(self._values, self._dtype, before)
            self._values[before : self._count] = piece.values
        if piece.weights is not None:
            self._weights = self._with_room(self._weights, piece.weights.dtype, before)
            self._weights[before : self._count] = piece.weights

    def _narrowed(self, values: NDArray[np.int64], before: int) -> bool:
        """Copy the values if they fit in 32 bits."""
        self._values = self._with_room(self._values, _INT32, before)
        fits = narrowed(values, self._values[before : self._count])
        self._wide = not fits
        return fits

    def _with_room(self, array: Array, dtype: np.dtype[Any], used: int) -> Array:
        """An array for all values, in which the first ones are those of the given array."""
        if array.dtype == dtype and len(array) >= self._count:
            return array
        # More pieces like those so far will follow.
        room = max(self._count * self._size // self._bags, self._count)
        larger = np.empty(room + room // 16, dtype)
        larger[:used] = array[:used]
        return larger

    def chosen(self, rows: NDArray[np.int64], memory: Memory) -> PackedBags:
        """A copy of the bags at these places, in memory that is given."""
        starts, lengths = bags_at(self._offsets, rows)
        count = int(lengths.sum())

        def copied(array: Array) -> Array:
            return chosen_bags(array, starts, lengths, memory(count, array.dtype)[:count])

        weights = copied(self._weights) if self._weighted else None
        return PackedBags(copied(self._values), weights, lengths, self._dtype)
