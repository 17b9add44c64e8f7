"""Rprop (Riedmiller and Braun, 1993): a rate per weight that follows the gradient's sign."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from psfleet.rules.rule import Rule, Slot, check_range

__all__ = ["Rprop"]


def rprop(w, g, before, rate, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    product = g * before
    g = h[4] if product < h[4] else g
    rate = (
        min(rate * h[1], h[3])
        if product > h[4]
        else (max(rate * h[0], h[2]) if product < h[4] else rate)
    )
    return w - (rate if g > h[4] else (-rate if g < h[4] else h[4])), g, rate


@dataclass(frozen=True)
class Rprop(Rule):
    """w -= sign(g) * rate; the rate grows while the sign stays and shrinks when it turns.

    After a turn the gradient counts as 0. Each weight's rate starts at `first_rate` (learning_rate
    in the reference); the rate of a push is not used.
    """

    first_rate: float = 0.001
    smallest: float = 1e-5
    largest: float = 50.0
    eta_minus: float = 0.5
    eta_plus: float = 1.2
    name: ClassVar[str] = "rprop"

    def __post_init__(self) -> None:
        check_range("Rprop", "first_rate", self.first_rate, 0, math.inf, low_open=True)
        check_range("Rprop", "smallest", self.smallest, 0, self.first_rate)
        check_range("Rprop", "largest", self.largest, self.first_rate, math.inf)
        check_range("Rprop", "eta_minus", self.eta_minus, 0, 1, low_open=True, high_open=True)
        check_range("Rprop", "eta_plus", self.eta_plus, 1, math.inf, low_open=True)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("prevs"), Slot("learning_rates", self.first_rate))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return rprop

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (self.eta_minus, self.eta_plus, self.smallest, self.largest, 0.0)
