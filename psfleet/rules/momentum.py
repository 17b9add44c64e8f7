"""Stochastic gradient descent with momentum, plain or Nesterov's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from psfleet.rules.rule import Rule, Slot, check_range

__all__ = ["Momentum"]


def momentum(w, g, velocity, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    velocity = h[1] * velocity + g
    return w - h[0] * velocity, velocity


def nesterov(w, g, velocity, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    velocity = h[1] * velocity + g
    return w - h[0] * (g + h[1] * velocity), velocity


@dataclass(frozen=True)
class Momentum(Rule):
    """v = mu * v + g; w -= lr * v. Nesterov: w -= lr * (g + mu * v). The rate is not in v."""

    momentum: float = 0.9
    use_nesterov: bool = False
    name: ClassVar[str] = "momentum"

    def __post_init__(self) -> None:
        check_range("Momentum", "momentum", self.momentum, 0, 1)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("velocity"),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return nesterov if self.use_nesterov else momentum

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, self.momentum)
