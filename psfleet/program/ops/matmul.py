"""Products of matrices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from psfleet.errors import ShapeError
from psfleet.program.operation import (
    Array,
    Context,
    Gradient,
    Op,
    Spec,
    broadcast,
    need_floats,
    same,
    size_of,
)
from psfleet.program.ops.arithmetic import unbroadcast

if TYPE_CHECKING:
    from psfleet.program.variable import Variable


def _swap(x: Any) -> Any:
    return x.swapaxes(-1, -2)


@dataclass(frozen=True)
class MatMul(Op, saved="matmul transpose_x transpose_y"):
    """x @ y over the last two axes, each possibly transposed; leading axes broadcast.

    A vector on the left is a row, on the right a column, as in NumPy.
    """

    transpose_x: bool = False
    transpose_y: bool = False

    def infer(self, x: "Variable", y: "Variable") -> Spec:
        need_floats("matmul", x, y)
        left, right = x.shape, y.shape
        if len(left) < 1 or len(right) < 1:
            raise ShapeError(
                f"matmul of {x.name!r} {left} and {y.name!r} {right}: both need an axis"
            )
        if self.transpose_x and len(left) > 1:
            left = (*left[:-2], left[-1], left[-2])
        if self.transpose_y and len(right) > 1:
            right = (*right[:-2], right[-1], right[-2])
        inner = right[-2] if len(right) > 1 else right[-1]
        if not same((left[-1],), (inner,)):
            raise ShapeError(
                f"matmul of {x.name!r} {left} and {y.name!r} {right}: "
                f"the inner extents {left[-1]} and {inner} differ"
            )
        leading = broadcast(left[:-2], right[:-2], f"matmul of {x.name!r} and {y.name!r}")
        rows = (left[-2],) if len(left) > 1 else ()
        columns = (right[-1],) if len(right) > 1 else ()
        return (*leading, *rows, *columns), x.dtype

    def forward(self, context: Context, x: Array, y: Array) -> Array:
        products = context.products.suited(x, y)
        x, y = products.factor(x), products.factor(y)
        context.save(products, x, y)
        left = _swap(x) if self.transpose_x and x.ndim > 1 else x
        right = _swap(y) if self.transpose_y and y.ndim > 1 else y
        return products.multiply(left, right)

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        products, x, y = context.saved
        left = x[None, :] if x.ndim == 1 else x
        right = y[:, None] if y.ndim == 1 else y
        if x.ndim == 1:
            gradient = gradient[..., None, :] if y.ndim > 1 else gradient[..., None]
        if y.ndim == 1:
            gradient = gradient[..., None]
        gradient = products.factor(gradient)
        flip_x, flip_y = self.transpose_x and x.ndim > 1, self.transpose_y and y.ndim > 1
        dx = dy = None
        if context.needs[0]:
            dx = products.multiply(gradient, right if flip_y else _swap(right))
            dx = unbroadcast(_swap(dx) if flip_x else dx, left.shape).reshape(x.shape)
        if context.needs[1]:
            dy = products.multiply(left if flip_x else _swap(left), gradient)
            dy = unbroadcast(_swap(dy) if flip_y else dy, right.shape).reshape(y.shape)
        return dx, dy


@dataclass(frozen=True)
class Affine(Op, saved="affine axes relu"):
    """relu?(flatten(x) @ w + b): a fully connected layer in one pass over the output.

    x [a, ..., c, ...] is taken as a matrix whose rows are its first `axes` axes; w is [in, out], b
    [out] and may be left out.
    """

    axes: int = 1
    relu: bool = False

    def infer(self, x: "Variable", w: "Variable", b: "Variable | None" = None) -> Spec:
        need_floats("fc", x, w)
        inner = size_of(x.shape[self.axes :])
        if len(w.shape) != 2 or not same((inner,), w.shape[:1]):
            raise ShapeError(
                f"fc of {x.name!r} {x.shape} has {inner} inputs, "
                f"but its weights {w.name!r} are {w.shape}"
            )
        if b is not None and not same(b.shape, w.shape[1:]):
            raise ShapeError(
                f"fc of {x.name!r} has {w.shape[1]} outputs, but its bias {b.name!r} is {b.shape}"
            )
        return (*x.shape[: self.axes], w.shape[1]), x.dtype

    def forward(self, context: Context, x: Array, w: Array, b: Array | None = None) -> Array:
        flat = x.reshape(-1, w.shape[0])
        products = context.products.suited(flat, w)
        flat, w = products.factor(flat), products.factor(w)
        out = products.multiply(flat, w)
        if b is not None:
            out += b
        if self.relu:
            np.maximum(out, 0, out=out)
        needs_x, needs_w = context.needs[:2]
        context.save(
            products,
            x.shape,
            flat if needs_w else None,
            w if needs_x else None,
            out if self.relu else None,
        )
        return out.reshape(*x.shape[: self.axes], w.shape[1])

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        products, shape, flat, w, out = context.saved
        gradient = gradient.reshape(-1, gradient.shape[-1])
        if out is not None:
            gradient = gradient * (out > 0)
        factor = products.factor(gradient)
        parts: list[Gradient | None] = [
            products.multiply(factor, w.T).reshape(shape) if context.needs[0] else None,
            products.multiply(flat.T, factor) if context.needs[1] else None,
        ]
        if len(context.needs) > 2:
            parts.append(gradient.sum(axis=0) if context.needs[2] else None)
        return parts
