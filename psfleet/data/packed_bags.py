"""Decoded row groups in memory: PackedBags for shuffled epochs, RowGroupStream for epochs in file order.

A bag is the list of a feature's ids in one row. A shuffled epoch keeps several whole row groups in memory,
and most of their content is ids. PackedBags takes half the memory: it stores ids as int32 where they fit,
in the order of the file, and the order of the epoch as a separate array:

    values     | 7 9 | 4 | 4 8 1 | ...     bags of the file's rows 0, 1, 2, ...
    offsets    0     2   3       6         bag k is values[offsets[k] : offsets[k + 1]]
    order      2  0  1                     the epoch's first bag is bag 2 of the file

For a batch, its bags are copied and widened to int64. So each id is copied twice: after decoding, while the
decoded rows are still in the processor's cache, and for its batch. Sorting a whole group first took one
more copy and the memory of one more group (docs/decisions/0023-order-of-rows.md has the measurements).

RowBuffers fills the same PackedBags with new groups, because getting fresh memory from the system takes as
long as decoding. Only one thread at a time may use a RowBuffers or a RowGroupStream.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.bags import bags_at, chosen_bags, narrowed
from psfleet.data.arrow_conversion import Rows, joined_rows
from psfleet.data.feature_sets.jagged import Jagged

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
Array = NDArray[Any]


class PackedBags:
    """Bags (lists of ids, one for each row) of one feature, stored in file order and read in another order.

    All bags are from one row group: rows of a file that are decoded together.

    Call `clear`, then `append` for each part that is decoded, then set `order`. A slice returns some bags
    as a Jagged. It is always a copy, because the next `clear` reuses the arrays.

    Attributes:
        order: For each bag in the order of reading, its number in the file, int64 [n].
    """

    def __init__(self) -> None:
        self._wide = (
            False  # True once an id did not fit into 32 bits: later groups are stored as int64
        )
        self._values: Array = np.empty(0, _INT32)
        self._weights: Array = np.empty(0, np.float32)
        self._offsets = np.zeros(1, np.int64)
        self.clear(0)

    def clear(self, size: int) -> None:
        """Remove all bags, and reserve memory for at most `size` new bags."""
        self._size, self._bags, self._count = size, 0, 0
        self.order = np.empty(0, np.int64)
        if len(self._offsets) <= size:
            self._offsets = np.empty(size + 1, np.int64)
            self._offsets[0] = 0

    def append(self, part: Jagged) -> None:
        """Append copies of the bags of the next decoded part of the row group.

        All parts of a group must have the same dtype, and weights either in all parts or in none.
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
        """Try to append values as int32, after the first `before` values. Returns False if a value does not
        fit.
        """
        self._values = self._with_room(self._values, _INT32, before)
        fits = narrowed(values, self._values[before : self._count])
        self._wide = not fits
        return fits

    def _with_room(self, array: Array, dtype: np.dtype[Any], count: int) -> Array:
        """Return an array with room for all values so far. If `array` is large enough, it is returned itself.

        Args:
            array: Present array. Its first `count` values are kept.
            count: Number of values that earlier parts have stored.
        """
        if array.dtype == dtype and len(array) >= self._count:
            return array
        # Estimate the size for the whole group from the bags so far. Then an array grows at most once if
        # all parts are alike. A sixteenth is added for parts that are not.
        capacity = max(self._count * self._size // self._bags, self._count)
        larger = np.empty(capacity + capacity // 16, dtype)
        larger[:count] = array[:count]
        return larger

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, rows: slice) -> Jagged:
        """Return copies of the bags at these positions of `order`."""
        starts, lengths = bags_at(self._offsets, self.order[rows])
        weights = chosen_bags(self._weights, starts, lengths) if self._weighted else None
        return Jagged(
            chosen_bags(self._values, starts, lengths, self._dtype), lengths, weights=weights
        )


class RowGroupStream:
    """Rows of a row group in file order, decoded a few thousand at a time while they are read.

    Only the rows decoded last are in memory, and they stay in the processor's cache. Reading earlier rows
    decodes the group again from its start.

    Args:
        size: Number of rows in the group, including rows that cannot be read.
        begin: Function that starts decoding and returns an iterator of decoded rows. Rows that the iterator
            lacks at its end cannot be read.
    """

    def __init__(self, size: int, begin: Callable[[], Iterator[Rows]]) -> None:
        self._size = size
        self._begin = begin
        self._restart()

    def _restart(self) -> None:
        self._row_parts = self._begin()
        self._rows: Rows | None = None
        self._first = self._end = 0  # the decoded rows in memory are _first to _end - 1

    def rows(self, low: int, high: int) -> Iterator[Rows | int]:
        """Yield the rows `low` to `high` - 1 in parts. An integer n represents n rows that cannot be read."""
        if low < self._first:
            self._restart()
        while low < high:
            while low >= self._end:
                self._next()
            upto, first = min(high, self._end), self._first
            part = slice(low - first, upto - first)
            yield part.stop - part.start if self._rows is None else self._rows.chosen(part)
            low = upto

    def _next(self) -> None:
        self._rows = next(self._row_parts, None)
        rows = self._size - self._end if self._rows is None else len(self._rows)
        self._first, self._end = self._end, self._end + rows


class RowBuffers:
    """Pool of PackedBags for decoded row groups of a shuffled epoch.

    Getting fresh memory from the system takes as long as decoding. So the memory of a group that is no
    longer needed is given back, and the next group uses it.
    """

    def __init__(self) -> None:
        self._free: list[dict[str, PackedBags]] = []

    def ordered(self, parts: Iterator[Rows], order: NDArray[np.int64]) -> Rows | None:
        """Put the rows of a row group into a new order. Their bags are stored in `PackedBags` of the pool.

        Args:
            parts: Decoded rows in file order. Each part is copied while it is in the processor's cache.
            order: For each row in the new order, its number in the file, int64 [n].

        Returns:
            The rows in the new order, without rows that `parts` lacks at the end, or None if there is no
            part.
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
        """Return the memory of these rows to the pool. The caller must not use the rows afterwards."""
        features = rows.features.items()
        self._free.append(
            {name: value for name, value in features if isinstance(value, PackedBags)}
        )


def _without_bags(part: Rows, size: int, bags: dict[str, PackedBags]) -> Rows:
    """Copy the bags of a decoded part into `bags`, and return the part without its bags."""
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
