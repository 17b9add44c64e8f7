"""Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from psfleet.rules.adam import Adam
from psfleet.rules.rule import Rule, Slot, check_range

__all__ = ["AdamW"]


def adamw(w, g, m, v, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[1] * m + h[2] * g
    v = h[3] * v + h[4] * (g * g)
    return h[6] * w - h[0] * (m / (math.sqrt(v) + h[5])), m, v


@dataclass(frozen=True)
class AdamW(Rule):
    """w *= 1 - lr * weight_decay, then Adam's update."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    name: ClassVar[str] = "adamw"

    def __post_init__(self) -> None:
        check_range("AdamW", "beta1", self.beta1, 0, 1, high_open=True)
        check_range("AdamW", "beta2", self.beta2, 0, 1, high_open=True)
        check_range("AdamW", "epsilon", self.epsilon, 0, math.inf)
        check_range("AdamW", "weight_decay", self.weight_decay, 0, math.inf)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment1"), Slot("moment2"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return adamw

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        adam = Adam(self.beta1, self.beta2, self.epsilon).scalars(learning_rate, step)
        return (*adam, 1 - learning_rate * self.weight_decay)
