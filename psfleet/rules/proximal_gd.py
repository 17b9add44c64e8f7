"""Proximal gradient descent: soft thresholding after each step (Duchi and Singer, 2009)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.optimizer_spec import OptimizerSpec
from psfleet.rules.rule import Rule
from psfleet.validation.annotations import NonNegative

__all__ = ["ProximalGD"]


def proximal_gd(w, g, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    moved = w - h[0] * g
    return (math.copysign(max(abs(moved) - h[1], h[3]), moved) / h[2],)


@dataclass(frozen=True)
class ProximalGD(Rule):
    """q = w - lr * g; w = sign(q) * max(|q| - lr * l1, 0) / (1 + lr * l2)."""

    l1: NonNegative = 0.0
    l2: NonNegative = 0.0
    name = "proximal_gd"
    optimizer = OptimizerSpec(learning_rate=None)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return proximal_gd

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, learning_rate * self.l1, 1 + learning_rate * self.l2, 0.0)
