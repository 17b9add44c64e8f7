"""Activation functions, softmax and dropout.

Dropout masks depend only on (seed, name, step). So a step has the same masks in every process, after a
restart, and when a recomputing run computes it again.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError
from psfleet.core.graph.program.operation import (
    Array,
    Context,
    Gradient,
    Op,
    Spec,
    axis_of,
    need_floats,
)
from psfleet.core.graph.program.ops.arithmetic import Unary

if TYPE_CHECKING:
    from psfleet.core.graph.program.variable import Variable


def sigmoid(x: Array) -> Array:
    """Compute 1 / (1 + exp(-x)). It does not overflow, because exp is applied only to numbers up to 0."""
    small = np.exp(-np.abs(x))
    below: Array = small / (1 + small)
    return np.where(x >= 0, 1 - below, below).astype(x.dtype, copy=False)


def log_softmax(x: Array, axis: int) -> Array:
    """Compute x - log(sum(exp(x))) along an axis. The maximum is subtracted first to avoid overflow."""
    below_maximum = x - x.max(axis=axis, keepdims=True)
    out: Array = below_maximum - np.log(np.exp(below_maximum).sum(axis=axis, keepdims=True))
    return out


class Relu(Unary, saved="relu"):
    """Rectifier max(x, 0). Its gradient at 0 is 0."""

    def forward(self, context: Context, x: Array) -> Array:
        out: Array = np.maximum(x, 0)
        context.save(out)
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        return (gradient * (context.saved[0] > 0),)


class Sigmoid(Unary, saved="sigmoid"):
    """Logistic function 1 / (1 + exp(-x))."""

    def forward(self, context: Context, x: Array) -> Array:
        out = sigmoid(x)
        context.save(out)
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        (out,) = context.saved
        return (gradient * (out * (1 - out)),)


class Tanh(Unary, saved="tanh"):
    """Hyperbolic tangent."""

    def forward(self, context: Context, x: Array) -> Array:
        out: Array = np.tanh(x)
        context.save(out)
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        (out,) = context.saved
        return (gradient * (1 - out * out),)


@dataclass(frozen=True)
class Softmax(Unary, saved="softmax axis"):
    """Softmax exp(x) / sum(exp(x)) along an axis."""

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
    """Logarithm of softmax along an axis."""

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


def keep_mask(
    shape: tuple[int, ...], drop: float, seed: int, name: str, step: int
) -> NDArray[np.bool_]:
    """Return a random mask of the values to keep. It is the same in every process and NumPy version.

    It is drawn from the raw numbers of Philox, which are part of that generator's definition. The
    distributions that NumPy derives from them may change between versions.

    Args:
        drop: Probability of dropping a value.
    """
    digest = hashlib.blake2b(f"{seed} {name} {step}".encode(), digest_size=16).digest()
    size = int(np.prod(shape))
    source = np.random.Philox(key=int.from_bytes(digest, "little"))
    numbers = source.random_raw((size + 1) // 2).view(np.uint32)[:size]
    return (numbers >= round(drop * 2**32)).reshape(shape)


@dataclass(frozen=True)
class Dropout(Op, saved="dropout name drop is_test seed upscale"):
    """Dropout: sets random values to 0 in training.

    The expected value is kept: with `upscale`, training divides by (1 - drop); without it, tests multiply
    by (1 - drop). The mask is a function of the seed, the name, and the step of the program. If `seed` is
    None, the program's seed is used.
    """

    name: str = ""
    drop: float = 0.5
    is_test: bool = False
    seed: int | None = None
    upscale: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.drop <= 1:
            raise ConfigError(f"dropout_prob is {self.drop!r}, it must be in [0, 1]")

    def infer(self, x: "Variable") -> Spec:
        need_floats("dropout", x)
        return x.shape, x.dtype

    def forward(self, context: Context, x: Array) -> Array:
        kind = x.dtype.type
        if self.is_test or context.program.for_test:
            scale = kind(1.0 if self.upscale else 1 - self.drop)
            context.save(None, scale)
            return x if self.upscale else x * scale
        program = context.program
        seed = program.random_seed if self.seed is None else self.seed
        mask = keep_mask(x.shape, self.drop, seed, self.name, program.step)
        scale = kind(1 / (1 - self.drop) if self.upscale and self.drop < 1 else 1)
        context.save(mask, scale)
        return x * mask * scale if scale != 1 else x * mask

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        mask, scale = context.saved
        out = gradient if mask is None else gradient * mask
        return (out * scale if scale != 1 else out,)
