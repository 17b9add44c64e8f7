"""Follow the regularized leader, proximal (McMahan et al., 2013), as the reference computes it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from psfleet.errors import ConfigError
from psfleet.rules.optimizer_spec import OptimizerSpec
from psfleet.rules.rule import Rule, Slot
from psfleet.validation.annotations import NonNegative, Range

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

    Rows of a sparse parameter without a gradient rest. (The dense rule sets a weight that has never
    had a gradient to zero.)
    """

    l1: NonNegative = 0.0
    l2: NonNegative = 0.0
    lr_power: Annotated[float, Range(high=0)] = -0.5
    name = "ftrl"
    optimizer = OptimizerSpec(learning_rate=None, lazy=True)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("squared", smallest="bfloat16"), Slot("linear", smallest="bfloat16"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return ftrl if self.lr_power == -0.5 else ftrl_power

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        if learning_rate <= 0:
            raise ConfigError(
                f"Ftrl divides by the learning rate, which is {learning_rate!r}; it must be above 0"
            )
        pull = 2 * (self.l2 + _TINY) * learning_rate
        return (learning_rate, self.l1 + _TINY, pull, 0.0, -self.lr_power, 1 / learning_rate)
