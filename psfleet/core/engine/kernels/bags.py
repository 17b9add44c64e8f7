"""Pooling: sum or mean of the rows of each bag, the backward pass of both, and selection of bags of values.

A bag is the list of ids that one example has for a feature. Rows of a batch's bags are one array, those of
the first bag first, and `lengths` says where each bag ends. Compiled kernels do the arithmetic, in float32
and in order, so the bits are the same everywhere.
"""

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
    """Division of n rows into bags.

    Args:
        lengths: Number of rows of each bag, int64 [bags].
        weights: Factor on each row, float32 [n], or None for factors of 1.
        mean: True to divide each sum by the number of its rows, or by the sum of their weights. A divisor of
        0
            gives zeros.

    Attributes:
        rows: Number of rows of all bags, n.
        are_rows: True if every bag is exactly one row without weight, so that pooling changes nothing.
    """

    def __init__(self, lengths: Lengths, weights: Floats | None = None, mean: bool = False) -> None:
        self.lengths, self.weights = lengths, weights
        self._mean = mean

    def __len__(self) -> int:
        """Return the number of bags."""
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
        """Return whether both pool rows in the same way."""
        if self._mean != other._mean or not np.array_equal(self.lengths, other.lengths):
            return False
        if self.weights is None or other.weights is None:
            return self.weights is other.weights
        return np.array_equal(self.weights, other.weights)

    def copy(self) -> "RowBags":
        """Return equal bags with arrays of their own."""
        weights = None if self.weights is None else self.weights.copy()
        return RowBags(self.lengths.copy(), weights, self._mean)

    def pool(self, rows: Floats) -> Floats:
        """Pool rows: one row for each bag, the sum of its rows in order. An empty bag gives zeros.

        Args:
            rows: Rows of all bags, float32 [n, dim].

        Returns:
            float32 [bags, dim]. It is `rows` itself if `are_rows` is true.

        Raises:
            ShapeError: The number of rows is not the sum of the lengths.
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
        """Compute the gradients of the rows, float32 [n, dim], from those of the bags (backward of `pool`).

        Args:
            gradient: Gradients of the bags, float32 [bags, dim].
            out: Array to write to, or None for a new one. Then the result is `gradient` itself if `are_rows`
            is
                true.
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
        """Arguments of kernels: ends, number of bags, weights, scales. Valid as long as this object."""
        weights = None if self.weights is None else np.ascontiguousarray(self.weights, np.float32)
        scales = _scales(self.lengths, weights) if self._mean else None
        self._factors = weights, scales
        first, second = (0 if array is None else address_of(array) for array in self._factors)
        return address_of(self._ends), len(self), first, second


def pool_parts(rows: Floats, parts: Sequence[RowBags]) -> Floats:
    """Pool the rows of one table for several features; return float32 [all bags, dim]."""
    ends = np.cumsum([part.rows for part in parts])[:-1]
    pairs = zip(parts, np.split(rows, ends), strict=True)
    return np.concatenate([part.pool(own) for part, own in pairs])


def spread_parts(gradient: Floats, parts: Sequence[RowBags]) -> Floats:
    """Compute the rows' gradients, float32 [n, dim], from those of all bags (backward of `pool_parts`)."""
    ends = np.cumsum([len(part) for part in parts])[:-1]
    pairs = zip(parts, np.split(gradient, ends), strict=True)
    return np.concatenate([part.spread(own) for part, own in pairs])


def bags_at(offsets: Lengths, rows: Lengths) -> tuple[Lengths, Lengths]:
    """Return the starts and lengths of selected bags, for `chosen_bags`.

    Args:
        offsets: Position of the first value of each bag, and the end: int64 [all bags + 1].
        rows: Numbers of the selected bags, int64 [bags]. They are not checked.
    """
    rows = np.ascontiguousarray(rows)
    starts, lengths = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    static_kernels("chosen_bags").choose(
        address_of(offsets), address_of(rows), len(rows), address_of(starts), address_of(lengths)
    )
    return starts, lengths


def narrowed(values: NDArray[np.int64], out: NDArray[np.int32]) -> bool:
    """Copy int64 to int32 of the same length; return False if a value does not fit and `out` is undefined."""
    values = np.ascontiguousarray(values)
    kernels = static_kernels("chosen_bags")
    return bool(kernels.narrow(address_of(values), len(values), address_of(out)) == 0)


def chosen_bags(
    values: NDArray[Any], starts: Lengths, lengths: Lengths, dtype: Any = None
) -> NDArray[Any]:
    """Copy the values of selected bags, one bag after the other.

    Args:
        values: Values of all bags, [n].
        starts: Position of the first value of each selected bag, int64 [bags].
        lengths: Number of values of each selected bag, int64 [bags].
        dtype: Dtype of the copy: int64 to widen int32, or None for that of the values.
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
    """Return 1 / number of rows of each bag, or 1 / sum of their weights; 0 if the divisor is 0."""
    totals: NDArray[np.float64] = lengths.astype(np.float64)
    if weights is not None:
        bags = np.repeat(np.arange(len(lengths)), lengths)
        totals = np.bincount(bags, weights, minlength=len(lengths)).astype(np.float64)
    return np.divide(1.0, totals, out=np.zeros_like(totals), where=totals != 0).astype(np.float32)
