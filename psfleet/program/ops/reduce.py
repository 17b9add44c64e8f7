"""Sums, means and extremes over axes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from psfleet.program.operation import Array, Context, Gradient, Op, Shape, Spec
from psfleet.program.ops.check import need_floats
from psfleet.program.shapes import axis_of

if TYPE_CHECKING:
    from psfleet.program.variable import Variable

__all__ = ["ArgMax", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"]


@dataclass(frozen=True)
class _Reduce(Op):
    """Over `axes`, all if empty."""

    axes: tuple[int, ...] = ()
    keep: bool = False

    def infer(self, x: "Variable") -> Spec:
        what = f"{type(self).__name__} of {x.name!r}"
        axes = {axis_of(axis, x.shape, what) for axis in self.axes or range(len(x.shape))}
        kept: list[int | None] = []
        for i, extent in enumerate(x.shape):
            if i not in axes:
                kept.append(extent)
            elif self.keep:
                kept.append(1)
        shape: Shape = tuple(kept)
        return shape, x.dtype

    def _axes(self, x: Array) -> tuple[int, ...]:
        return tuple(axis % x.ndim for axis in self.axes) or tuple(range(x.ndim))

    def _spread(self, gradient: Array, shape: tuple[int, ...]) -> Array:
        """Put the reduced axes back, each of extent 1."""
        axes = {axis % len(shape) for axis in self.axes} or set(range(len(shape)))
        return gradient.reshape([1 if i in axes else n for i, n in enumerate(shape)])


def _repeat(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Broadcast into memory of its own: BLAS refuses views whose rows overlap."""
    out = np.empty(shape, gradient.dtype)
    out[...] = gradient
    return out


class ReduceSum(_Reduce, saved="reduce_sum axes keep"):
    """The sum."""

    def forward(self, context: Context, x: Array) -> Array:
        context.save(x.shape)
        return np.asarray(x.sum(axis=self._axes(x), keepdims=self.keep, dtype=x.dtype))

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        (shape,) = context.saved
        return (_repeat(self._spread(gradient, shape), shape),)


class ReduceMean(_Reduce, saved="reduce_mean axes keep"):
    """The mean."""

    def infer(self, x: "Variable") -> Spec:
        need_floats("mean", x)
        return super().infer(x)

    def forward(self, context: Context, x: Array) -> Array:
        context.save(x.shape)
        if not x.size:  # a batch without samples: as NumPy's mean, without its warning
            total = x.sum(axis=self._axes(x), keepdims=self.keep)
            return np.full_like(total, np.nan)
        return np.asarray(x.mean(axis=self._axes(x), keepdims=self.keep, dtype=x.dtype))

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        (shape,) = context.saved
        count = max(np.prod(shape), 1) / max(gradient.size, 1)
        spread = self._spread(gradient, shape) / gradient.dtype.type(count)
        return (_repeat(spread, shape),)


class _Extreme(_Reduce):
    """The gradient is shared equally by the values that attain the extreme."""

    def _extreme(self, x: Array) -> Array:
        raise NotImplementedError

    def forward(self, context: Context, x: Array) -> Array:
        out = self._extreme(x)
        context.save(x == out)
        return (
            out
            if self.keep
            else out.reshape([n for i, n in enumerate(x.shape) if i not in self._axes(x)])
        )

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        (chosen,) = context.saved
        share = chosen.sum(axis=self._axes(chosen), keepdims=True, dtype=gradient.dtype)
        return (chosen * (self._spread(gradient, chosen.shape) / share),)


class ReduceMax(_Extreme, saved="reduce_max axes keep"):
    """The largest value."""

    def _extreme(self, x: Array) -> Array:
        return np.asarray(x.max(axis=self._axes(x), keepdims=True))


class ReduceMin(_Extreme, saved="reduce_min axes keep"):
    """The smallest value."""

    def _extreme(self, x: Array) -> Array:
        return np.asarray(x.min(axis=self._axes(x), keepdims=True))


@dataclass(frozen=True)
class ArgMax(Op, saved="arg_max axis"):
    """Where the largest value along an axis is; the first of equals."""

    axis: int = 0
    differentiable = False

    def infer(self, x: "Variable") -> Spec:
        axis = axis_of(self.axis, x.shape, f"argmax of {x.name!r}")
        return tuple(n for i, n in enumerate(x.shape) if i != axis), np.dtype(np.int64)

    def forward(self, context: Context, x: Array) -> Array:
        return np.asarray(x.argmax(axis=self.axis), dtype=np.int64)
