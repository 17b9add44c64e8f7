"""Adagrad with one accumulator per row: the memory of the rows alone, nearly."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.optimizer_spec import OptimizerSpec
from psfleet.rules.rule import Rule, Slot
from psfleet.validation.annotations import NonNegative

__all__ = ["RowWiseAdagrad"]


def rowwise_measure(w, g, moment, h):  # type: ignore[no-untyped-def]
    return (g * g,)


def rowwise_combine(squared, count, h):  # type: ignore[no-untyped-def]
    return (squared / count,)


def rowwise_adagrad(w, g, moment, h):  # type: ignore[no-untyped-def]
    moment = moment + h[2]
    return w - h[0] * g / (math.sqrt(moment) + h[1]), moment


@dataclass(frozen=True)
class RowWiseAdagrad(Rule):
    """Adagrad with one s for each row: s += mean of g^2 over the row; w -= lr * g / (sqrt(s) + epsilon).

    It halves the memory of large tables. A dense array's rows are the slices that its first axis names;
    a vector's are its elements.
    """

    epsilon: NonNegative = 1e-6
    initial_accumulator_value: NonNegative = 0.0
    name = "rowwise_adagrad"
    unit = "row"
    optimizer = OptimizerSpec(
        learning_rate=None,
        arguments="epsilon parameters weight_decay grad_clip name initial_accumulator_value",
        older="regularization name initial_accumulator_value",
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
