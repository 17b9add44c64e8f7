"""Checks of the arguments that a script passes to a runtime: ids, gradients, initial values and reductions.

Both runtimes make these checks before anything is sent, so that the error message is about the script's own
mistake. The checks also convert ids to int64 and gradients to contiguous float32. NaN and infinity are found
in non_finite_check.py.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError, IdError, ShapeError, UsageError
from psfleet.core.engine.device_arrays import DeviceSums
from psfleet.core.engine.kernels.bags import RowBags
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import TableSpec

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Reduction = Literal["sum", "max", "min"]
CheckedGradient = tuple[TableSpec, Gradient, Floats, Ids | None]

_EMPTY = np.zeros(0, np.float32)
_FLOAT32 = np.dtype(np.float32)
_INT64 = np.dtype(np.int64)  # comparing a dtype with a type instead takes six times as long


def as_float32(gradient: Any) -> Floats:
    """Return the gradient as contiguous float32.

    Values beyond float32 become infinite (found by NonFiniteCheck).
    """
    # Without the context manager below, which takes a microsecond.
    if getattr(gradient, "dtype", None) == _FLOAT32:
        return np.asarray(gradient, np.float32, order="C")
    with np.errstate(over="ignore"):
        return np.asarray(gradient, np.float32, order="C")


def exact_below(dtype: np.dtype[Any]) -> float:
    """Return the number below which this float type represents all whole numbers: 2**53 for float64."""
    return float(2 / np.finfo(dtype).eps)


def as_ids(ids: Any, owner: str) -> Ids:
    """Return the ids as int64, in any shape.

    Args:
        ids: Ids from the script.
        owner: Name of their table, for messages.

    Raises:
        IdError: The ids are not whole numbers, or are unsigned numbers beyond int64.
    """
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError) as error:
        raise IdError(f"{owner}: ids cannot be read as an array: {error}") from None
    if array.dtype == _INT64:
        return array
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind in "iu":
        if int(array.max()) >= 2**63:
            raise IdError(
                f"{owner}: id {int(array.max())} is beyond int64; view the array as int64"
            )
        return array.astype(np.int64)
    if array.dtype.kind == "f":
        bad = array[~(np.isfinite(array) & (array == np.floor(array)))]
        if bad.size:
            raise IdError(
                f"{owner}: id {float(bad.flat[0])!r} is not a whole number; ids are int64"
            )
        # A larger float may be the rounded value of several integers, so the id may not be the intended one.
        bad = array[np.abs(array) >= exact_below(array.dtype)]
        if bad.size:
            raise IdError(
                f"{owner}: id {float(bad.flat[0])!r} is a float that may have been another id; keep ids as "
                "integers from where they come"
            )
    if array.dtype.kind == "U":
        raise IdError(
            f"{owner}: ids are texts, such as {str(array.flat[0])!r}; hash them: psfleet.features.hashed(ids)"
        )
    raise IdError(f"{owner}: ids have dtype {array.dtype}; convert them to int64")


def check_ids(spec: TableSpec, ids: Ids | None) -> Ids:
    """Return the ids of a pull or push of a sparse table as int64 in any shape.

    Raises:
        ShapeError: There are no ids.
        IdError: The ids are not whole numbers, or are unsigned numbers beyond int64.
    """
    if ids is None:
        raise ShapeError(f"table {spec.name!r} is sparse; a pull from it needs ids")
    if type(ids) is np.ndarray and ids.dtype == _INT64:
        return ids
    return as_ids(ids, spec.label)


def check_reduction(mode: str) -> None:
    """Raise UsageError unless `all_reduce` has this mode."""
    if mode not in get_args(Reduction):
        raise UsageError(f"all_reduce mode is {mode!r}; it must be sum, max or min")


def check_gradients(
    spec_of: Callable[[int], TableSpec], gradients: Sequence[Gradient]
) -> list[CheckedGradient]:
    """Check the gradients of one push; return each with its table's definition, and values and ids to send.

    Values are contiguous: flat for a dense table, [n, push_width] for a sparse one. In a table that counts
    shows and clicks, a gradient without these counts means one show and no click for each id.

    Raises:
        UsageError: A table has two gradients, or a gradient does not fit its table.
    """
    tables: set[int] = set()
    parts = []
    for gradient in gradients:
        spec = spec_of(gradient.table)
        if spec.key in tables:
            raise UsageError(f"a push names {spec.label} twice; sum its gradients first")
        tables.add(spec.key)
        parts.append(_checked(spec, gradient))
    return parts


def _checked(spec: TableSpec, gradient: Gradient) -> CheckedGradient:
    values = gradient.values
    if isinstance(values, DeviceSums):
        if gradient.precision == "float32" and gradient.scale == 1.0:
            return spec, gradient, values, gradient.ids
        ids = np.asarray(gradient.ids)
        gradient = dataclasses.replace(gradient, values=np.asarray(values), ids=ids)
        values = gradient.values
    if (
        values.__class__ is not np.ndarray
        or values.dtype != _FLOAT32
        or not values.flags.c_contiguous
    ):
        values = as_float32(values)
    if gradient.precision != "float32" or gradient.scale != 1.0:
        _check_precision(spec, gradient)
    if spec.kind == "dense":
        if gradient.ids is not None:
            ids = as_ids(gradient.ids, spec.label)
            check_elements(spec, values, ids, spec.size)
            return spec, gradient, values, ids
        if values.shape != spec.shape:
            raise ShapeError(
                f"table {spec.name!r} has shape {spec.shape}, the gradient has {values.shape}"
            )
        return spec, gradient, values.reshape(-1), None
    if gradient.ids is None:
        raise ShapeError(f"table {spec.name!r} is sparse; a gradient for it needs ids")
    ids = check_ids(spec, gradient.ids)
    if gradient.bags is not None:
        _check_bags(spec, gradient.bags, values, ids)
        if not spec.pushed_scores:
            return spec, gradient, values, ids
        gradient = gradient.spread()
        values = gradient.values
    if spec.pushed_scores and values.shape == (ids.size, spec.dim):
        counts = np.broadcast_to(np.array([1, 0], np.float32), (ids.size, spec.pushed_scores))
        values = np.concatenate([values, counts], axis=1)
    if ids.ndim != 1 or values.shape != (len(ids), spec.push_width):
        raise ShapeError(
            f"table {spec.name!r} has rows of {spec.dim}; the gradient has "
            f"{values.shape} for ids {ids.shape}, it must be [n, {spec.dim}] for [n]"
        )
    return spec, gradient, values, ids


def _check_bags(spec: TableSpec, bags: Sequence[RowBags], values: Floats, ids: Ids) -> None:
    """Raise ShapeError unless there is one gradient for each bag, and the bags together have all the ids.

    A bag is a group of ids whose rows are pooled.
    """
    shape, rows = (sum(map(len, bags)), spec.dim), sum(part.rows for part in bags)
    if values.shape != shape or ids.shape != (rows,):
        raise ShapeError(
            f"table {spec.name!r}: the gradient has {values.shape} for {shape[0]} bags of {rows} ids and "
            f"ids {ids.shape}; it must be {shape} for [{rows}]"
        )


def _check_precision(spec: TableSpec, gradient: Gradient) -> None:
    if gradient.precision not in ("float32", "bfloat16", "float16"):
        raise ConfigError(
            f"table {spec.name!r}: precision is {gradient.precision!r}; it must be "
            "float32, bfloat16 or float16"
        )
    if spec.kind == "sparse" and spec.pushed_scores and gradient.precision != "float32":
        raise ConfigError(
            f"table {spec.name!r} counts shows and clicks, which {gradient.precision} would round; "
            "send its gradients as float32 (without amp)"
        )
    if not 2.0**-126 <= gradient.scale < 2.0**127:
        raise ConfigError(
            f"table {spec.name!r}: scale is {gradient.scale!r}; it must be a number "
            "between 2^-126 and 2^127"
        )


def check_elements(spec: TableSpec, values: Floats, positions: Ids, count: int) -> None:
    """Raise an error unless a gradient of single elements of a dense table is well-formed.

    Its `positions` in the flattened array must ascend, be below `count`, and be as many as the values.
    """
    if positions.ndim != 1 or values.shape != positions.shape:
        raise ShapeError(
            f"table {spec.name!r} is dense; the gradient has {values.shape} for positions "
            f"{positions.shape}, both must be [k]"
        )
    if not positions.size:
        return
    if (descents := np.flatnonzero(np.diff(positions) <= 0)).size:
        raise IdError(
            f"table {spec.name!r}: position {positions[descents[0] + 1]} comes after "
            f"{positions[descents[0]]}; positions of a dense gradient must ascend"
        )
    low, high = int(positions[0]), int(positions[-1])
    if low < 0 or high >= count:
        raise IdError(
            f"table {spec.name!r} has positions 0 to {count - 1} here; "
            f"{low if low < 0 else high} is not one of them"
        )


def check_spec_value(spec: TableSpec, value: Floats | None) -> Floats:
    """Return the initial values of a dense table, flattened, or an empty array for a sparse table.

    Raises:
        ShapeError: The value does not fit the table.
    """
    if spec.kind == "sparse":
        if value is not None:
            raise ShapeError(f"table {spec.name!r} is sparse; its rows start from the initializer")
        return _EMPTY
    if value is None or value.shape != spec.shape:
        raise ShapeError(
            f"table {spec.name!r} has shape {spec.shape}; "
            f"its first value has {None if value is None else value.shape}"
        )
    return np.ascontiguousarray(value, np.float32).reshape(-1)
