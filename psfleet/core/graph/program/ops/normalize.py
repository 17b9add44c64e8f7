"""Normalization operations: layer_norm within each sample, and batch_norm over a batch.

Both compute y = (x - mean) / sqrt(variance + epsilon). Let r = 1 / sqrt(variance + epsilon), and g the
gradient of y. With means over the normalized axes, the gradient of x is

    dx = r * (g - mean(g) - y * mean(g * y))

because mean and variance depend on x too. batch_norm with fixed statistics has dx = r * g.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from psfleet.core.base.errors import ConfigError, ShapeError, UsageError
from psfleet.core.graph.program.operation import (
    Array,
    Context,
    Gradient,
    Op,
    Spec,
    axis_of,
    need_floats,
    same,
    size_of,
)

if TYPE_CHECKING:
    from psfleet.core.graph.program.variable import Variable


def _check_vectors(layer_name: str, vectors: "Sequence[Variable]", size: int | None) -> None:
    for vector in vectors:
        if not same(vector.shape, (size,)):
            raise ShapeError(
                f"{layer_name}: {vector.name!r} is {vector.shape}, it must be ({size},)"
            )


@dataclass(frozen=True)
class LayerNorm(Op, saved="layer_norm axis epsilon has_scale has_shift"):
    """Computes (x - mean) / sqrt(variance + epsilon) over the axes from `axis` on, then * scale + shift.

    Inputs: x, then a flat scale if `has_scale`, then a flat shift if `has_shift`.
    """

    axis: int = 1
    epsilon: float = 1e-5
    has_scale: bool = True
    has_shift: bool = True

    def infer(self, *inputs: Any, **none: Any) -> Spec:
        x: Variable = inputs[0]
        need_floats("layer_norm", *inputs)
        axis_of(self.axis, x.shape, f"layer_norm of {x.name!r}")
        width = size_of(x.shape[self.axis :])
        _check_vectors(f"layer_norm of {x.name!r}", inputs[1:], width)
        return x.shape, x.dtype

    def forward(self, context: Context, *inputs: Any, **none: Any) -> Array:
        x = inputs[0]
        flat = x.reshape(int(np.prod(x.shape[: self.axis])), -1)
        normal = flat - flat.mean(axis=1, keepdims=True, dtype=x.dtype)
        variance = (normal * normal).mean(axis=1, keepdims=True, dtype=x.dtype)
        root = 1 / np.sqrt(variance + x.dtype.type(self.epsilon))
        normal *= root
        scale = inputs[1] if self.has_scale else None
        context.save(normal, root, scale, x.shape)
        out = normal * scale if scale is not None else normal
        if self.has_shift:
            out = out + inputs[-1]
        result: Array = out.reshape(x.shape)
        return result

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        normal, root, scale, shape = context.saved
        gradient = gradient.reshape(normal.shape)
        parts: list[Gradient | None] = [None]
        if context.needs[0]:
            inner = gradient if scale is None else gradient * scale
            mean = inner.mean(axis=1, keepdims=True, dtype=inner.dtype)
            along = (inner * normal).mean(axis=1, keepdims=True, dtype=inner.dtype)
            parts[0] = ((inner - mean - normal * along) * root).reshape(shape)
        if self.has_scale:
            parts.append((gradient * normal).sum(axis=0))
        if self.has_shift:
            parts.append(gradient.sum(axis=0))
        return parts


@dataclass(frozen=True)
class BatchNorm(Op, saved="batch_norm axis momentum epsilon is_test fixed has_scale has_shift"):
    """Computes (x - mean) / sqrt(variance + epsilon) for each channel, then * scale + shift.

    Inputs: x, the moving mean and the moving variance [channels], then a scale if `has_scale`, then a shift
    if `has_shift`.

    In training, mean and (biased) variance are those of the batch, over all axes but `axis`. They are
    stored in the program, whose update adds them to the moving averages. The moving averages are used
    instead in programs for tests, and with `is_test` or `fixed`.
    """

    axis: int = 1
    momentum: float = 0.9
    epsilon: float = 1e-5
    is_test: bool = False
    fixed: bool = False
    has_scale: bool = True
    has_shift: bool = True

    def __post_init__(self) -> None:
        for name, value, high in (
            ("momentum", self.momentum, 1.0),
            ("epsilon", self.epsilon, None),
        ):
            number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            if not number or not 0 <= value <= (np.finfo(np.float32).max if high is None else high):
                bounds = "at least 0" if high is None else "in [0, 1]"
                raise ConfigError(f"batch_norm: {name} is {value!r}, it must be a number {bounds}")

    def infer(self, *inputs: Any, **none: Any) -> Spec:
        x: Variable = inputs[0]
        need_floats("batch_norm", *inputs)
        channels = x.shape[axis_of(self.axis, x.shape, f"batch_norm of {x.name!r}")]
        _check_vectors(f"batch_norm of {x.name!r} {x.shape}", inputs[1:], channels)
        return x.shape, x.dtype

    def forward(self, context: Context, *inputs: Any, **none: Any) -> Array:
        x, mean, variance = inputs[:3]
        batch = not (self.is_test or self.fixed or context.program.for_test)
        reduced_axes = tuple(i for i in range(x.ndim) if i != self.axis % x.ndim)
        if batch:
            if not x.size:
                raise UsageError(
                    f"batch_norm {context.record.output.name!r} trains on a batch without samples; "
                    "leave it out, or run a program cloned for tests"
                )
            mean = x.mean(axis=reduced_axes, dtype=x.dtype)
        normal = x - self._spread(mean, x)
        if batch:
            variance = (normal * normal).mean(axis=reduced_axes, dtype=x.dtype)
            self._note(context, mean, variance)
        root = 1 / np.sqrt(variance + x.dtype.type(self.epsilon))
        normal *= self._spread(root, x)
        scale = inputs[3] if self.has_scale else None
        context.save(normal, root, scale, reduced_axes, batch)
        out: Array = normal if scale is None else normal * self._spread(scale, x)
        return out + self._spread(inputs[-1], x) if self.has_shift else out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        normal, root, scale, reduced_axes, batch = context.saved
        parts: list[Gradient | None] = [None, None, None]
        if context.needs[0]:
            inner = gradient if scale is None else gradient * self._spread(scale, gradient)
            if batch:
                mean = inner.mean(axis=reduced_axes, keepdims=True, dtype=inner.dtype)
                along = (inner * normal).mean(axis=reduced_axes, keepdims=True, dtype=inner.dtype)
                inner = inner - mean - normal * along
            parts[0] = inner * self._spread(root, gradient)
        if self.has_scale:
            parts.append((gradient * normal).sum(axis=reduced_axes))
        if self.has_shift:
            parts.append(gradient.sum(axis=reduced_axes))
        return parts

    def _spread(self, values: Array, x: Array) -> Array:
        """Reshape one value per channel so that it broadcasts against x."""
        return values.reshape([-1 if i == self.axis % x.ndim else 1 for i in range(x.ndim)])

    def _note(self, context: Context, mean: Array, variance: Array) -> None:
        """Store the batch's statistics in the program, whose update adds them to the moving averages.

        A recomputing run may compute the operation twice. The second statistics then replace the first, so
        that a batch counts once.
        """
        moving = [variable.parameter for variable in context.record.inputs[1:3]]
        context.program.observed[context.record.output.name] = [
            (parameter, self.momentum, value)
            for parameter, value in zip(moving, (mean, variance), strict=True)
            if parameter is not None
        ]
