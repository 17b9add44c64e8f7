"""LARS (You, Gitman and Ginsburg, 2017): momentum with a rate per parameter."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.rule import Rule, Slot, UnitInterval
from psfleet.validation.annotations import NonNegative

__all__ = ["LarsMomentum"]


def lars_measure(w, g, velocity, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    return w * w, g * g


def lars_combine(squared_w, squared_g, count, h):  # type: ignore[no-untyped-def]
    norm_w, norm_g = math.sqrt(squared_w), math.sqrt(squared_g)
    local = h[0] * h[2] * norm_w / (norm_g + h[3] * norm_w + h[4])
    return (local if squared_w > h[5] and squared_g > h[5] else h[0],)


def lars(w, g, velocity, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    velocity = h[1] * velocity + h[6] * (g + h[3] * w)
    return w - velocity, velocity


@dataclass(frozen=True)
class LarsMomentum(Rule):
    """v = mu * v + local * (g + wd * w); w -= v; local = lr * coeff * |w| / (|g| + wd * |w| + eps).

    The local rate is lr itself where a norm is 0, and without weight decay.
    """

    momentum: UnitInterval = 0.9
    lars_coeff: NonNegative = 0.001
    lars_weight_decay: NonNegative = 0.0005
    epsilon: NonNegative = 0.0
    name = "lars_momentum"
    unit = "parameter"

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("velocity", smallest="int8"),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return lars

    def measure(self) -> Callable[..., tuple[float, ...]]:
        return lars_measure

    def combine(self) -> Callable[..., tuple[float, ...]]:
        return lars_combine

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        always = 0.0 if self.lars_weight_decay else math.inf  # norms up to this: the plain rate
        return (
            learning_rate,
            self.momentum,
            self.lars_coeff,
            self.lars_weight_decay,
            self.epsilon,
            always,
        )
