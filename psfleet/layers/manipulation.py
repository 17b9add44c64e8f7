"""Layers without parameters that reshape, split, concatenate, select and convert variables.

Arguments and results are those of Paddle. Functions that NumPy has under the same name give the same results.
"""

import builtins
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from psfleet.core.base.errors import ShapeError
from psfleet.core.base.validation.annotations import PositiveInt, checked
from psfleet.core.graph.program.operation import axis_of, dtype_of
from psfleet.core.graph.program.ops import manipulate
from psfleet.core.graph.program.variable import Variable, apply
from psfleet.layers.activations import activate

__all__ = [
    "cast",
    "concat",
    "expand",
    "flatten",
    "gather",
    "one_hot",
    "reshape",
    "slice",
    "split",
    "squeeze",
    "stack",
    "transpose",
    "unsqueeze",
]


@checked
def concat(input: Sequence[Variable], axis: int = 0, name: str | None = None) -> Variable:
    """Concatenate variables along an existing axis.

        both = layers.concat([a, b], axis=1)  # [n, 3] and [n, 5] give [n, 8]

    Other axes must have equal extents.
    """
    return apply(manipulate.Concat(axis), *input, name=name)


@checked
def split(
    input: Variable, num_or_sections: int | Sequence[int], dim: int = -1, name: str | None = None
) -> list[Variable]:
    """Split a variable along an axis, and return a list of the parts.

        left, right = layers.split(x, [3, -1], dim=1)  # [n, 8] gives [n, 3] and [n, 5]

    Args:
        input: Variable to split.
        num_or_sections: Number of equal parts, or list of the parts' extents, of which one may be -1.
        dim: Axis.
        name: Name of the operation.
    """
    axis = axis_of(dim, input.shape, f"split of {input.name!r}")
    extent = input.shape[axis]
    if extent is None:
        raise ShapeError(
            f"split of {input.name!r} {input.shape}: the extent of axis {axis} is unknown"
        )
    widths = _widths(extent, num_or_sections)
    if builtins.sum(widths) != extent or any(width < 0 for width in widths):
        raise ShapeError(
            f"split of {input.name!r}: axis {axis} has extent {extent}, it cannot be "
            f"split into {num_or_sections}"
        )
    edges = [0, *np.cumsum(widths).tolist()]
    return [
        apply(manipulate.Slice((axis,), (start,), (end,)), input, name=name)
        for start, end in pairwise(edges)
    ]


def _widths(extent: int, parts: int | Sequence[int]) -> list[int]:
    if isinstance(parts, int):
        return [extent // parts] * parts if parts > 0 else []
    known_width = builtins.sum(width for width in parts if width >= 0)
    return [extent - known_width if width == -1 else width for width in parts]


@checked
def stack(x: Sequence[Variable], axis: int = 0) -> Variable:
    """Stack variables of the same shape along a new axis."""
    return apply(manipulate.Stack(axis), *([x] if isinstance(x, Variable) else x))


@checked
def reshape(
    x: Variable,
    shape: Sequence[int],
    actual_shape: Any = None,
    act: str | None = None,
    inplace: bool = False,
    name: str | None = None,
) -> Variable:
    """Change the shape.

        pairs = layers.reshape(x, [0, -1, 2])  # [n, 8] gives [n, 4, 2]

    In `shape`, -1 is computed from the other extents, and 0 keeps x's extent at this axis.
    """
    if isinstance(actual_shape, Variable):
        raise ShapeError("reshape: actual_shape is a variable; only known shapes are available")
    target = tuple(-1 if extent is None else int(extent) for extent in shape)
    out = apply(manipulate.Reshape(target), x, name=name if act is None else None)
    return activate(out, act, name)


@checked
def flatten(x: Variable, axis: int = 1, name: str | None = None) -> Variable:
    """Flatten to a matrix. The axes before `axis` become its rows, the axes from `axis` on its columns."""
    width = 1
    for extent in x.shape[axis:]:
        width = -1 if extent is None or width == -1 else width * extent
    rows = 1 if axis == 0 else -1
    if width == -1 and rows == -1:
        raise ShapeError(f"flatten of {x.name!r} {x.shape} at axis {axis}: the width is unknown")
    return apply(manipulate.Reshape((rows, width)), x, name=name)


@checked
def squeeze(input: Variable, axes: Sequence[int] = (), name: str | None = None) -> Variable:
    """Remove the given axes, which must have extent 1. Without `axes`, remove all axes of extent 1."""
    removed_axes = {axis_of(axis, input.shape, f"squeeze of {input.name!r}") for axis in axes} or {
        i for i, extent in enumerate(input.shape) if extent == 1
    }
    if any(input.shape[axis] != 1 for axis in removed_axes):
        raise ShapeError(
            f"squeeze of {input.name!r} {input.shape}: axes {sorted(removed_axes)} are not all 1"
        )
    return _to(input, [n for i, n in enumerate(input.shape) if i not in removed_axes], name)


@checked
def unsqueeze(input: Variable, axes: int | Sequence[int], name: str | None = None) -> Variable:
    """Insert axes of extent 1. `axes` are the positions of the new axes in the result."""
    positions = [axes] if isinstance(axes, int) else list(axes)
    rank = input.ndim + len(positions)
    new_axes = {axis_of(axis, [None] * rank, f"unsqueeze of {input.name!r}") for axis in positions}
    extents = iter(input.shape)
    return _to(input, [1 if i in new_axes else next(extents) for i in range(rank)], name)


def _to(x: Variable, shape: Sequence[int | None], name: str | None) -> Variable:
    if list(shape).count(None) > 1:
        raise ShapeError(f"{x.name!r} {x.shape} has more than one unknown extent")
    return apply(manipulate.Reshape(tuple(-1 if n is None else n for n in shape)), x, name=name)


@checked
def transpose(x: Variable, perm: Sequence[int], name: str | None = None) -> Variable:
    """Reorder the axes: axis i of the result is axis perm[i] of x."""
    return apply(manipulate.Transpose(tuple(perm)), x, name=name)


@checked
def slice(
    input: Variable, axes: Sequence[int], starts: Sequence[int], ends: Sequence[int]
) -> Variable:
    """Return input[starts[i]:ends[i]] along each axis axes[i]. Negative bounds count from the end."""
    return apply(manipulate.Slice(tuple(axes), tuple(starts), tuple(ends)), input)


@checked
def gather(input: Variable, index: Variable, overwrite: bool = True) -> Variable:
    """Return the rows of `input` at the int64 indices `index` [m] or [m, 1]."""
    return apply(manipulate.Gather(), input, index)


@checked
def cast(x: Variable, dtype: DTypeLike) -> Variable:
    """Convert to another dtype."""
    return apply(manipulate.Cast(dtype_of(dtype).name), x)


@checked
def one_hot(input: Variable, depth: PositiveInt, allow_out_of_range: bool = False) -> Variable:
    """Return float32 [..., depth] with 1 at the position of each number of `input` [..., 1] or [...], else
    0."""
    return apply(manipulate.OneHot(int(depth), allow_out_of_range), input)


@checked
def expand(x: Variable, expand_times: Sequence[PositiveInt], name: str | None = None) -> Variable:
    """Repeat x expand_times[i] times along axis i, as numpy.tile does.

        twice = layers.expand(x, [1, 2])  # [n, 4] gives [n, 8]

    `expand_times` needs a number for each axis.
    """
    return apply(manipulate.Expand(tuple(expand_times)), x, name=name)
