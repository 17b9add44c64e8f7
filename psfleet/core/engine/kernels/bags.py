"""Pooling of embedding bags: sum or mean of the rows of each bag, the backward pass, and selection of bags.

A bag is the list of ids that one sample has for a feature. The rows of all bags of a batch are one array, bag
after bag, and `lengths` has the number of rows of each bag:

    lengths    2        0    3
    rows       r0  r1        r2  r3  r4        float32 [5, dim]
    pooled     r0 + r1  0    r2 + r3 + r4      float32 [3, dim]

`RowBags` pools rows of tables; `bags_at` and `chosen_bags` select the bags of a batch from the values of a
dataset. Compiled kernels do the arithmetic (sources/row_sums.py, chosen_bags.py), in float32 and in the order
of the rows, so the bits are the same on every machine.
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
    """Division of n rows into bags. A bag is the rows of one feature in one sample, which are pooled.

    Args:
        lengths: Number of rows of each bag, int64 [bags].
        weights: Factor on each row, float32 [n], or None for factors of 1.
        mean: True to divide each sum by the number of its rows, or by the sum of their weights. A divisor of
            0 gives zeros.

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
        """Return whether both pool alike: same lengths, same weights, and both sum or both average."""
        if self._mean != other._mean or not np.array_equal(self.lengths, other.lengths):
            return False
        if self.weights is None or other.weights is None:
            return self.weights is other.weights
        return np.array_equal(self.weights, other.weights)

    def copy(self) -> "RowBags":
        """Return equal bags with copies of the arrays, so that later changes of the originals do nothing."""
        weights = None if self.weights is None else self.weights.copy()
        return RowBags(self.lengths.copy(), weights, self._mean)

    def pool(self, rows: Floats) -> Floats:
        """Return one row for each bag: the sum or mean of its rows, added in order. An empty bag gives zeros.

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
            out: Contiguous array to write to, float32 [n, dim], or None for a new array. With None, the
                result is `gradient` itself if `are_rows` is true.
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
    def scales(self) -> Floats | None:
        """Factor that turns each bag's sum into its mean, float32 [bags], or None if bags are summed."""
        return _scales(self.lengths, self.weights) if self._mean else None

    @functools.cached_property
    def arguments(self) -> tuple[int, int, int, int]:
        """Arguments of kernels: address of the ends, number of bags, addresses of the weights and the scales.

        An address is 0 if there are no weights or scales. The addresses are valid as long as this object
        lives.
        """
        weights = None if self.weights is None else np.ascontiguousarray(self.weights, np.float32)
        self._factors = weights, self.scales  # keeps the arrays alive: kernels only have addresses
        first, second = (0 if array is None else address_of(array) for array in self._factors)
        return address_of(self._ends), len(self), first, second


def joined_bags(parts: Sequence[RowBags]) -> RowBags:
    """Return the bags of several features as one division. Their rows have no weights."""
    joined = RowBags(np.concatenate([part.lengths for part in parts]))
    if any(part.scales is not None for part in parts):
        scales = [np.ones(len(p), np.float32) if p.scales is None else p.scales for p in parts]
        joined.scales = np.concatenate(scales)
    return joined


def pool_parts(rows: Floats, parts: Sequence[RowBags]) -> Floats:
    """Pool the rows of one table for several features; return float32 [all bags, dim].

    Args:
        rows: Rows of all bags of the first feature, then of the second, and so on: float32 [n, dim].
        parts: For each feature, the division of its rows into bags.
    """
    ends = np.cumsum([part.rows for part in parts])[:-1]
    pairs = zip(parts, np.split(rows, ends), strict=True)
    return np.concatenate([part.pool(part_rows) for part, part_rows in pairs])


def spread_parts(gradient: Floats, parts: Sequence[RowBags]) -> Floats:
    """Compute the rows' gradients, float32 [n, dim], from those of all bags (backward of `pool_parts`)."""
    ends = np.cumsum([len(part) for part in parts])[:-1]
    pairs = zip(parts, np.split(gradient, ends), strict=True)
    return np.concatenate([part.spread(part_gradient) for part, part_gradient in pairs])


def bags_at(offsets: Lengths, rows: Lengths) -> tuple[Lengths, Lengths]:
    """Return the starts and lengths of selected bags, int64 [bags] each, as `chosen_bags` takes them.

    A bag is the values of one feature in one sample.

    Args:
        offsets: Index of the first value of each bag, and the end of the last: int64 [all bags + 1],
            contiguous.
        rows: Numbers of the selected bags, int64 [bags]. They are not checked: a number out of range reads
            other memory.
    """
    rows = np.ascontiguousarray(rows)
    starts, lengths = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    static_kernels("chosen_bags").choose(
        address_of(offsets), address_of(rows), len(rows), address_of(starts), address_of(lengths)
    )
    return starts, lengths


def narrowed(values: NDArray[np.int64], out: NDArray[np.int32]) -> bool:
    """Copy int64 to int32 of the same length, and return whether all values fit.

    Returns:
        False if a value does not fit into 32 bits; `out` is then undefined.
    """
    values = np.ascontiguousarray(values)
    kernels = static_kernels("chosen_bags")
    return bool(kernels.narrow(address_of(values), len(values), address_of(out)) == 0)


def chosen_bags(
    values: NDArray[Any], starts: Lengths, lengths: Lengths, dtype: Any = None
) -> NDArray[Any]:
    """Copy the values of selected bags into one new array, one bag after the other.

    A bag is the values of one feature in one sample.

    Args:
        values: Values of all bags, [n].
        starts: Index in `values` of each selected bag's first value, int64 [bags].
        lengths: Number of values of each selected bag, int64 [bags].
        dtype: Dtype of the copy: int64 to widen int32, or None for the dtype of the values.
    """
    out = np.empty(int(lengths.sum()), dtype or values.dtype)
    if values.dtype.kind not in "iuf" or values.itemsize not in (4, 8):
        # Kernels copy words of 4 bytes. Other dtypes are copied by NumPy, with the position in `values` of
        # each position i of the copy:
        #
        #     i + (start of its bag in `values`) - (start of its bag in the copy)
        shifts = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
        return np.take(values, shifts + np.arange(len(out)), out=out)
    values, kernels = np.ascontiguousarray(values), static_kernels("chosen_bags")
    starts, lengths = np.ascontiguousarray(starts), np.ascontiguousarray(lengths)
    bags = address_of(values), address_of(starts), address_of(lengths), len(lengths)
    if out.itemsize > values.itemsize:
        kernels.widen(*bags, address_of(out))
    else:
        kernels.copy(*bags, values.itemsize // 4, address_of(out))
    return out


def _scales(lengths: Lengths, weights: Floats | None) -> Floats:
    """Return for each bag the factor that turns its sum into its mean, float32 [bags].

    The factor is 1 / number of rows, or 1 / sum of their weights, computed in float64. It is 0 if the divisor
    is 0.
    """
    totals: NDArray[np.float64] = lengths.astype(np.float64)
    if weights is not None:
        bags = np.repeat(np.arange(len(lengths)), lengths)
        totals = np.bincount(bags, weights, minlength=len(lengths)).astype(np.float64)
    return np.divide(1.0, totals, out=np.zeros_like(totals), where=totals != 0).astype(np.float32)
