"""The decoded rows of row groups: piece by piece in the order of the file, or whole."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.datasets.parquet_rows import Rows
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
    """Memory of row groups that are no longer needed, for the next ones.

    Fresh memory from the system costs as much time as decoding into it.
    """

    def __init__(self) -> None:
        self._free: dict[str, list[NDArray[Any]]] = {}

    def joined(self, pieces: Sequence[Rows]) -> Rows:
        """All rows of a row group, copied. There is at least one piece."""
        first = pieces[0]
        return Rows(
            {
                name: self._feature(name, [p.features[name] for p in pieces])
                for name in first.features
            },
            {name: np.concatenate([p.labels[name] for p in pieces]) for name in first.labels},
            np.concatenate([piece.numbers for piece in pieces]),
            {row: bad for piece in pieces for row, bad in piece.bad.items()},
        )

    def give_back(self, rows: Rows) -> None:
        """Use the memory of these rows again: nothing may refer to it any longer."""
        for name, value in rows.features.items():
            if isinstance(value, Jagged) and value.values.dtype != object:
                buffer = value.values.base
                assert isinstance(buffer, np.ndarray)
                self._free.setdefault(name, []).append(buffer)

    def _feature(self, name: str, parts: Sequence[Any]) -> Any:
        if not isinstance(parts[0], Jagged):
            return np.concatenate(parts)
        weights = [part.weights for part in parts if part.weights is not None]
        return Jagged(
            self._values(name, [part.values for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            weights=np.concatenate(weights) if weights else None,
        )

    def _values(self, name: str, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        count, dtype = sum(map(len, parts)), parts[0].dtype
        held = self._free.get(name, [])
        fits = [
            at for at, buffer in enumerate(held) if buffer.dtype == dtype and len(buffer) >= count
        ]
        buffer = held.pop(fits[0]) if fits else np.empty(count + count // 8, dtype)
        return np.concatenate(parts, out=buffer[:count])
