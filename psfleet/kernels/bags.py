"""Bags of rows: their sums or means, and the gradients of the rows. Bags of values: a choice of them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ShapeError
from psfleet.kernels.generate import static_kernels, width_kernels
from psfleet.kernels.initial_values import address_of

__all__ = ["chosen_bags", "pool_bags", "spread_gradient"]

Floats = NDArray[np.float32]
Lengths = NDArray[np.int64]


def pool_bags(
    rows: Floats, lengths: Lengths, weights: Floats | None = None, mean: bool = False
) -> Floats:
    """One row for each bag: the sum of its rows, added in order. An empty bag gives zeros.

    Args:
        rows: float32 [n, dim], those of the first bag, then those of the second one, ...
        lengths: int64 [bags]: how many rows each bag has; their sum is n.
        weights: float32 [n]: a factor on each row; None: 1.
        mean: Divide by the number of rows, or by the sum of their weights; 0 gives zeros.

    Returns:
        float32 [bags, dim]; `rows` itself where every bag has exactly one row and no weight.

    Raises:
        ShapeError: There are not as many rows as the lengths say.
    """
    if len(rows) != int(lengths.sum()):
        raise ShapeError(f"bags of {int(lengths.sum())} ids in all got {len(rows)} rows")
    if weights is None and _are_single(lengths, len(rows)):
        return rows
    out = np.zeros((len(lengths), rows.shape[1]), np.float32)
    _run("pool", rows, lengths, weights, mean, out)
    return out


def spread_gradient(
    gradient: Floats,
    lengths: Lengths,
    weights: Floats | None = None,
    mean: bool = False,
    out: Floats | None = None,
) -> Floats:
    """The gradient of each row, float32 [n, dim], from those of the bags, float32 [bags, dim].

    Args:
        gradient: Of the bags.
        lengths, weights, mean: As for `pool_bags`.
        out: Where to write it, float32 [n, dim]; None: a new array, or `gradient` itself where
            `pool_bags` returns `rows`.
    """
    count = int(lengths.sum())
    if weights is None and _are_single(lengths, count):
        if out is None:
            return gradient
        out[...] = gradient
        return out
    if out is None:
        out = np.empty((count, gradient.shape[1]), np.float32)
    _run("spread", gradient, lengths, weights, mean, out)
    return out


def chosen_bags(values: NDArray[Any], starts: Lengths, lengths: Lengths) -> NDArray[Any]:
    """The values of some bags, one bag after the other: a copy.

    Args:
        values: [n].
        starts: int64 [bags]: the place of each bag's first value.
        lengths: int64 [bags]: how many values it has.
    """
    count = int(lengths.sum())
    if values.dtype.kind not in "iuf" or values.itemsize not in (4, 8):
        places = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
        return values[places + np.arange(count)]
    values, out = np.ascontiguousarray(values), np.empty(count, values.dtype)
    static_kernels("chosen_bags").copy(
        address_of(values),
        address_of(np.ascontiguousarray(starts)),
        address_of(np.ascontiguousarray(lengths)),
        len(lengths),
        values.itemsize // 4,
        address_of(out),
    )
    return out


def _run(
    name: str, values: Floats, lengths: Lengths, weights: Floats | None, mean: bool, out: Floats
) -> None:
    values, ends = np.ascontiguousarray(values, np.float32), np.cumsum(lengths)
    factors = None if weights is None else np.ascontiguousarray(weights, np.float32)
    scales = _scales(lengths, factors) if mean else None
    getattr(width_kernels("bags", values.shape[1]), name)(
        address_of(values),
        address_of(ends),
        len(lengths),
        0 if factors is None else address_of(factors),
        0 if scales is None else address_of(scales),
        address_of(out),
    )


def _are_single(lengths: Lengths, count: int) -> bool:
    return len(lengths) == count and bool((lengths == 1).all())


def _scales(lengths: Lengths, weights: Floats | None) -> Floats:
    """1 over the number of rows of each bag, or over the sum of their weights; 0 where that is 0."""
    totals: NDArray[np.float64] = lengths.astype(np.float64)
    if weights is not None:
        bags = np.repeat(np.arange(len(lengths)), lengths)
        totals = np.bincount(bags, weights, minlength=len(lengths)).astype(np.float64)
    return np.divide(1.0, totals, out=np.zeros_like(totals), where=totals != 0).astype(np.float32)
