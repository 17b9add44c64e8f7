"""Layers that reduce a variable: sums, means, largest and smallest values, and `argmax`.

`dim` is an axis, several axes, or None for all axes; a reduced axis disappears unless `keep_dim` is True.
`sum` and `sums` add several variables of one shape instead.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

from psfleet.core.base.errors import ShapeError
from psfleet.core.base.validation.annotations import checked
from psfleet.core.graph.program.ops import reduce
from psfleet.core.graph.program.variable import Variable, apply

__all__ = ["argmax", "mean", "reduce_max", "reduce_mean", "reduce_min", "reduce_sum", "sum", "sums"]

Dim = int | Sequence[int] | None


def _axes(dim: Dim) -> tuple[int, ...]:
    if dim is None:
        return ()
    return (dim,) if isinstance(dim, int) else tuple(dim)


@checked
def reduce_sum(
    input: Variable, dim: Dim = None, keep_dim: bool = False, name: str | None = None
) -> Variable:
    """Return the sum over the axes `dim`, or over all axes if `dim` is None."""
    return apply(reduce.ReduceSum(_axes(dim), keep_dim), input, name=name)


@checked
def reduce_mean(
    input: Variable, dim: Dim = None, keep_dim: bool = False, name: str | None = None
) -> Variable:
    """Return the mean over the axes `dim`, or over all axes if `dim` is None."""
    return apply(reduce.ReduceMean(_axes(dim), keep_dim), input, name=name)


@checked
def reduce_max(
    input: Variable, dim: Dim = None, keep_dim: bool = False, name: str | None = None
) -> Variable:
    """Return the largest value over the axes `dim`, or over all axes if `dim` is None."""
    return apply(reduce.ReduceMax(_axes(dim), keep_dim), input, name=name)


@checked
def reduce_min(
    input: Variable, dim: Dim = None, keep_dim: bool = False, name: str | None = None
) -> Variable:
    """Return the smallest value over the axes `dim`, or over all axes if `dim` is None."""
    return apply(reduce.ReduceMin(_axes(dim), keep_dim), input, name=name)


@checked
def mean(x: Variable, name: str | None = None) -> Variable:
    """Return the mean of all elements of x, shape ()."""
    return apply(reduce.ReduceMean(), x, name=name)


@checked
def sum(x: Variable | Sequence[Variable]) -> Variable:
    """Return the elementwise sum of variables of the same shape. A single variable is returned unchanged."""
    terms: list[Any] = [x] if isinstance(x, Variable) else list(x)
    if not terms:
        raise ShapeError("sum of no variables: name at least one")
    total: Variable = functools.reduce(operator.add, terms)
    return total


@checked
def sums(input: Sequence[Variable], out: Any = None) -> Variable:
    """Return the elementwise sum of a list of variables of the same shape."""
    return sum(input)


@checked
def argmax(x: Variable, axis: int = 0, name: str | None = None) -> Variable:
    """Return the index of the largest value along an axis, int64."""
    return apply(reduce.ArgMax(axis), x, name=name)
