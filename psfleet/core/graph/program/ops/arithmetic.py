"""Elementwise arithmetic with broadcasting, and clips of gradients."""

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
    """Sum a gradient over the axes along which its input was repeated."""
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
    """Two inputs, aligned at their last axes."""

    def infer(self, x: "Variable", y: "Variable") -> Spec:
        need_one_dtype(type(self).__name__, x, y)
        return broadcast(
            x.shape, y.shape, f"{type(self).__name__} of {x.name!r} and {y.name!r}"
        ), x.dtype


class Add(_Binary, saved="add"):
    """x + y."""

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
    """x - y."""

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
    """x * y."""

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
    """x / y."""

    def forward(self, context: Context, x: Array, y: Array) -> Array:
        context.save(x, y)
        out: Array = x / y
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        x, y = context.saved
        part = gradient / y
        return (
            unbroadcast(part, x.shape) if context.needs[0] else None,
            unbroadcast(-part * (x / y), y.shape) if context.needs[1] else None,
        )


class _Choice(_Binary):
    """Max and Min: the gradient goes to the chosen one, to x where they are equal."""

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
    """The larger of x and y."""

    def _takes_x(self, x: Array, y: Array) -> Array:
        return x >= y


class Min(_Choice, saved="min"):
    """The smaller of x and y."""

    def _takes_x(self, x: Array, y: Array) -> Array:
        return x <= y


class Pow(_Binary, saved="pow"):
    """x ** y, for x > 0 where y needs a gradient."""

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
    """One input, an output of the same shape and dtype."""

    def infer(self, x: "Variable") -> Spec:
        need_floats(type(self).__name__, x)
        return x.shape, x.dtype


@dataclass(frozen=True)
class Scale(Unary, saved="scale factor offset"):
    """factor * x + offset, for floats and whole numbers."""

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
    """x ** factor, for a fixed exponent."""

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
    """e ** x."""

    def forward(self, context: Context, x: Array) -> Array:
        out: Array = np.exp(x)
        context.save(out)
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        return (gradient * context.saved[0],)


class Log(Unary, saved="log"):
    """The natural logarithm."""

    def forward(self, context: Context, x: Array) -> Array:
        context.save(x)
        out: Array = np.log(x)
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        return (gradient / context.saved[0],)


class Sqrt(Unary, saved="sqrt"):
    """The square root."""

    def forward(self, context: Context, x: Array) -> Array:
        out: Array = np.sqrt(x)
        context.save(out)
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        return (gradient / (context.saved[0] * 2),)


class Square(Unary, saved="square"):
    """x * x."""

    def forward(self, context: Context, x: Array) -> Array:
        context.save(x)
        return x * x

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        return (gradient * (context.saved[0] * 2),)


class Abs(Unary, saved="abs"):
    """The absolute value; its gradient at 0 is 0."""

    def forward(self, context: Context, x: Array) -> Array:
        context.save(x)
        return np.abs(x)

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        return (gradient * np.sign(context.saved[0]),)


class Sign(Unary, saved="sign"):
    """-1, 0 or 1; its gradient is 0."""

    differentiable = False

    def forward(self, context: Context, x: Array) -> Array:
        return np.sign(x)


@dataclass(frozen=True)
class Clip(Unary, saved="clip low high"):
    """x limited to [low, high]; the gradient is 0 outside."""

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
    """The first input is a gradient; of one by rows those of a repeated id are summed first."""

    differentiable = False
    by_rows = True

    def infer(self, *inputs: Any, **none: Any) -> Spec:
        gradient: Variable = inputs[0]
        return gradient.shape, gradient.dtype


@dataclass(frozen=True)
class BoundGradient(_OfGradient, saved="bound_gradient low high"):
    """Every component within [low, high]."""

    low: float = 0.0
    high: float = 0.0

    def forward(self, context: Context, *inputs: Any, **none: Any) -> Any:
        bounds = np.float32(self.low), np.float32(self.high)
        return _with(inputs[0], lambda values: np.clip(values, *bounds))


@dataclass(frozen=True)
class GradientSquare(_OfGradient, saved="gradient_square"):
    """The squared L2 norm, float64 []."""

    def infer(self, *inputs: Any, **none: Any) -> Spec:
        return (), np.dtype(np.float64)

    def forward(self, context: Context, *inputs: Any, **none: Any) -> Any:
        gradient = inputs[0]
        values = merge_rows(gradient).rows if isinstance(gradient, SparseGrad) else gradient
        return np.asarray(squared_norm(values))


@dataclass(frozen=True)
class ScaleGradient(_OfGradient, saved="scale_gradient norm"):
    """Scaled down by norm / sqrt(sum of the squares, the other inputs), where that is below 1."""

    norm: float = 1.0

    def forward(self, context: Context, *inputs: Any, **none: Any) -> Any:
        total = math.sqrt(sum(float(square) for square in inputs[1:]))
        return _with(inputs[0], lambda values: scaled_down(values, self.norm, total))


def _with(gradient: Gradient, change: Any) -> Gradient:
    if not isinstance(gradient, SparseGrad):
        values: Gradient = change(gradient)
        return values
    rows = merge_rows(gradient)
    return rows.with_rows(change(rows.rows))
