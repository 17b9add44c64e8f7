"""Reductions: sum, mean, max, min and argmax over axes, and pooling of padded sequences.

The gradient that arrives has the shape of the reduction's output. `_spread` adds the reduced axes to it with
extent 1, so that it broadcasts against the input.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError, ShapeError
from psfleet.core.graph.program.operation import (
    Array,
    Context,
    Gradient,
    Op,
    Shape,
    Spec,
    axis_of,
    need_floats,
    same,
)

if TYPE_CHECKING:
    from psfleet.core.graph.program.variable import Variable


POOLS = ("sum", "average", "sqrt", "max", "last", "first")
"""Ways to pool the n steps of a sequence: their sum, sum / n, sum / sqrt(n), the maximum of each column, or
the last or first step."""


@dataclass(frozen=True)
class _Reduce(Op):
    """Base of reductions over `axes`; empty means all axes. With `keep`, reduced axes stay with extent 1."""

    axes: tuple[int, ...] = ()
    keep: bool = False

    def infer(self, x: "Variable") -> Spec:
        operation_name = f"{type(self).__name__} of {x.name!r}"
        axes = {axis_of(axis, x.shape, operation_name) for axis in self.axes or range(len(x.shape))}
        extents: list[int | None] = []
        for i, extent in enumerate(x.shape):
            if i not in axes:
                extents.append(extent)
            elif self.keep:
                extents.append(1)
        shape: Shape = tuple(extents)
        return shape, x.dtype

    def _axes(self, x: Array) -> tuple[int, ...]:
        return tuple(axis % x.ndim for axis in self.axes) or tuple(range(x.ndim))

    def _spread(self, gradient: Array, shape: tuple[int, ...]) -> Array:
        axes = {axis % len(shape) for axis in self.axes} or set(range(len(shape)))
        return gradient.reshape([1 if i in axes else n for i, n in enumerate(shape)])


def _repeat(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Broadcast a gradient into new memory. BLAS does not accept broadcast views, whose rows overlap."""
    out = np.empty(shape, gradient.dtype)
    out[...] = gradient
    return out


class ReduceSum(_Reduce, saved="reduce_sum axes keep"):
    """Sum over axes."""

    def forward(self, context: Context, x: Array) -> Array:
        context.save(x.shape)
        return np.asarray(x.sum(axis=self._axes(x), keepdims=self.keep, dtype=x.dtype))

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        (shape,) = context.saved
        return (_repeat(self._spread(gradient, shape), shape),)


class ReduceMean(_Reduce, saved="reduce_mean axes keep"):
    """Mean over axes. A batch without samples gives NaN."""

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
        # Number of values in each mean. The bounds avoid a division by 0 for a batch without samples.
        count = max(np.prod(shape), 1) / max(gradient.size, 1)
        spread = self._spread(gradient, shape) / gradient.dtype.type(count)
        return (_repeat(spread, shape),)


class _Extreme(_Reduce):
    """Base of max and min. If several values attain the extreme, they share the gradient equally."""

    def _extreme(self, x: Array) -> Array:
        raise NotImplementedError

    def forward(self, context: Context, x: Array) -> Array:
        # The extreme has the reduced axes with extent 1, so it can be compared with x.
        out = self._extreme(x)
        context.save(x == out)
        return (
            out
            if self.keep
            else out.reshape([n for i, n in enumerate(x.shape) if i not in self._axes(x)])
        )

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        (extremes,) = context.saved
        share = extremes.sum(axis=self._axes(extremes), keepdims=True, dtype=gradient.dtype)
        return (extremes * (self._spread(gradient, extremes.shape) / share),)


class ReduceMax(_Extreme, saved="reduce_max axes keep"):
    """Largest value over axes."""

    def _extreme(self, x: Array) -> Array:
        return np.asarray(x.max(axis=self._axes(x), keepdims=True))


class ReduceMin(_Extreme, saved="reduce_min axes keep"):
    """Smallest value over axes."""

    def _extreme(self, x: Array) -> Array:
        return np.asarray(x.min(axis=self._axes(x), keepdims=True))


@dataclass(frozen=True)
class ArgMax(Op, saved="arg_max axis"):
    """Index of the largest value along an axis, int64. If several are equal, the index of the first."""

    axis: int = 0
    differentiable = False

    def infer(self, x: "Variable") -> Spec:
        axis = axis_of(self.axis, x.shape, f"argmax of {x.name!r}")
        return tuple(n for i, n in enumerate(x.shape) if i != axis), np.dtype(np.int64)

    def forward(self, context: Context, x: Array) -> Array:
        return np.asarray(x.argmax(axis=self.axis), dtype=np.int64)


@dataclass(frozen=True)
class SequencePool(Op, saved="sequence_pool pool pad_value masked"):
    """Pooling of padded sequences to one row each, [batch, ...].

    Inputs: x [batch, time, ...]. With `masked` also a mask [batch, time], otherwise optionally the lengths
    of the sequences, [batch] or [batch, 1].

    Steps outside a sequence have no effect, even if they are NaN. A sequence without steps gives
    `pad_value` and no gradient. If several values are the largest, the first gets the gradient.
    """

    pool: str = "sum"
    pad_value: float = 0.0
    masked: bool = False

    def __post_init__(self) -> None:
        if self.pool not in POOLS:
            raise ConfigError(f"pool_type is {self.pool!r}, use one of {', '.join(POOLS)}")

    def infer(self, *inputs: Any, **none: Any) -> Spec:
        x: Variable = inputs[0]
        need_floats("sequence_pool", x)
        if len(x.shape) < 2:
            raise ShapeError(
                f"sequence_pool of {x.name!r} {x.shape}: it must be [batch, time, ...]"
            )
        for lengths in inputs[1:]:
            self._check_lengths(x, lengths)
        return (x.shape[0], *x.shape[2:]), x.dtype

    def _check_lengths(self, x: "Variable", lengths: "Variable") -> None:
        batch, time = x.shape[:2]
        if self.masked and not same(lengths.shape, (batch, time)):
            raise ShapeError(
                f"sequence_pool of {x.name!r} {x.shape}: mask {lengths.name!r} is {lengths.shape}, "
                "it must be [batch, time]"
            )
        if not self.masked and not (
            same(lengths.shape, (batch,)) or same(lengths.shape, (batch, 1))
        ):
            raise ShapeError(
                f"sequence_pool of {x.name!r} {x.shape}: lengths {lengths.name!r} is {lengths.shape}, "
                "it must be [batch] or [batch, 1]"
            )
        if not self.masked and lengths.dtype.kind not in "iu":
            raise ShapeError(
                f"sequence_pool: lengths {lengths.name!r} have dtype {lengths.dtype}, they must be int64"
            )

    def forward(self, context: Context, *inputs: Any, **none: Any) -> Array:
        x = inputs[0]
        present = self._present(x, inputs[1:])
        count = present.sum(axis=1)
        context.save(x.shape, present, count, None)
        flat = np.where(
            present[:, :, None], x.reshape(*x.shape[:2], math.prod(x.shape[2:])), x.dtype.type(0)
        )
        if not x.shape[1]:
            out = np.zeros((x.shape[0], flat.shape[2]), x.dtype)
        elif self.pool in ("sum", "average", "sqrt"):
            out = flat.sum(axis=1, dtype=x.dtype) * self._share(count, x.dtype)[:, None]
        else:
            steps = self._chosen(flat, present)
            context.save(x.shape, present, count, steps)
            out = np.take_along_axis(flat, steps, axis=1)[:, 0]
        out[count == 0] = self.pad_value
        result: Array = out.reshape(x.shape[0], *x.shape[2:])
        return result

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        shape, present, count, steps = context.saved
        rows = gradient.reshape(shape[0], 1, math.prod(shape[2:]))
        out = np.zeros((*shape[:2], rows.shape[2]), gradient.dtype)
        if steps is None:
            share = self._share(count, gradient.dtype)[:, None, None]
            np.copyto(out, rows * share, where=present[:, :, None])
        else:
            gradients = np.where((count > 0)[:, None, None], rows, gradient.dtype.type(0))
            np.put_along_axis(out, steps, gradients, axis=1)
        return [out.reshape(shape), *(None for _ in context.record.inputs[1:])]

    def _present(self, x: Array, lengths_or_mask: Sequence[Array]) -> NDArray[np.bool_]:
        """Return a mask of the steps that belong to their sequence: [batch, time]."""
        batch, time = x.shape[:2]
        if not lengths_or_mask:
            return np.ones((batch, time), np.bool_)
        if self.masked:
            return np.asarray(lengths_or_mask[0] != 0)
        lengths = lengths_or_mask[0].reshape(-1)
        wrong = lengths[(lengths < 0) | (lengths > time)]
        if len(wrong):
            raise ShapeError(
                f"sequence_pool: a length is {wrong[0]}; sequences here have 0 to {time} steps"
            )
        return np.asarray(np.arange(time) < lengths[:, None])

    def _share(self, count: NDArray[np.int64], dtype: np.dtype[Any]) -> Array:
        """Return the factor that the sum of each sequence is multiplied by: 1, 1 / n or 1 / sqrt(n)."""
        some = np.maximum(count, 1).astype(dtype)
        if self.pool == "average":
            return np.asarray(1 / some)
        return np.asarray(1 / np.sqrt(some)) if self.pool == "sqrt" else np.ones_like(some)

    def _chosen(self, flat: Array, present: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the step that each value is taken from: [batch, 1, width]."""
        if self.pool == "max":
            # Steps outside a sequence must never be chosen, and they are 0 in `flat`.
            lowest = flat.dtype.type(-np.inf)
            return np.asarray(np.where(present[:, :, None], flat, lowest).argmax(axis=1)[:, None])
        last = present.shape[1] - 1 - present[:, ::-1].argmax(axis=1)
        step = last if self.pool == "last" else present.argmax(axis=1)
        return np.broadcast_to(step[:, None, None], (len(flat), 1, flat.shape[2]))
