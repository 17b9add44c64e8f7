"""Bags of rows: their sums or means, and the gradients of the rows. Bags of values: a choice of them."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ShapeError
from psfleet.core.engine.kernels.generate import static_kernels, width_kernels
from psfleet.core.engine.kernels.initial_values import address_of

Floats = NDArray[np.float32]
Lengths = NDArray[np.int64]


class RowBags:
    """Rows that make up each bag.

    Args:
        lengths: int64 [bags]: how many rows each bag has, those of the first bag first.
        weights: float32 [n]: a factor on each row; None: 1.
        mean: Divide by the number of rows, or by the sum of their weights; 0 gives zeros.

    Attributes:
        rows: n, how many rows all bags have.
        are_rows: True if every bag is exactly one row, without weight.
    """

    def __init__(self, lengths: Lengths, weights: Floats | None = None, mean: bool = False) -> None:
        self.lengths, self.weights = lengths, weights
        self._mean = mean

    def __len__(self) -> int:
        """The number of bags."""
        return len(self.lengths)

    @functools.cached_property
    def _ends(self) -> Lengths:
        return self.lengths.cumsum()

    @functools.cached_property
    def rows(self) -> int:
        return int(self._ends[-1]) if len(self.lengths) else 0

    @functools.cached_property
    def are_rows(self) -> bool:
        alike = self.weights is None and len(self.lengths) == self.rows
        return alike and np.count_nonzero(self.lengths) == self.rows

    def matches(self, other: "RowBags") -> bool:
        """Return whether both pool the same from rows."""
        if self._mean != other._mean or not np.array_equal(self.lengths, other.lengths):
            return False
        if self.weights is None or other.weights is None:
            return self.weights is other.weights
        return np.array_equal(self.weights, other.weights)

    def copy(self) -> "RowBags":
        """The same bags, whatever becomes of the arrays that these were made of."""
        weights = None if self.weights is None else self.weights.copy()
        return RowBags(self.lengths.copy(), weights, self._mean)

    def pool(self, rows: Floats) -> Floats:
        """One row for each bag: the sum of its rows, added in order. An empty bag gives zeros.

        Args:
            rows: float32 [n, dim], those of the first bag, then those of the second one, ...

        Returns:
            float32 [bags, dim]; `rows` itself where every bag has exactly one row and no weight.

        Raises:
            ShapeError: There are not as many rows as the lengths say.
        """
        if len(rows) != self.rows:
            raise ShapeError(f"bags of {self.rows} ids in all got {len(rows)} rows")
        if self.are_rows:
            return rows
        rows = np.ascontiguousarray(rows, np.float32)
        out = np.zeros((len(self), rows.shape[1]), np.float32)
        kernels = width_kernels("row_sums", rows.shape[1], "pool", "spread")
        kernels.pool(address_of(rows), *self.arguments, address_of(out))
        return out

    def spread(self, gradient: Floats, out: Floats | None = None) -> Floats:
        """The gradient of each row, float32 [n, dim], from those of the bags, float32 [bags, dim].

        Args:
            gradient: Gradient of the bags.
            out: Takes it; None: it is a new array, or `gradient` itself where `pool` returns `rows`.
        """
        if self.are_rows and out is None:
            return gradient
        if out is None:
            out = np.empty((self.rows, gradient.shape[1]), np.float32)
        if self.are_rows:
            out[...] = gradient
            return out
        gradient = np.ascontiguousarray(gradient, np.float32)
        kernels = width_kernels("row_sums", gradient.shape[1], "pool", "spread")
        kernels.spread(address_of(gradient), *self.arguments, address_of(out))
        return out

    @functools.cached_property
    def arguments(self) -> tuple[int, int, int, int]:
        """Ends, bags, weights and scales, as kernels take them. They are valid as long as this object."""
        weights = None if self.weights is None else np.ascontiguousarray(self.weights, np.float32)
        scales = _scales(self.lengths, weights) if self._mean else None
        self._factors = weights, scales
        first, second = (0 if array is None else address_of(array) for array in self._factors)
        return address_of(self._ends), len(self), first, second


def pool_parts(rows: Floats, parts: Sequence[RowBags]) -> Floats:
    """Pool the rows of one table for several features: float32 [all bags, dim]."""
    ends = np.cumsum([part.rows for part in parts])[:-1]
    pairs = zip(parts, np.split(rows, ends), strict=True)
    return np.concatenate([part.pool(own) for part, own in pairs])


def spread_parts(gradient: Floats, parts: Sequence[RowBags]) -> Floats:
    """The gradients of these rows, float32 [n, dim], from those that `pool_parts` gives."""
    ends = np.cumsum([len(part) for part in parts])[:-1]
    pairs = zip(parts, np.split(gradient, ends), strict=True)
    return np.concatenate([part.spread(own) for part, own in pairs])


def bags_at(offsets: Lengths, rows: Lengths) -> tuple[Lengths, Lengths]:
    """Starts and lengths of some bags, for `chosen_bags`.

    Args:
        offsets: int64 [all bags + 1]: where the values of each bag begin, and the end.
        rows: int64 [bags]: which ones; they are not checked.
    """
    rows = np.ascontiguousarray(rows)
    starts, lengths = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    static_kernels("chosen_bags").choose(
        address_of(offsets), address_of(rows), len(rows), address_of(starts), address_of(lengths)
    )
    return starts, lengths


def narrowed(values: NDArray[np.int64], out: NDArray[np.int32]) -> bool:
    """Copy values into an array as long as they are. False: they do not fit, and `out` holds nothing."""
    values = np.ascontiguousarray(values)
    kernels = static_kernels("chosen_bags")
    return bool(kernels.narrow(address_of(values), len(values), address_of(out)) == 0)


def chosen_bags(
    values: NDArray[Any], starts: Lengths, lengths: Lengths, dtype: Any = None
) -> NDArray[Any]:
    """The values of some bags, one bag after the other: a copy.

    Args:
        values: [n].
        starts: int64 [bags]: the place of each bag's first value.
        lengths: int64 [bags]: how many values it has.
        dtype: Dtype of the copy: int64 for values in 32 bits; None: theirs.
    """
    out = np.empty(int(lengths.sum()), dtype or values.dtype)
    if values.dtype.kind not in "iuf" or values.itemsize not in (4, 8):
        places = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
        return np.take(values, places + np.arange(len(out)), out=out)
    values, kernels = np.ascontiguousarray(values), static_kernels("chosen_bags")
    starts, lengths = np.ascontiguousarray(starts), np.ascontiguousarray(lengths)
    bags = address_of(values), address_of(starts), address_of(lengths), len(lengths)
    if out.itemsize > values.itemsize:
        kernels.widen(*bags, address_of(out))
    else:
        kernels.copy(*bags, values.itemsize // 4, address_of(out))
    return out


def _scales(lengths: Lengths, weights: Floats | None) -> Floats:
    """1 over the number of rows of each bag, or over the sum of their weights; 0 where that is 0."""
    totals: NDArray[np.float64] = lengths.astype(np.float64)
    if weights is not None:
        bags = np.repeat(np.arange(len(lengths)), lengths)
        totals = np.bincount(bags, weights, minlength=len(lengths)).astype(np.float64)
    return np.divide(1.0, totals, out=np.zeros_like(totals), where=totals != 0).astype(np.float32)
