"""Clips of gradients as operations of a program; arrays and gradients by rows stay what they are."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from psfleet.parameters import gradients
from psfleet.parameters.parameter import SparseGrad
from psfleet.program.operation import Context, Gradient, Op, Spec

if TYPE_CHECKING:
    from psfleet.program.variable import Variable


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
        values = (
            gradients.merge_rows(gradient).rows if isinstance(gradient, SparseGrad) else gradient
        )
        return np.asarray(gradients.squared_norm(values))


@dataclass(frozen=True)
class ScaleGradient(_OfGradient, saved="scale_gradient norm"):
    """Scaled down by norm / sqrt(sum of the squares, the other inputs), where that is below 1."""

    norm: float = 1.0

    def forward(self, context: Context, *inputs: Any, **none: Any) -> Any:
        total = math.sqrt(sum(float(square) for square in inputs[1:]))
        return _with(inputs[0], lambda values: gradients.scaled_down(values, self.norm, total))


def _with(gradient: Gradient, change: Any) -> Gradient:
    if not isinstance(gradient, SparseGrad):
        values: Gradient = change(gradient)
        return values
    rows = gradients.merge_rows(gradient)
    return rows.with_rows(change(rows.rows))
