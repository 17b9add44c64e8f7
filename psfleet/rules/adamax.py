"""Adamax (Kingma and Ba, 2015, algorithm 2), epsilon inside the maximum as in the reference."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from psfleet.rules.rule import Rule, Slot, check_range

__all__ = ["Adamax"]


def adamax(w, g, m, norm, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[1] * m + h[2] * g
    norm = max(abs(g), h[3] * norm + h[4])
    return w - h[0] * (m / norm), m, norm


@dataclass(frozen=True)
class Adamax(Rule):
    """u = max(|g|, beta2 * u + epsilon); w -= lr / (1 - beta1^t) * m / u."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    name: ClassVar[str] = "adamax"

    def __post_init__(self) -> None:
        check_range("Adamax", "beta1", self.beta1, 0, 1, high_open=True)
        check_range("Adamax", "beta2", self.beta2, 0, 1, high_open=True)
        check_range("Adamax", "epsilon", self.epsilon, 0, math.inf)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment"), Slot("inf_norm"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return adamax

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        rate = learning_rate / (1 - self.beta1**step)
        return (rate, self.beta1, 1 - self.beta1, self.beta2, self.epsilon)
