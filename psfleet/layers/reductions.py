"""Sums, means and extremes."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

from psfleet.program.ops import reduce
from psfleet.program.variable import Variable, apply

__all__ = ["argmax", "mean", "reduce_max", "reduce_mean", "reduce_min", "reduce_sum", "sum", "sums"]

Dim = int | Sequence[int] | None


def _axes(dim: Dim) -> tuple[int, ...]:
    if dim is None:
        return ()
    return (dim,) if isinstance(dim, int) else tuple(dim)


def reduce_sum(
    input: Variable, dim: Dim = None, keep_dim: bool = False, name: str | None = None
) -> Variable:
    """The sum over the axes `dim`, all if None."""
    return apply(reduce.ReduceSum(_axes(dim), keep_dim), input, name=name)


def reduce_mean(
    input: Variable, dim: Dim = None, keep_dim: bool = False, name: str | None = None
) -> Variable:
    """The mean over the axes `dim`, all if None."""
    return apply(reduce.ReduceMean(_axes(dim), keep_dim), input, name=name)


def reduce_max(
    input: Variable, dim: Dim = None, keep_dim: bool = False, name: str | None = None
) -> Variable:
    """The largest value over the axes `dim`, all if None."""
    return apply(reduce.ReduceMax(_axes(dim), keep_dim), input, name=name)


def reduce_min(
    input: Variable, dim: Dim = None, keep_dim: bool = False, name: str | None = None
) -> Variable:
    """The smallest value over the axes `dim`, all if None."""
    return apply(reduce.ReduceMin(_axes(dim), keep_dim), input, name=name)


def mean(x: Variable, name: str | None = None) -> Variable:
    """The mean of all values, shape ()."""
    return apply(reduce.ReduceMean(), x, name=name)


def sum(x: Variable | Sequence[Variable]) -> Variable:
    """The sum of variables of one shape; of a single one, itself."""
    terms: list[Any] = [x] if isinstance(x, Variable) else list(x)
    total: Variable = functools.reduce(operator.add, terms)
    return total


def sums(input: Sequence[Variable], out: Any = None) -> Variable:
    """The sum of a list of variables."""
    return sum(input)


def argmax(x: Variable, axis: int = 0, name: str | None = None) -> Variable:
    """Where the largest value along an axis is, int64."""
    return apply(reduce.ArgMax(axis), x, name=name)
