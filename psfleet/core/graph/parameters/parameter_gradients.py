"""Checks a gradient against its parameter, and converts sparse gradients to arrays.

Optimizers call `check_gradient` for every gradient that a user passes in, before anything is pushed.
"""

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ShapeError
from psfleet.core.engine.gradient_checks import as_ids
from psfleet.core.engine.gradients import Grad, PooledGradient, SparseGrad, as_numbers, merge_rows
from psfleet.core.engine.schema.entry import ShowClickEntry, part_of
from psfleet.core.graph.parameters.parameter import Parameter, check_rows

Floats = NDArray[np.float32]


def densify(parameter: Parameter, grad: SparseGrad) -> Floats:
    """Return a sparse gradient as an array in the parameter's shape.

    Rows of a repeated id are summed in order.
    """
    check_rows(parameter, grad.ids)
    unique = merge_rows(grad)
    dense = np.zeros(parameter.shape, np.float32)
    dense[unique.ids] = unique.rows
    return dense


def _scores(parameter: Parameter, grad: SparseGrad) -> Floats | None:
    """Return the gradient's counts of shows and clicks, or None if the parameter's table has no such counts.

    Raises:
        ShapeError: The gradient has counts, but the table does not.
    """
    if part_of(parameter.entry, ShowClickEntry) is not None:
        return grad.counted()
    if grad.scores is not None:
        raise ShapeError(
            f"parameter {parameter.name!r} counts no shows and clicks, and its gradient has some; "
            "give it a ShowClickEntry"
        )
    return None


def check_gradient(parameter: Parameter, grad: Grad) -> Grad:
    """Check a user's gradient, and return it as float32: an array, or a SparseGrad.

    Raises:
        IdError: An id is no whole number, or not one of the parameter's rows.
        ShapeError: The gradient has another shape than the parameter.
    """
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
