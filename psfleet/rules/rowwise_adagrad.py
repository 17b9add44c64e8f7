"""Adagrad with one accumulator per row: the memory of the rows alone, nearly."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from psfleet.rules.rule import Rule, Slot, check_range

__all__ = ["RowwiseAdagrad"]


def rowwise_measure(w, g, moment, h):  # type: ignore[no-untyped-def]
    return (g * g,)


def rowwise_combine(squared, count, h):  # type: ignore[no-untyped-def]
    return (squared / count,)


def rowwise_adagrad(w, g, moment, h):  # type: ignore[no-untyped-def]
    moment = moment + h[2]
    return w - h[0] * g / (math.sqrt(moment) + h[1]), moment


@dataclass(frozen=True)
class RowwiseAdagrad(Rule):
    """s += mean of g^2 over the row; w -= lr * g / (sqrt(s) + epsilon).

    A dense array's rows are the slices that its first axis names; a vector's are its elements.
    """

    epsilon: float = 1e-6
    initial_accumulator_value: float = 0.0
    name: ClassVar[str] = "rowwise_adagrad"
    unit: ClassVar[str] = "row"

    def __post_init__(self) -> None:
        check_range("RowwiseAdagrad", "epsilon", self.epsilon, 0, math.inf)
        check_range(
            "RowwiseAdagrad",
            "initial_accumulator_value",
            self.initial_accumulator_value,
            0,
            math.inf,
        )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment", self.initial_accumulator_value, per_unit=True),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return rowwise_adagrad

    def measure(self) -> Callable[..., tuple[float, ...]]:
        return rowwise_measure

    def combine(self) -> Callable[..., tuple[float, ...]]:
        return rowwise_combine

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, self.epsilon)
