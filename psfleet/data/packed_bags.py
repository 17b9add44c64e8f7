"""Decoded row groups in memory: bags in a shuffled order at half the size, and streams of rows in file order.

A shuffled epoch keeps several whole row groups, which are mostly ids. PackedBags stores the ids of one
feature as int32 where they fit, in the order of the file, and the epoch's order beside them:

    values     | 7 9 | 4 | 4 8 1 | ...     bags of the file's rows 0, 1, 2, ...
    offsets    0     2   3       6         bag k is values[offsets[k] : offsets[k + 1]]
    order      2  0  1                     the epoch's first bag is bag 2 of the file

A batch copies its bags out of `values` and widens them to int64. So each id is copied twice: when its piece
is decoded, which is then still in the processor's cache, and for its batch. Sorting a whole group first
took one more copy and the memory of one more group (docs/decisions/0023-order-of-rows.md has the
measurements).

RowBuffers fills PackedBags again with new groups, because fresh memory from the system costs as much time
as decoding into it. RowGroupStream serves epochs that are not shuffled. Only one thread at a time may use
either.
"""

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
    """Bags of one feature of one row group, read in another order than that of the file.

    Call `clear`, `append` for each decoded piece, then set `order`. A slice gives a Jagged. The arrays are
    reused after the next `clear`, so a slice is always a copy.

    Attributes:
        order: Number in the file of each bag in the order of reading, int64 [n].
    """

    def __init__(self) -> None:
        self._wide = (
            False  # True once an id did not fit into 32 bits; later groups are then not even tried
        )
        self._values: Array = np.empty(0, _INT32)
        self._weights: Array = np.empty(0, np.float32)
        self._offsets = np.zeros(1, np.int64)
        self.clear(0)

    def clear(self, size: int) -> None:
        """Remove all bags, and make room for the offsets of at most `size` new ones."""
        self._size, self._bags, self._count = size, 0, 0
        self.order = np.empty(0, np.int64)
        if len(self._offsets) <= size:
            self._offsets = np.empty(size + 1, np.int64)
            self._offsets[0] = 0

    def append(self, part: Jagged) -> None:
        """Copy the bags of a piece behind those of earlier pieces.

        All pieces of a group have the same dtype, and either all have weights or none has.
        """
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
        """Copy the values behind those before as int32, and return True if all of them fit."""
        self._values = self._with_room(self._values, _INT32, before)
        fits = narrowed(values, self._values[before : self._count])
        self._wide = not fits
        return fits

    def _with_room(self, array: Array, dtype: np.dtype[Any], count: int) -> Array:
        """Return an array for all values so far, `array` itself if it is large enough.

        Args:
            array: Present array, of which the first `count` values are kept.
            dtype: Dtype of the values.
            count: Number of values that earlier pieces have stored.
        """
        if array.dtype == dtype and len(array) >= self._count:
            return array
        # Estimate the size for the whole group from the bags so far, so that an array grows once at most if
        # pieces are alike; a sixteenth more for pieces that are not.
        capacity = max(self._count * self._size // self._bags, self._count)
        larger = np.empty(capacity + capacity // 16, dtype)
        larger[:count] = array[:count]
        return larger

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, rows: slice) -> Jagged:
        """Copy the bags at these positions of the order."""
        starts, lengths = bags_at(self._offsets, self.order[rows])
        weights = chosen_bags(self._weights, starts, lengths) if self._weighted else None
        return Jagged(
            chosen_bags(self._values, starts, lengths, self._dtype), lengths, weights=weights
        )


class RowGroupStream:
    """Rows of a row group in the order of the file, decoded piece by piece as they are read.

    Only one piece is in memory, and it stays in the processor's cache. Reading rows before the present piece
    decodes the group from its start.

    Args:
        size: Number of rows of the group, including rows that cannot be read.
        begin: Function that starts to decode. Rows that its iterator lacks at the end cannot be read.
    """

    def __init__(self, size: int, begin: Callable[[], Iterator[Rows]]) -> None:
        self._size = size
        self._begin = begin
        self._restart()

    def _restart(self) -> None:
        self._row_parts = self._begin()
        self._rows: Rows | None = None
        self._first = self._end = 0  # the present piece has the rows _first to _end - 1

    def rows(self, low: int, high: int) -> Iterator[Rows | int]:
        """Yield the rows `low` to `high` - 1 in parts. A number n stands for n rows that cannot be read."""
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
    """Pool of PackedBags for row groups in a shuffled order.

    Fresh memory from the system costs as much time as decoding into it, so the memory of a group that is no
    longer needed is given back and used for the next one.
    """

    def __init__(self) -> None:
        self._free: list[dict[str, PackedBags]] = []

    def ordered(self, parts: Iterator[Rows], order: NDArray[np.int64]) -> Rows | None:
        """Put the decoded pieces of a row group in an order, with bags as `PackedBags`.

        Args:
            parts: Pieces in the order of the file. Each is copied while it is in the processor's cache.
            order: Number in the file of each row, in the new order; int64 [n].

        Returns:
            The rows that the pieces have, in the new order, or None if there is no piece.
        """
        bags = self._free.pop() if self._free else {}
        for feature_bags in bags.values():
            feature_bags.clear(len(order))
        other_columns = [_without_bags(part, len(order), bags) for part in parts]
        if not other_columns:
            self._free.append(bags)
            return None
        rows = joined_rows(other_columns)
        order = order if len(rows) == len(order) else order[order < len(rows)]
        rows = rows.chosen(order)
        for feature_bags in bags.values():
            feature_bags.order = order
        rows.features |= bags
        return rows

    def give_back(self, rows: Rows) -> None:
        """Take back the memory of these rows for a later group. The caller must not use the rows again."""
        features = rows.features.items()
        self._free.append(
            {name: value for name, value in features if isinstance(value, PackedBags)}
        )


def _without_bags(part: Rows, size: int, bags: dict[str, PackedBags]) -> Rows:
    """Copy the bags of a piece into `bags`, and return the piece without them."""
    other_features = {}
    for name, value in part.features.items():
        if not isinstance(value, Jagged):
            other_features[name] = value
            continue
        if name not in bags:
            bags[name] = PackedBags()
            bags[name].clear(size)
        bags[name].append(value)
    return replace(part, features=other_features)
