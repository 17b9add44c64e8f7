"""RMSprop as torch.optim.RMSprop computes it: epsilon outside the root, the rate outside the momentum."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.optimizer_spec import TorchSpec
from psfleet.rules.rule import DecayRate, Rule, Slot
from psfleet.validation.annotations import NonNegative

__all__ = ["TorchRMSprop"]


def torch_rmsprop(w, g, mean_square, momentum, h):  # type: ignore[no-untyped-def]
    mean_square = h[1] * mean_square + h[2] * (g * g)
    momentum = h[4] * momentum + g / (math.sqrt(mean_square) + h[3])
    return w - h[0] * momentum, mean_square, momentum


def torch_rmsprop_centered(w, g, mean_square, momentum, mean_grad, h):  # type: ignore[no-untyped-def]
    mean_square = h[1] * mean_square + h[2] * (g * g)
    mean_grad = mean_grad + h[2] * (g - mean_grad)
    variance = mean_square - mean_grad * mean_grad
    momentum = h[4] * momentum + g / (math.sqrt(variance) + h[3])
    return w - h[0] * momentum, mean_square, momentum, mean_grad


@dataclass(frozen=True)
class TorchRMSprop(Rule):
    """s = alpha * s + (1 - alpha) * g^2; b = momentum * b + g / (sqrt(s) + epsilon); w -= lr * b.

    Centered: s less the square of the running mean of g.
    """

    alpha: DecayRate = 0.99
    epsilon: NonNegative = 1e-8
    momentum: NonNegative = 0.0
    centered: bool = False
    name = "torch_rmsprop"
    torch = (
        TorchSpec("RMSprop", "alpha eps momentum centered", "square_avg momentum_buffer grad_avg"),
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        if self.centered:  # rounded, the mean of squares might be below the square of the mean
            return (Slot("mean_square"), Slot("momentum", smallest="int8"), Slot("mean_grad"))
        return (Slot("mean_square", smallest="bfloat16"), Slot("momentum", smallest="int8"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return torch_rmsprop_centered if self.centered else torch_rmsprop

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, self.alpha, 1 - self.alpha, self.epsilon, self.momentum)
