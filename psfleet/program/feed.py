"""Checking what is fed to a program, before anything is computed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from psfleet.errors import IdError, ShapeError, UsageError
from psfleet.program.operation import Array
from psfleet.program.program import Program
from psfleet.program.shapes import same
from psfleet.program.variable import Variable

__all__ = ["batch_size", "check_feed", "whole_numbers"]


def check_feed(
    program: Program, needed: Sequence[Variable], feed: Mapping[str, Any]
) -> dict[Variable, Array]:
    """The fed arrays by variable, each in its variable's dtype.

    Raises:
        UsageError: One is missing, or its name is not that of the program's data.
        ShapeError: One has the wrong shape or cannot be converted.
        IdError: One should be whole numbers and is not.
    """
    for name in feed:
        variable = program.variables.get(name)
        if variable is None or not variable.is_data:
            wanted = [v.name for v in program.list_vars() if v.is_data]
            raise UsageError(
                f"feed {name!r} is not data of the program; it has {', '.join(wanted) or 'none'}"
            )
    missing = [variable.name for variable in needed if variable.name not in feed]
    if missing:
        raise UsageError(f"feed {missing[0]!r} is missing; the program needs it for these results")
    arrays = {}
    for name, value in feed.items():
        variable = program.variables[name]
        arrays[variable] = _array(variable, value)
    return arrays


def batch_size(program: Program, arrays: Mapping[Variable, Array]) -> int:
    """The number of samples: the first extent of the first fed variable that leaves it open."""
    for variable, array in arrays.items():
        if variable.shape and variable.shape[0] is None:
            return len(array)
    return next((len(array) for array in arrays.values() if array.ndim), 0)


def _array(variable: Variable, value: Any) -> Array:
    if isinstance(value, Variable):
        value = value.numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ShapeError(f"feed {variable.name!r} cannot be read as an array: {error}") from None
    if not same(array.shape, variable.shape):
        raise ShapeError(
            f"feed {variable.name!r} has shape {array.shape}, the program wants {variable.shape}"
        )
    if array.dtype == variable.dtype:
        return array
    if array.dtype.kind not in "fiub":
        raise ShapeError(
            f"feed {variable.name!r} has dtype {array.dtype}, the program wants {variable.dtype}"
        )
    if variable.dtype.kind == "i":
        return whole_numbers(f"feed {variable.name!r}", array).astype(variable.dtype, copy=False)
    return array.astype(variable.dtype)


def whole_numbers(what: str, array: Array) -> Array:
    """The array as int64.

    Raises:
        IdError: A value is fractional, NaN or does not fit 64 bits.
    """
    if array.dtype.kind in "ib":
        return array.astype(np.int64)
    if array.dtype.kind == "u":
        bad = array > np.iinfo(np.int64).max
    else:
        # float64 cannot hold 2**63 - 1; the first float that does not fit is 2**63 itself.
        with np.errstate(invalid="ignore"):
            bad = ~((array == np.floor(array)) & (array >= -(2.0**63)) & (array < 2.0**63))
    if bad.any():
        raise IdError(f"{what} must be whole numbers of 64 bits; one is {array[bad].flat[0]}")
    return array.astype(np.int64)
