"""Rules that make weights exactly 0: FTRL, and soft thresholding.

- Follow the regularized leader, proximal (McMahan et al., 2013), as the reference computes it.
- Proximal gradient descent: soft thresholding after each step (Duchi and Singer, 2009).
- Proximal Adagrad: soft thresholding after each step of Adagrad (Duchi and Singer, 2009).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from psfleet.errors import ConfigError
from psfleet.rules.rule import OptimizerSpec, Rule, Slot
from psfleet.validation.annotations import NonNegative, Range

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


def proximal_gd(w, g, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    target = w - h[0] * g
    return (math.copysign(max(abs(target) - h[1], h[3]), target) / h[2],)


@dataclass(frozen=True)
class ProximalGD(Rule):
    """q = w - lr * g; w = sign(q) * max(|q| - lr * l1, 0) / (1 + lr * l2)."""

    l1: NonNegative = 0.0
    l2: NonNegative = 0.0
    name = "proximal_gd"
    optimizer = OptimizerSpec(learning_rate=None)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return proximal_gd

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, learning_rate * self.l1, 1 + learning_rate * self.l2, 0.0)


def proximal_adagrad(w, g, moment, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    moment = moment + g * g
    target = w - h[0] * g / math.sqrt(max(moment, h[4]))
    return math.copysign(max(abs(target) - h[1], h[3]), target) / h[2], moment


@dataclass(frozen=True)
class ProximalAdagrad(Rule):
    """s += g^2; q = w - lr * g / sqrt(s); w = sign(q) * max(|q| - lr * l1, 0) / (1 + lr * l2).

    There is no epsilon to raise, so 0 / 0 is taken for 0: the reference's operator makes NaN of a weight
    that has had no gradient but 0.
    """

    l1: NonNegative = 0.0
    l2: NonNegative = 0.0
    name = "proximal_adagrad"
    optimizer = OptimizerSpec(learning_rate=None)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment", smallest="bfloat16"),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return proximal_adagrad

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        least = 2.0**-126  # the smallest normal float32
        return (learning_rate, learning_rate * self.l1, 1 + learning_rate * self.l2, 0.0, least)
