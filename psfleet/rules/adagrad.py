"""Adagrad (Duchi, Hazan and Singer, 2011), epsilon outside the root as in the reference."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from psfleet.rules.rule import Rule, Slot, check_range

__all__ = ["Adagrad"]


def adagrad(w, g, moment, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    moment = moment + g * g
    return w - h[0] * g / (math.sqrt(moment) + h[1]), moment


@dataclass(frozen=True)
class Adagrad(Rule):
    """s += g^2; w -= lr * g / (sqrt(s) + epsilon)."""

    epsilon: float = 1e-6
    initial_accumulator_value: float = 0.0
    name: ClassVar[str] = "adagrad"

    def __post_init__(self) -> None:
        check_range("Adagrad", "epsilon", self.epsilon, 0, math.inf)
        check_range(
            "Adagrad", "initial_accumulator_value", self.initial_accumulator_value, 0, math.inf
        )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment", self.initial_accumulator_value),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return adagrad

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, self.epsilon)
