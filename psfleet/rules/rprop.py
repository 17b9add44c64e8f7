"""Rprop (Riedmiller and Braun, 1993): a rate per weight that follows the gradient's sign."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from psfleet.errors import ConfigError
from psfleet.rules.rule import Rule, Slot
from psfleet.validation.annotations import NonNegative, Positive, Range

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

    first_rate: Positive = 0.001
    smallest: NonNegative = 1e-5
    largest: NonNegative = 50.0
    eta_minus: Annotated[float, Range(0, 1, low_open=True, high_open=True)] = 0.5
    eta_plus: Annotated[float, Range(1, low_open=True)] = 1.2
    name = "rprop"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.smallest <= self.first_rate <= self.largest:
            raise ConfigError(
                f"Rprop: the first rate is {self.first_rate!r}; it must be in the range of rates, "
                f"[{self.smallest!r}, {self.largest!r}]"
            )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (
            Slot("prevs", smallest="bfloat16"),
            Slot("learning_rates", self.first_rate, smallest="bfloat16"),
        )

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return rprop

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (self.eta_minus, self.eta_plus, self.smallest, self.largest, 0.0)
