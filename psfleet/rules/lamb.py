"""Lamb (You et al., 2020): Adam's direction, scaled by the norms of weights and direction."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.rule import DecayRate, Rule, Slot
from psfleet.validation.annotations import NonNegative

__all__ = ["Lamb"]


def lamb_advance(w, g, m, v, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    return h[1] * m + h[2] * g, h[3] * v + h[4] * (g * g)


def lamb_direction(w, m, v, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    return (h[6] * (m / (math.sqrt(v) + h[5])) + h[7] * w,)


def lamb_measure(w, u, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    return w * w, u * u


def lamb_combine(squared_w, squared_u, count, h):  # type: ignore[no-untyped-def]
    trust = math.sqrt(squared_w) / math.sqrt(squared_u)
    return (h[0] * (trust if squared_w > h[9] and squared_u > h[9] else h[8]),)


def lamb(w, u, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    return (w - h[10] * u,)


@dataclass(frozen=True)
class Lamb(Rule):
    """u = m^ / (sqrt(v^) + epsilon) + weight_decay * w; w -= lr * |w| / |u| * u.

    The trust ratio |w| / |u| is 1 where a norm is 0, and without weight decay.
    """

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: NonNegative = 1e-6
    weight_decay: NonNegative = 0.01
    name = "lamb"
    unit = "parameter"

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment1", smallest="int8"), Slot("moment2", smallest="bfloat16"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return lamb

    def advance(self) -> Callable[..., tuple[float, ...]]:
        return lamb_advance

    def direction(self) -> Callable[..., tuple[float, ...]]:
        return lamb_direction

    def measure(self) -> Callable[..., tuple[float, ...]]:
        return lamb_measure

    def combine(self) -> Callable[..., tuple[float, ...]]:
        return lamb_combine

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        root = math.sqrt(1 - self.beta2**step)
        always = 0.0 if self.weight_decay else math.inf  # norms at or below this give the ratio 1
        return (
            learning_rate,
            self.beta1,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            self.epsilon * root,
            root / (1 - self.beta1**step),
            self.weight_decay,
            1.0,
            always,
        )
