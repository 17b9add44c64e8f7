"""Adadelta (Zeiler, 2012); the learning rate scales the update, as in the reference."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from psfleet.rules.rule import Rule, Slot, check_range

__all__ = ["Adadelta"]


def adadelta(w, g, squared_grad, squared_update, h):  # type: ignore[no-untyped-def]
    squared_grad = h[1] * squared_grad + h[2] * (g * g)
    update = math.sqrt((squared_update + h[3]) / (squared_grad + h[3])) * g
    squared_update = h[1] * squared_update + h[2] * (update * update)
    return w - h[0] * update, squared_grad, squared_update


@dataclass(frozen=True)
class Adadelta(Rule):
    """u = g * sqrt((U + epsilon) / (G + epsilon)); w -= lr * u; G, U: means of g^2, u^2."""

    rho: float = 0.95
    epsilon: float = 1e-6
    name: ClassVar[str] = "adadelta"

    def __post_init__(self) -> None:
        check_range("Adadelta", "rho", self.rho, 0, 1, high_open=True)
        check_range("Adadelta", "epsilon", self.epsilon, 0, math.inf)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("avg_squared_grad"), Slot("avg_squared_update"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return adadelta

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, self.rho, 1 - self.rho, self.epsilon)
