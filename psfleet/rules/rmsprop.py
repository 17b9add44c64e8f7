"""RMSProp (Tieleman and Hinton, 2012): plain, with momentum, centered."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.optimizer_spec import OptimizerSpec
from psfleet.rules.rule import DecayRate, Rule, Slot, UnitInterval
from psfleet.validation.annotations import NonNegative

__all__ = ["RMSProp"]


def rmsprop(w, g, momentum, mean_square, h):  # type: ignore[no-untyped-def]
    mean_square = h[1] * mean_square + h[2] * (g * g)
    momentum = h[4] * momentum + h[0] * g / math.sqrt(mean_square + h[3])
    return w - momentum, momentum, mean_square


def rmsprop_centered(w, g, momentum, mean_square, mean_grad, h):  # type: ignore[no-untyped-def]
    mean_square = h[1] * mean_square + h[2] * (g * g)
    mean_grad = h[1] * mean_grad + h[2] * g
    variance = mean_square - mean_grad * mean_grad
    momentum = h[4] * momentum + h[0] * g / math.sqrt(variance + h[3])
    return w - momentum, momentum, mean_square, mean_grad


@dataclass(frozen=True)
class RMSProp(Rule):
    """s = rho * s + (1 - rho) * g^2; v = momentum * v + lr * g / sqrt(s + epsilon); w -= v.

    Epsilon is inside the root and the rate inside v, as in the reference. Centered: s less the
    square of the running mean of g.
    """

    rho: DecayRate = 0.95
    epsilon: NonNegative = 1e-6
    momentum: UnitInterval = 0.0
    centered: bool = False
    name = "rmsprop"
    optimizer = OptimizerSpec(learning_rate=None)

    @property
    def slots(self) -> tuple[Slot, ...]:
        if self.centered:  # rounded, the mean of squares might be below the square of the mean
            return (Slot("momentum", smallest="int8"), Slot("mean_square"), Slot("mean_grad"))
        return (Slot("momentum", smallest="int8"), Slot("mean_square", smallest="bfloat16"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return rmsprop_centered if self.centered else rmsprop

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, self.rho, 1 - self.rho, self.epsilon, self.momentum)
