"""Adagrad whose accumulator forgets."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.optimizer_spec import OptimizerSpec
from psfleet.rules.rule import DecayRate, Rule, Slot
from psfleet.validation.annotations import NonNegative

__all__ = ["DecayedAdagrad"]


def decayed_adagrad(w, g, moment, h):  # type: ignore[no-untyped-def]
    moment = h[1] * moment + h[2] * (g * g)
    return w - h[0] * g / (math.sqrt(moment) + h[3]), moment


@dataclass(frozen=True)
class DecayedAdagrad(Rule):
    """s = decay * s + (1 - decay) * g^2; w -= lr * g / (sqrt(s) + epsilon)."""

    decay: DecayRate = 0.95
    epsilon: NonNegative = 1e-6
    name = "decayed_adagrad"
    optimizer = OptimizerSpec(learning_rate=None)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment", smallest="bfloat16"),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return decayed_adagrad

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, self.decay, 1 - self.decay, self.epsilon)
