"""Operations that move values without arithmetic: constants, reshape, transpose, cast, concat, slice, gather.

Each operation checks shapes when the program is built, as far as extents are known. Ids and indices are
checked when it runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from psfleet.core.base.errors import IdError, ShapeError
from psfleet.core.graph.program.operation import (
    Array,
    Context,
    Gradient,
    Op,
    Shape,
    Spec,
    axis_of,
    need_one_dtype,
    same,
    scatter_rows,
    size_of,
)

if TYPE_CHECKING:
    from psfleet.core.graph.program.variable import Variable


@dataclass(frozen=True)
class FillConstant(Op, saved="fill shape dtype value"):
    """Array that is filled with one value."""

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    value: float = 0.0
    differentiable = False

    def infer(self) -> Spec:
        return self.shape, np.dtype(self.dtype)

    def forward(self, context: Context) -> Array:
        return np.full(self.shape, self.value, self.dtype)


@dataclass(frozen=True)
class StepCounter(Op, saved="step_counter"):
    """Number of training runs of the program so far, including this one, int64 [1]."""

    differentiable = False

    def infer(self) -> Spec:
        return (1,), np.dtype(np.int64)

    def forward(self, context: Context) -> Array:
        return np.array([context.program.step + 1], np.int64)


@dataclass(frozen=True)
class PerRun(Op):
    """Value of a function of the number of training runs before this one, float32 [1].

    Used for learning rates.
    """

    value: Callable[[int], float] = float
    differentiable = False

    def infer(self) -> Spec:
        return (1,), np.dtype(np.float32)

    def forward(self, context: Context) -> Array:
        return np.array([self.value(context.program.step)], np.float32)


@dataclass(frozen=True)
class Reshape(Op, saved="reshape shape"):
    """Changes the shape.

    An extent -1 is computed from the number of values, and 0 copies the input's extent.
    """

    shape: tuple[int, ...] = ()

    def infer(self, x: "Variable") -> Spec:
        target: list[int | None] = []
        for i, extent in enumerate(self.shape):
            if extent == 0 and i >= len(x.shape):
                raise ShapeError(
                    f"reshape of {x.name!r} {x.shape} to {self.shape}: "
                    f"there is no extent {i} to copy"
                )
            target.append(x.shape[i] if extent == 0 else None if extent == -1 else extent)
        if self.shape.count(-1) > 1 or any(extent < -1 for extent in self.shape):
            raise ShapeError(f"reshape of {x.name!r} to {self.shape}: only one extent may be -1")
        self._check_target(x, target)
        return tuple(target), x.dtype

    def _check_target(self, x: "Variable", target: list[int | None]) -> None:
        """Compute the extent for -1 if the input's size is known. Raises an error if the shape cannot fit."""
        # An unknown extent that 0 copies is on both sides, so it is left out of both sizes.
        copies = [i for i, extent in enumerate(self.shape) if extent == 0 and x.shape[i] is None]
        size = size_of(tuple(n for i, n in enumerate(x.shape) if i not in copies))
        target_size = size_of(
            tuple(1 if i in copies or self.shape[i] == -1 else n for i, n in enumerate(target))
        )
        if size is None or target_size is None:
            return
        if -1 in self.shape and target_size and size % target_size == 0:
            target[self.shape.index(-1)] = size // target_size
        elif size != target_size:
            raise ShapeError(
                f"reshape of {x.name!r} {x.shape} to {self.shape}: {size} values do not fill it"
            )

    def forward(self, context: Context, x: Array) -> Array:
        context.save(x.shape)
        return x.reshape([x.shape[i] if n == 0 else n for i, n in enumerate(self.shape)])

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        return (gradient.reshape(context.saved[0]),)


@dataclass(frozen=True)
class Transpose(Op, saved="transpose order"):
    """Puts the axes in another order."""

    order: tuple[int, ...] = ()

    def infer(self, x: "Variable") -> Spec:
        if sorted(self.order) != list(range(len(x.shape))):
            raise ShapeError(
                f"transpose of {x.name!r} {x.shape}: {self.order} is not an order of its axes"
            )
        return tuple(x.shape[axis] for axis in self.order), x.dtype

    def forward(self, context: Context, x: Array) -> Array:
        return x.transpose(self.order)

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        return (gradient.transpose(np.argsort(self.order)),)


@dataclass(frozen=True)
class Cast(Op, saved="cast dtype"):
    """Converts values to another dtype. Conversion to whole numbers drops the fraction."""

    dtype: str = "float32"

    def infer(self, x: "Variable") -> Spec:
        return x.shape, np.dtype(self.dtype)

    def forward(self, context: Context, x: Array) -> Array:
        context.save(x.dtype)
        return x.astype(self.dtype, copy=False)

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        (dtype,) = context.saved
        return (gradient.astype(dtype, copy=False) if dtype.kind == "f" else None,)


@dataclass(frozen=True)
class Concat(Op, saved="concat axis"):
    """Joins inputs along an axis."""

    axis: int = 0

    def infer(self, *inputs: Any, **none: Any) -> Spec:
        if not inputs:
            raise ShapeError("concat needs at least one input")
        first = inputs[0]
        need_one_dtype("concat", *inputs)
        axis = axis_of(self.axis, first.shape, f"concat of {first.name!r}")
        shape = list(first.shape)
        for x in inputs[1:]:
            other_extents = [n for i, n in enumerate(x.shape) if i != axis]
            if len(x.shape) != len(shape) or not same(
                tuple(other_extents), tuple(n for i, n in enumerate(shape) if i != axis)
            ):
                raise ShapeError(
                    f"concat along axis {axis} of {first.name!r} {first.shape} and "
                    f"{x.name!r} {x.shape}: the other extents differ"
                )
            extent, added_extent = shape[axis], x.shape[axis]
            shape = [a if a is not None else b for a, b in zip(shape, x.shape, strict=True)]
            shape[axis] = None if extent is None or added_extent is None else extent + added_extent
        return tuple(shape), first.dtype

    def forward(self, context: Context, *inputs: Any, **none: Any) -> Array:
        context.save([x.shape[self.axis] for x in inputs])
        return np.concatenate(inputs, axis=self.axis)

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        (widths,) = context.saved
        return np.split(gradient, np.cumsum(widths)[:-1], axis=self.axis)


@dataclass(frozen=True)
class Stack(Op, saved="stack axis"):
    """Stacks inputs of one shape along a new axis."""

    axis: int = 0

    def infer(self, *inputs: Any, **none: Any) -> Spec:
        if not inputs:
            raise ShapeError("stack needs at least one input")
        first = inputs[0]
        need_one_dtype("stack", *inputs)
        for x in inputs[1:]:
            if not same(first.shape, x.shape):
                raise ShapeError(
                    f"stack of {first.name!r} {first.shape} and {x.name!r} "
                    f"{x.shape}: the shapes differ"
                )
        axis = axis_of(self.axis, (*first.shape, None), f"stack of {first.name!r}")
        shape: Shape = (*first.shape[:axis], len(inputs), *first.shape[axis:])
        return shape, first.dtype

    def forward(self, context: Context, *inputs: Any, **none: Any) -> Array:
        return np.stack(inputs, axis=self.axis)

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        return list(np.moveaxis(gradient, self.axis, 0))


@dataclass(frozen=True)
class Slice(Op, saved="slice axes starts ends"):
    """Takes the slice x[starts[i]:ends[i]] along each axes[i]. Negative bounds count from the end."""

    axes: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    def infer(self, x: "Variable") -> Spec:
        if not len(self.axes) == len(self.starts) == len(self.ends):
            raise ShapeError(
                f"slice of {x.name!r}: axes {self.axes}, starts {self.starts} and "
                f"ends {self.ends} have different lengths"
            )
        shape = list(x.shape)
        for axis, start, end in zip(self.axes, self.starts, self.ends, strict=True):
            axis = axis_of(axis, x.shape, f"slice of {x.name!r}")
            extent = shape[axis]
            if extent is not None:
                shape[axis] = len(range(extent)[start:end])
        return tuple(shape), x.dtype

    def _where(self, rank: int) -> tuple[slice, ...]:
        parts = [slice(None)] * rank
        for axis, start, end in zip(self.axes, self.starts, self.ends, strict=True):
            parts[axis] = slice(start, end)
        return tuple(parts)

    def forward(self, context: Context, x: Array) -> Array:
        context.save(x.shape)
        out: Array = x[self._where(x.ndim)]
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        (shape,) = context.saved
        out = np.zeros(shape, gradient.dtype)
        out[self._where(len(shape))] = gradient
        return (out,)


@dataclass(frozen=True)
class Gather(Op, saved="gather"):
    """Takes rows of x [n, ...] at indices [m] or [m, 1]. The result is [m, ...]."""

    def infer(self, x: "Variable", index: "Variable") -> Spec:
        if index.dtype.kind not in "iu":
            raise IdError(f"gather: index {index.name!r} has dtype {index.dtype}, it must be int64")
        if len(index.shape) > 2 or (len(index.shape) == 2 and index.shape[1] != 1):
            raise ShapeError(
                f"gather: index {index.name!r} is {index.shape}, it must be [m] or [m, 1]"
            )
        return (index.shape[0] if index.shape else 1, *x.shape[1:]), x.dtype

    def forward(self, context: Context, x: Array, index: Array) -> Array:
        flat = index.reshape(-1)
        if flat.size and not (flat.min() >= 0 and flat.max() < len(x)):
            raise IdError(
                f"gather: indices are {flat.min()} to {flat.max()}, "
                f"there are rows 0 to {len(x) - 1}"
            )
        context.save(flat, x.shape)
        out: Array = x[flat]
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        flat, shape = context.saved
        return scatter_rows(flat, gradient, shape), None


@dataclass(frozen=True)
class OneHot(Op, saved="one_hot depth allow_out_of_range"):
    """Converts whole numbers [...] or [..., 1] to float32 [..., depth]: 1 at the number, 0 elsewhere."""

    depth: int = 1
    allow_out_of_range: bool = False
    differentiable = False

    def infer(self, x: "Variable") -> Spec:
        if x.dtype.kind not in "iu":
            raise IdError(f"one_hot of {x.name!r} needs whole numbers, not {x.dtype}")
        leading = x.shape[:-1] if x.shape and x.shape[-1] == 1 else x.shape
        return (*leading, self.depth), np.dtype(np.float32)

    def forward(self, context: Context, x: Array) -> Array:
        if x.ndim and x.shape[-1] == 1:
            x = x[..., 0]
        inside = self.allow_out_of_range or not x.size
        if not inside and not (x.min() >= 0 and x.max() < self.depth):
            raise IdError(f"one_hot: values are {x.min()} to {x.max()}, depth is {self.depth}")
        return np.equal(x[..., None], np.arange(self.depth)).astype(np.float32)


@dataclass(frozen=True)
class Expand(Op, saved="expand times"):
    """Repeats values along each axis, `times[i]` times along axis i."""

    times: tuple[int, ...] = ()

    def infer(self, x: "Variable") -> Spec:
        if len(self.times) != len(x.shape):
            raise ShapeError(f"expand of {x.name!r} {x.shape} has {len(self.times)} factors")
        return tuple(
            None if n is None else n * t for n, t in zip(x.shape, self.times, strict=True)
        ), x.dtype

    def forward(self, context: Context, x: Array) -> Array:
        context.save(x.shape)
        return np.tile(x, self.times)

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        (shape,) = context.saved
        # Split each axis into (copies, extent), and sum over the copies.
        pairs = [n for pair in zip(self.times, shape, strict=True) for n in pair]
        return (gradient.reshape(pairs).sum(axis=tuple(range(0, len(pairs), 2))),)
