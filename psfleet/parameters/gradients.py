"""Gradients as arrays or by rows: checked, scaled, made dense."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ShapeError
from psfleet.parameters.gradient_norms import merge_rows
from psfleet.parameters.parameter import Parameter, SparseGrad, as_numbers, check_rows
from psfleet.parameters.pooled_gradient import PooledGradient
from psfleet.runtime.interface import Gradient
from psfleet.runtime.validation import as_ids
from psfleet.schema.entry import ShowClickEntry, part_of

__all__ = ["Grad", "SparseElements", "check_gradient", "densify", "gradient_of", "scaled", "zeroed"]

Floats = NDArray[np.float32]
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
    merged = merge_rows(grad)
    dense = np.zeros(parameter.shape, np.float32)
    dense[merged.ids] = merged.rows
    return dense


def _pushed(grad: SparseGrad) -> Floats:
    """What travels of a sparse gradient beside its ids: float32 [n, dim], or [n, dim + 2] with scores."""
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
    """What the parameter's table counts of the gradient; None: it counts nothing."""
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
