"""The gradient of pooled rows."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ShapeError
from psfleet.core.engine.gradient_checks import as_ids
from psfleet.core.engine.interface import Gradient, PooledIds, joined_ids
from psfleet.core.engine.kernels.bags import spread_parts
from psfleet.core.engine.kernels.dedup import dedup
from psfleet.core.engine.schema.entry import ShowClickEntry, part_of
from psfleet.core.graph.parameters.parameter import Parameter, SparseGrad, as_numbers, check_rows

Floats = NDArray[np.float32]


class PooledGradient(SparseGrad):
    """The gradient of what was pooled of rows; the rows' own ones are made when they are asked for.

    Args:
        of: The ids and their bags.
        values: float32 [all bags, dim].
    """

    __slots__ = ("_rows", "of", "values")

    of: PooledIds
    values: Floats
    _rows: Floats | None

    def __init__(self, of: PooledIds, values: Floats) -> None:
        parts = {"of": of, "values": values, "ids": of.ids, "scores": None, "_rows": None}
        for name, value in parts.items():
            object.__setattr__(self, name, value)

    @property
    def rows(self) -> Floats:
        """A gradient for each id, float32 [n, dim]."""
        if self._rows is None:
            object.__setattr__(self, "_rows", spread_parts(self.values, self.of.parts))
        assert self._rows is not None
        return self._rows


def joined_gradients(parts: Sequence[PooledGradient]) -> PooledGradient:
    """Their sum: the bags of all, one after the other."""
    of = joined_ids([part.of for part in parts])
    return PooledGradient(of, np.concatenate([part.values for part in parts]))


def merge_rows(grad: SparseGrad) -> SparseGrad:
    """The same gradient with each id once; the rows of a repeated id are summed in order."""
    unique = dedup(grad.ids, 1)
    scores = None if grad.scores is None else unique.merge(grad.scores)[0]
    return SparseGrad(unique.unique[0], unique.merge(grad.rows)[0], scores)


Gather = Callable[[list[str], list[float]], list[float]]
_gather: Gather | None = None


@contextlib.contextmanager
def gathering(gather: Gather) -> Iterator[None]:
    """Inside the block global norms are over more parameters than are clipped here.

    Args:
        gather: Function that turns the names and squared norms here into the squared norms of all.
    """
    global _gather
    before, _gather = _gather, gather
    try:
        yield
    finally:
        _gather = before


def gathered_squares(names: list[str], squares: list[float]) -> list[float]:
    """The squared norms of all parameters: those here, and within `gathering` those elsewhere too."""
    return squares if _gather is None else _gather(names, squares)


def squared_norm(values: Floats) -> float:
    """The squared norm, summed in float64 so that it does not depend on the array's layout."""
    return float(np.sum(np.square(values, dtype=np.float64)))


def scaled_down(values: Floats, clip_norm: float, norm: float) -> Floats:
    """The values times clip_norm / norm where their norm is above clip_norm."""
    return values * np.float32(clip_norm / norm) if norm > clip_norm else values


Ids = NDArray[np.int64]
Grad = Floats | SparseGrad


@dataclass(frozen=True, slots=True)
class SparseElements:
    """A dense gradient that is zero but for some values.

    Attributes:
        positions: int64 [k], ascending: places in the flattened array.
        values: float32 [k].
    """

    positions: Ids
    values: Floats


def scaled(grad: Grad, factor: float) -> Grad:
    """The gradient times a number."""
    if isinstance(grad, SparseGrad):
        return grad.with_rows(grad.rows * np.float32(factor))
    return grad * np.float32(factor)


def zeroed(grad: Grad | None) -> Grad | None:
    """A gradient of zeros of the same kind; None of None."""
    if isinstance(grad, SparseGrad):
        return SparseGrad(np.empty(0, np.int64), np.empty((0, grad.rows.shape[1]), np.float32))
    return None if grad is None else np.zeros_like(grad)


def densify(parameter: Parameter, grad: SparseGrad) -> Floats:
    """The array that a sparse gradient stands for; repeated ids are summed in order."""
    check_rows(parameter, grad.ids)
    unique = merge_rows(grad)
    dense = np.zeros(parameter.shape, np.float32)
    dense[unique.ids] = unique.rows
    return dense


def _pushed(grad: SparseGrad) -> Floats:
    """Return the values of a sparse gradient: float32 [n, dim], or [n, dim + 2] with scores."""
    return grad.rows if grad.scores is None else np.concatenate([grad.rows, grad.scores], axis=1)


def gradient_of(table: int, grad: Grad | SparseElements, rate: float) -> Gradient:
    """The gradient as a push to the table of this key takes it."""
    if isinstance(grad, SparseElements):
        return Gradient(table, grad.values, grad.positions, rate)
    if isinstance(grad, PooledGradient):
        return Gradient(table, grad.values, grad.ids, rate, bags=grad.of.parts)
    if isinstance(grad, SparseGrad):
        return Gradient(table, _pushed(grad), grad.ids, rate)
    return Gradient(table, grad, None, rate)


def _scores(parameter: Parameter, grad: SparseGrad) -> Floats | None:
    """Return the parameter table's counts of the gradient; None: it counts nothing."""
    if part_of(parameter.entry, ShowClickEntry) is not None:
        return grad.counted()
    if grad.scores is not None:
        raise ShapeError(
            f"parameter {parameter.name!r} counts no shows and clicks, and its gradient has some; "
            "give it a ShowClickEntry"
        )
    return None


def check_gradient(parameter: Parameter, grad: Grad) -> Grad:
    """The gradient as float32 in a shape that fits the parameter."""
    if isinstance(grad, SparseGrad):
        ids = as_ids(grad.ids, f"parameter {parameter.name!r}")
        check_rows(parameter, ids)
        if isinstance(grad, PooledGradient):
            return grad
        if grad.rows.shape[1:] != tuple(parameter.shape[1:]):
            raise ShapeError(
                f"parameter {parameter.name!r} has rows of {parameter.shape[1:]}, "
                f"the gradient has rows of {grad.rows.shape[1:]}"
            )
        return SparseGrad(ids, np.asarray(grad.rows, np.float32), _scores(parameter, grad))
    dense = as_numbers(grad, f"the gradient of parameter {parameter.name!r}")
    dense = dense.astype(np.float32, copy=False)
    if dense.shape != tuple(parameter.shape):
        raise ShapeError(
            f"parameter {parameter.name!r} has shape {tuple(parameter.shape)}, "
            f"the gradient has {dense.shape}"
        )
    return dense
