"""Elementwise operations with broadcasting, and operations that clip gradients.

Binary operations broadcast as NumPy does. If an input was repeated along an axis, its gradient is summed over
that axis (`unbroadcast`). An operation saves only the values that its backward pass will use. The operations
on gradients, at the end, are for the gradient clips of optimizers. They take sparse gradients by rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from psfleet.core.engine.gradients import SparseGrad, merge_rows
from psfleet.core.graph.parameters.gradient_norms import scaled_down, squared_norm
from psfleet.core.graph.program.operation import (
    Array,
    Context,
    Gradient,
    Op,
    Spec,
    broadcast,
    need_floats,
    need_one_dtype,
)

if TYPE_CHECKING:
    from psfleet.core.graph.program.variable import Variable


def unbroadcast(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Sum a gradient to the shape of its input, over the axes along which the input was repeated."""
    if gradient.shape == shape:
        return gradient
    extra = gradient.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        extra + i for i, n in enumerate(shape) if n == 1 and gradient.shape[extra + i] != 1
    )
    total: Array = gradient.sum(axis=axes).reshape(shape)
    return total


@dataclass(frozen=True)
class _Binary(Op):
    """Base of elementwise operations on two inputs of one dtype, with NumPy's broadcasting."""

    def infer(self, x: "Variable", y: "Variable") -> Spec:
        need_one_dtype(type(self).__name__, x, y)
        return broadcast(
            x.shape, y.shape, f"{type(self).__name__} of {x.name!r} and {y.name!r}"
        ), x.dtype


class Add(_Binary, saved="add"):
    """Elementwise x + y."""

    def forward(self, context: Context, x: Array, y: Array) -> Array:
        context.save(x.shape, y.shape)
        out: Array = x + y
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        return [
            unbroadcast(gradient, shape) if need else None
            for need, shape in zip(context.needs, context.saved, strict=True)
        ]


class Sub(_Binary, saved="sub"):
    """Elementwise x - y."""

    def forward(self, context: Context, x: Array, y: Array) -> Array:
        context.save(x.shape, y.shape)
        out: Array = x - y
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        x_shape, y_shape = context.saved
        return (
            unbroadcast(gradient, x_shape) if context.needs[0] else None,
            unbroadcast(-gradient, y_shape) if context.needs[1] else None,
        )


class Mul(_Binary, saved="mul"):
    """Elementwise x * y."""

    def forward(self, context: Context, x: Array, y: Array) -> Array:
        context.save(
            x.shape, y.shape, y if context.needs[0] else None, x if context.needs[1] else None
        )
        out: Array = x * y
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        x_shape, y_shape, y, x = context.saved
        return (
            unbroadcast(gradient * y, x_shape) if context.needs[0] else None,
            unbroadcast(gradient * x, y_shape) if context.needs[1] else None,
        )


class Div(_Binary, saved="div"):
    """Elementwise x / y."""

    def forward(self, context: Context, x: Array, y: Array) -> Array:
        context.save(x, y)
        out: Array = x / y
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        x, y = context.saved
        # The gradient of y is -g * x / y^2.
        part = gradient / y
        return (
            unbroadcast(part, x.shape) if context.needs[0] else None,
            unbroadcast(-part * (x / y), y.shape) if context.needs[1] else None,
        )


class _Choice(_Binary):
    """Base of max and min. The gradient goes to the chosen input, or to x if both are equal."""

    def _takes_x(self, x: Array, y: Array) -> Array:
        raise NotImplementedError

    def forward(self, context: Context, x: Array, y: Array) -> Array:
        takes_x = self._takes_x(x, y)
        context.save(takes_x, x.shape, y.shape)
        return np.where(takes_x, x, y)

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        takes_x, x_shape, y_shape = context.saved
        return (
            unbroadcast(gradient * takes_x, x_shape) if context.needs[0] else None,
            unbroadcast(gradient * ~takes_x, y_shape) if context.needs[1] else None,
        )


class Max(_Choice, saved="max"):
    """Larger value of x and y, elementwise."""

    def _takes_x(self, x: Array, y: Array) -> Array:
        return x >= y


class Min(_Choice, saved="min"):
    """Smaller value of x and y, elementwise."""

    def _takes_x(self, x: Array, y: Array) -> Array:
        return x <= y


class Pow(_Binary, saved="pow"):
    """Elementwise x ** y. The gradient of y is valid only for x > 0."""

    def forward(self, context: Context, x: Array, y: Array) -> Array:
        out: Array = x**y
        context.save(x, y, out)
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        x, y, out = context.saved
        return (
            unbroadcast(gradient * y * x ** (y - 1), x.shape) if context.needs[0] else None,
            unbroadcast(gradient * out * np.log(x), y.shape) if context.needs[1] else None,
        )


@dataclass(frozen=True)
class Unary(Op):
    """Base of operations on one float input, with an output of the same shape and dtype."""

    def infer(self, x: "Variable") -> Spec:
        need_floats(type(self).__name__, x)
        return x.shape, x.dtype


@dataclass(frozen=True)
class Scale(Unary, saved="scale factor offset"):
    """Computes factor * x + offset, for floats and whole numbers."""

    factor: float = 1.0
    offset: float = 0.0

    def infer(self, x: "Variable") -> Spec:
        return x.shape, x.dtype

    def forward(self, context: Context, x: Array) -> Array:
        out: Array = x * x.dtype.type(self.factor) if self.factor != 1 else x
        return out + x.dtype.type(self.offset) if self.offset else out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        return (gradient * gradient.dtype.type(self.factor) if self.factor != 1 else gradient,)


@dataclass(frozen=True)
class Power(Unary, saved="power factor"):
    """Computes x ** factor. The exponent is a fixed number of the operation, not an input."""

    factor: float = 1.0

    def forward(self, context: Context, x: Array) -> Array:
        context.save(x)
        out: Array = np.power(x, x.dtype.type(self.factor))
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        (x,) = context.saved
        kind = x.dtype.type
        return (gradient * (kind(self.factor) * np.power(x, kind(self.factor - 1))),)


class Exp(Unary, saved="exp"):
    """Exponential e ** x."""

    def forward(self, context: Context, x: Array) -> Array:
        out: Array = np.exp(x)
        context.save(out)
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        return (gradient * context.saved[0],)


class Log(Unary, saved="log"):
    """Natural logarithm."""

    def forward(self, context: Context, x: Array) -> Array:
        context.save(x)
        out: Array = np.log(x)
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        return (gradient / context.saved[0],)


class Sqrt(Unary, saved="sqrt"):
    """Square root."""

    def forward(self, context: Context, x: Array) -> Array:
        out: Array = np.sqrt(x)
        context.save(out)
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        return (gradient / (context.saved[0] * 2),)


class Square(Unary, saved="square"):
    """Square x * x."""

    def forward(self, context: Context, x: Array) -> Array:
        context.save(x)
        return x * x

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        return (gradient * (context.saved[0] * 2),)


class Abs(Unary, saved="abs"):
    """Absolute value. Its gradient at 0 is 0."""

    def forward(self, context: Context, x: Array) -> Array:
        context.save(x)
        return np.abs(x)

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        return (gradient * np.sign(context.saved[0]),)


class Sign(Unary, saved="sign"):
    """Sign of each value: -1, 0 or 1. No gradient flows through it."""

    differentiable = False

    def forward(self, context: Context, x: Array) -> Array:
        return np.sign(x)


@dataclass(frozen=True)
class Clip(Unary, saved="clip low high"):
    """Limits values to [low, high]. The gradient of values outside is 0."""

    low: float = 0.0
    high: float = 0.0

    def forward(self, context: Context, x: Array) -> Array:
        kind: Any = x.dtype.type
        low, high = kind(self.low), kind(self.high)
        context.save((x >= low) & (x <= high))
        return np.clip(x, low, high)

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        return (gradient * context.saved[0],)


@dataclass(frozen=True)
class _OfGradient(Op):
    """Base of operations whose first input is a gradient, dense or sparse.

    Rows of a repeated id are summed first, because a clip must apply to the whole gradient of a row.
    """

    differentiable = False
    by_rows = True

    def infer(self, *inputs: Any, **none: Any) -> Spec:
        gradient: Variable = inputs[0]
        return gradient.shape, gradient.dtype


@dataclass(frozen=True)
class BoundGradient(_OfGradient, saved="bound_gradient low high"):
    """Limits every component of a gradient to [low, high]."""

    low: float = 0.0
    high: float = 0.0

    def forward(self, context: Context, *inputs: Any, **none: Any) -> Any:
        bounds = np.float32(self.low), np.float32(self.high)
        return _with(inputs[0], lambda values: np.clip(values, *bounds))


@dataclass(frozen=True)
class GradientSquare(_OfGradient, saved="gradient_square"):
    """Squared L2 norm of a gradient, a single float64."""

    def infer(self, *inputs: Any, **none: Any) -> Spec:
        return (), np.dtype(np.float64)

    def forward(self, context: Context, *inputs: Any, **none: Any) -> Any:
        gradient = inputs[0]
        values = merge_rows(gradient).rows if isinstance(gradient, SparseGrad) else gradient
        return np.asarray(squared_norm(values))


@dataclass(frozen=True)
class ScaleGradient(_OfGradient, saved="scale_gradient norm"):
    """Clips a gradient by the global norm: multiplies it by norm / total if that factor is below 1.

    The first input is the gradient. The other inputs are squared norms from GradientSquare, and `total` is
    the square root of their sum.
    """

    norm: float = 1.0

    def forward(self, context: Context, *inputs: Any, **none: Any) -> Any:
        total = math.sqrt(sum(float(square) for square in inputs[1:]))
        return _with(inputs[0], lambda values: scaled_down(values, self.norm, total))


def _with(gradient: Gradient, change: Any) -> Gradient:
    """Apply a function to the values of a gradient: to an array, or to the merged rows of a SparseGrad."""
    if not isinstance(gradient, SparseGrad):
        values: Gradient = change(gradient)
        return values
    rows = merge_rows(gradient)
    return rows.with_rows(change(rows.rows))
