"""RMSprop as torch.optim.RMSprop computes it: epsilon outside the root, the rate outside the momentum."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from psfleet.rules.rule import Rule, Slot, check_range

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

    alpha: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0
    centered: bool = False
    name: ClassVar[str] = "torch_rmsprop"

    def __post_init__(self) -> None:
        check_range("RMSprop", "alpha", self.alpha, 0, 1, high_open=True)
        check_range("RMSprop", "epsilon", self.epsilon, 0, math.inf)
        check_range("RMSprop", "momentum", self.momentum, 0, math.inf)

    @property
    def slots(self) -> tuple[Slot, ...]:
        third = (Slot("mean_grad"),) if self.centered else ()
        return (Slot("mean_square"), Slot("momentum"), *third)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return torch_rmsprop_centered if self.centered else torch_rmsprop

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, self.alpha, 1 - self.alpha, self.epsilon, self.momentum)
