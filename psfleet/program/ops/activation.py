"""Activations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from psfleet.program.operation import Array, Context, Gradient, Spec
from psfleet.program.ops.arithmetic import Unary
from psfleet.program.shapes import axis_of

if TYPE_CHECKING:
    from psfleet.program.variable import Variable

__all__ = ["LogSoftmax", "Relu", "Sigmoid", "Softmax", "Tanh", "log_softmax", "sigmoid"]


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow: exp is only taken of numbers up to 0."""
    small = np.exp(-np.abs(x))
    below: Array = small / (1 + small)
    return np.where(x >= 0, 1 - below, below).astype(x.dtype, copy=False)


def log_softmax(x: Array, axis: int) -> Array:
    """x - log(sum(exp(x))) along an axis, shifted by the maximum so that nothing overflows."""
    shifted = x - x.max(axis=axis, keepdims=True)
    out: Array = shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))
    return out


class Relu(Unary, saved="relu"):
    """max(x, 0); its gradient at 0 is 0."""

    def forward(self, context: Context, x: Array) -> Array:
        out: Array = np.maximum(x, 0)
        context.save(out)
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        return (gradient * (context.saved[0] > 0),)


class Sigmoid(Unary, saved="sigmoid"):
    """1 / (1 + exp(-x))."""

    def forward(self, context: Context, x: Array) -> Array:
        out = sigmoid(x)
        context.save(out)
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        (out,) = context.saved
        return (gradient * (out * (1 - out)),)


class Tanh(Unary, saved="tanh"):
    """The hyperbolic tangent."""

    def forward(self, context: Context, x: Array) -> Array:
        out: Array = np.tanh(x)
        context.save(out)
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        (out,) = context.saved
        return (gradient * (1 - out * out),)


@dataclass(frozen=True)
class Softmax(Unary, saved="softmax axis"):
    """exp(x) / sum(exp(x)) along an axis."""

    axis: int = -1

    def infer(self, x: "Variable") -> Spec:
        axis_of(self.axis, x.shape, f"softmax of {x.name!r}")
        return super().infer(x)

    def forward(self, context: Context, x: Array) -> Array:
        out: Array = np.exp(x - x.max(axis=self.axis, keepdims=True))
        out /= out.sum(axis=self.axis, keepdims=True)
        context.save(out)
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        (out,) = context.saved
        part = gradient * out
        return (part - out * part.sum(axis=self.axis, keepdims=True),)


@dataclass(frozen=True)
class LogSoftmax(Unary, saved="log_softmax axis"):
    """The logarithm of softmax along an axis."""

    axis: int = -1

    def infer(self, x: "Variable") -> Spec:
        axis_of(self.axis, x.shape, f"log_softmax of {x.name!r}")
        return super().infer(x)

    def forward(self, context: Context, x: Array) -> Array:
        out = log_softmax(x, self.axis)
        context.save(out)
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        (out,) = context.saved
        return (gradient - np.exp(out) * gradient.sum(axis=self.axis, keepdims=True),)
