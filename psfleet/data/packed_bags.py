"""Bags of row groups that are read in another order than that of the file, in half the memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.bags import bags_at, chosen_bags, narrowed
from psfleet.data.arrow_rows import Rows, joined_rows
from psfleet.data.feature_sets.jagged import Jagged

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

    def append(self, part: Jagged) -> None:
        """Copy bags behind those that are there; all pieces have weights and one type, or none has."""
        self._dtype, self._weighted = part.values.dtype, part.weights is not None
        ends = self._offsets[self._bags + 1 : self._bags + len(part) + 1]
        np.cumsum(part.lengths, out=ends)
        ends += self._count
        self._bags += len(part)
        before, self._count = self._count, self._count + len(part.values)
        if self._dtype != _INT64 or self._wide or not self._narrowed(part.values, before):
            self._values = self._with_room(self._values, self._dtype, before)
            self._values[before : self._count] = part.values
        if part.weights is not None:
            self._weights = self._with_room(self._weights, part.weights.dtype, before)
            self._weights[before : self._count] = part.weights

    def _narrowed(self, values: NDArray[np.int64], before: int) -> bool:
        """Copy the values if they fit in 32 bits."""
        self._values = self._with_room(self._values, _INT32, before)
        fits = narrowed(values, self._values[before : self._count])
        self._wide = not fits
        return fits

    def _with_room(self, array: Array, dtype: np.dtype[Any], count: int) -> Array:
        """An array for all values, in which the first ones are those of the given array."""
        if array.dtype == dtype and len(array) >= self._count:
            return array
        # More pieces like those so far will follow.
        room = max(self._count * self._size // self._bags, self._count)
        larger = np.empty(room + room // 16, dtype)
        larger[:count] = array[:count]
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


class RowGroupStream:
    """The rows of a row group in the order of the file, decoded as they are asked for.

    A decoded piece stays in the processor's cache, and its memory is used again for the next one. To ask for
    rows before those of the last piece begins anew.

    Args:
        begin: Begins to decode; what it lacks at the end cannot be read.
    """

    def __init__(self, size: int, begin: Callable[[], Iterator[Rows]]) -> None:
        self._size = size
        self._begin = begin
        self._restart()

    def _restart(self) -> None:
        self._row_parts = self._begin()
        self._rows: Rows | None = None
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
        self._rows = next(self._row_parts, None)
        rows = self._size - self._end if self._rows is None else len(self._rows)
        self._first, self._end = self._end, self._end + rows

    def _chosen(self, rows: slice) -> Rows | int:
        return rows.stop - rows.start if self._rows is None else self._rows.chosen(rows)


class RowBuffers:
    """Row groups in another order than that of the file, in memory that is used again.

    Fresh memory from the system costs as much time as decoding into it.
    """

    def __init__(self) -> None:
        self._free: list[dict[str, PackedBags]] = []

    def ordered(self, parts: Iterator[Rows], order: NDArray[np.int64]) -> Rows | None:
        """The rows of a row group in this order, as far as they are in the pieces; None: there is none.

        Each piece is copied while it is in the processor's cache. Bags are `PackedBags`.
        """
        bags = self._free.pop() if self._free else {}
        for feature_bags in bags.values():
            feature_bags.clear(len(order))
        others = [_without_bags(part, len(order), bags) for part in parts]
        if not others:
            self._free.append(bags)
            return None
        rows = joined_rows(others)
        order = order if len(rows) == len(order) else order[order < len(rows)]
        rows = rows.chosen(order)
        for feature_bags in bags.values():
            feature_bags.order = order
        rows.features |= bags
        return rows

    def give_back(self, rows: Rows) -> None:
        """Use the memory of these rows again: nothing may refer to it any longer."""
        features = rows.features.items()
        self._free.append(
            {name: value for name, value in features if isinstance(value, PackedBags)}
        )


def _without_bags(part: Rows, size: int, bags: dict[str, PackedBags]) -> Rows:
    """Return the columns of a piece besides bags, which are copied behind those of the pieces before."""
    others = {}
    for name, value in part.features.items():
        if not isinstance(value, Jagged):
            others[name] = value
            continue
        if name not in bags:
            bags[name] = PackedBags()
            bags[name].clear(size)
        bags[name].append(value)
    return replace(part, features=others)
