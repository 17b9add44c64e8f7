"""Normalisation within a sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from psfleet.errors import ShapeError
from psfleet.program.operation import Array, Context, Gradient, Op, Spec
from psfleet.program.ops.check import need_floats
from psfleet.program.shapes import axis_of, same, size_of

if TYPE_CHECKING:
    from psfleet.program.variable import Variable

__all__ = ["LayerNorm"]


@dataclass(frozen=True)
class LayerNorm(Op, saved="layer_norm axis epsilon has_scale has_shift"):
    """(x - mean) / sqrt(variance + epsilon) over the axes from `axis` on, then * scale + shift.

    Inputs: x, then scale and shift, flat, as far as `has_scale` and `has_shift` say.
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
        for weights in inputs[1:]:
            if not same(weights.shape, (width,)):
                raise ShapeError(
                    f"layer_norm of {x.name!r}: {weights.name!r} is {weights.shape}, "
                    f"it must be ({width},)"
                )
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
