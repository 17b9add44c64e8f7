"""Bags of row groups that are read in another order than that of the file, in half the memory."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.feature_sets.jagged import Jagged
from psfleet.kernels.bags import bags_at, chosen_bags, narrowed

__all__ = ["PackedBags"]

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
Array = NDArray[Any]


class PackedBags:
    """The bags of one feature of one row group, in an order of their own. Its memory is used again.

    They lie as in the file, and are copied from there when they are read. Values in int64 are kept as int32
    where all of them fit.

    Attributes:
        order: int64 [n]: the place in the file of each bag.
    """

    def __init__(self) -> None:
        self._wide = False  # ids do not fit in 32 bits
        self._values: Array = np.empty(0, _INT32)
        self._weights: Array = np.empty(0, np.float32)
        self._offsets = np.zeros(1, np.int64)
        self.clear(0)

    def clear(self, size: int) -> None:
        """Forget the bags; `size` others will be appended at most."""
        self._size, self._bags, self._count = size, 0, 0
        self.order = np.empty(0, np.int64)
        if len(self._offsets) <= size:
            self._offsets = np.empty(size + 1, np.int64)
            self._offsets[0] = 0

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

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, rows: slice) -> Jagged:
        """A copy of bags that follow each other in the order."""
        starts, lengths = bags_at(self._offsets, self.order[rows])
        weights = chosen_bags(self._weights, starts, lengths) if self._weighted else None
        return Jagged(
            chosen_bags(self._values, starts, lengths, self._dtype), lengths, weights=weights
        )
