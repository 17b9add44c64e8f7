"""Adadelta (Zeiler, 2012); the learning rate scales the update, as in the reference."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.optimizer_spec import OptimizerSpec, TorchSpec
from psfleet.rules.rule import DecayRate, Rule, Slot
from psfleet.validation.annotations import NonNegative

__all__ = ["Adadelta"]


def adadelta(w, g, squared_grad, squared_update, h):  # type: ignore[no-untyped-def]
    squared_grad = h[1] * squared_grad + h[2] * (g * g)
    update = math.sqrt((squared_update + h[3]) / (squared_grad + h[3])) * g
    squared_update = h[1] * squared_update + h[2] * (update * update)
    return w - h[0] * update, squared_grad, squared_update


@dataclass(frozen=True)
class Adadelta(Rule):
    """u = g * sqrt((U + epsilon) / (G + epsilon)); w -= lr * u; G, U: means of g^2, u^2."""

    rho: DecayRate = 0.95
    epsilon: NonNegative = 1e-6
    name = "adadelta"
    optimizer = OptimizerSpec(arguments="epsilon rho parameters weight_decay grad_clip name")
    torch = (TorchSpec("Adadelta", "rho eps", "square_avg acc_delta"),)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (
            Slot("avg_squared_grad", smallest="bfloat16"),
            Slot("avg_squared_update", smallest="bfloat16"),
        )

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return adadelta

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, self.rho, 1 - self.rho, self.epsilon)
