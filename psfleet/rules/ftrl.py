"""Follow the regularized leader, proximal (McMahan et al., 2013), as the reference computes it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from psfleet.errors import ConfigError
from psfleet.rules.rule import Rule, Slot, check_range

__all__ = ["Ftrl"]

_TINY = 1e-10  # the reference adds it to l1 and l2: no 0 / 0 for a weight without gradients


def ftrl(w, g, squared, linear, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    total = squared + g * g
    root = math.sqrt(total)
    linear = linear + g - (root - math.sqrt(squared)) * h[5] * w
    size = max(abs(linear) - h[1], h[3]) * h[0]
    return math.copysign(size, -linear) / (root + h[2]), total, linear


def ftrl_power(w, g, squared, linear, h):  # type: ignore[no-untyped-def]  # inlined as text
    total = squared + g * g
    root = math.pow(total, h[4])
    linear = linear + g - (root - math.pow(squared, h[4])) * h[5] * w
    size = max(abs(linear) - h[1], h[3]) * h[0]
    return math.copysign(size, -linear) / (root + h[2]), total, linear


@dataclass(frozen=True)
class Ftrl(Rule):
    """z += g - (m^-p - n^-p) / lr * w; w = (l1 * sign(z) - z) / (m^-p / lr + 2 * l2); m = n + g^2.

    m is the next n, p is `lr_power`; n is the slot `squared`, z the slot `linear`. w is 0 where
    |z| <= l1. Computed as lr * (l1 * sign(z) - z) / (m^-p + 2 * l2 * lr): one division, not three.
    """

    l1: float = 0.0
    l2: float = 0.0
    lr_power: float = -0.5
    name: ClassVar[str] = "ftrl"

    def __post_init__(self) -> None:
        check_range("Ftrl", "l1", self.l1, 0, math.inf)
        check_range("Ftrl", "l2", self.l2, 0, math.inf)
        check_range("Ftrl", "lr_power", self.lr_power, -math.inf, 0)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("squared"), Slot("linear"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return ftrl if self.lr_power == -0.5 else ftrl_power

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        if learning_rate <= 0:
            raise ConfigError(
                f"Ftrl divides by the learning rate, which is {learning_rate!r}; it must be above 0"
            )
        pull = 2 * (self.l2 + _TINY) * learning_rate
        return (learning_rate, self.l1 + _TINY, pull, 0.0, -self.lr_power, 1 / learning_rate)
