"""The decoded rows of row groups: piece by piece in the order of the file, or whole."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from psfleet.datasets.packed_bags import PackedBags
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
        self._free: list[dict[str, PackedBags]] = []

    def ordered(self, pieces: Iterator[Rows], order: NDArray[np.int64]) -> Rows | None:
        """The rows of a row group in this order, as far as they are in the pieces; None: there is none.

        Each piece is copied while it is in the processor's cache. Bags are `PackedBags`.
        """
        bags = self._free.pop() if self._free else {}
        for packed in bags.values():
            packed.clear(len(order))
        others = [_without_bags(piece, len(order), bags) for piece in pieces]
        if not others:
            self._free.append(bags)
            return None
        rows = joined_rows(others)
        order = order if len(rows) == len(order) else order[order < len(rows)]
        rows = rows.chosen(order)
        for packed in bags.values():
            packed.order = order
        rows.features |= bags
        return rows

    def give_back(self, rows: Rows) -> None:
        """Use the memory of these rows again: nothing may refer to it any longer."""
        features = rows.features.items()
        self._free.append(
            {name: value for name, value in features if isinstance(value, PackedBags)}
        )


def _without_bags(piece: Rows, size: int, bags: dict[str, PackedBags]) -> Rows:
    """What there is of a piece besides bags, which are copied behind those of the pieces before."""
    others = {}
    for name, value in piece.features.items():
        if not isinstance(value, Jagged):
            others[name] = value
            continue
        if name not in bags:
            bags[name] = PackedBags()
            bags[name].clear(size)
        bags[name].append(value)
    return replace(piece, features=others)
