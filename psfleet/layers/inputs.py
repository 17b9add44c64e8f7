"""Sources of values: feeds and constants."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import DTypeLike

from psfleet.errors import UsageError
from psfleet.program.operation import dtype_of, extents
from psfleet.program.ops.source import FillConstant
from psfleet.program.program import default_main_program
from psfleet.program.variable import Variable, apply
from psfleet.validation.annotations import AnyNumber, checked

__all__ = ["data", "fill_constant", "ones", "zeros"]


@checked
def data(
    name: str,
    shape: Sequence[int | None],
    dtype: DTypeLike = "float32",
    lod_level: int = 0,
    stop_gradient: bool = True,
) -> Variable:
    """A variable that each run is fed.

    Args:
        name: Its key in the feed.
        shape: With the batch axis; None or -1 where only the feed decides.
        dtype: float32, or int64 for ids and labels.
        lod_level: Must be 0: psfleet has no nested sequences.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"the name of data is {name!r}; it must be a text")
    variable = Variable(name, extents(shape), dtype_of(dtype), stop_gradient=stop_gradient)
    variable.is_data = True
    default_main_program().add(variable)
    return variable


@checked
def fill_constant(
    shape: Sequence[int],
    dtype: DTypeLike,
    value: AnyNumber,
    force_cpu: bool = False,
    out: Any = None,
) -> Variable:
    """An array of one value."""
    return apply(FillConstant(tuple(shape), dtype_of(dtype).name, value))


@checked
def ones(shape: Sequence[int], dtype: DTypeLike = "float32") -> Variable:
    """An array of ones."""
    return fill_constant(shape, dtype, 1)


@checked
def zeros(shape: Sequence[int], dtype: DTypeLike = "float32") -> Variable:
    """An array of zeros."""
    return fill_constant(shape, dtype, 0)
