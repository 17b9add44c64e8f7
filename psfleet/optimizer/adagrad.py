"""Adagrad."""

from collections.abc import Iterable
from typing import Any, Unpack

from psfleet import rules
from psfleet.clip import ClipGradBase
from psfleet.optimizer.base import Older, Optimizer, Rate
from psfleet.parameter import Parameter
from psfleet.regularizer import WeightDecay
from psfleet.rules.base import Rule

__all__ = ["Adagrad"]


class Adagrad(Optimizer):
    """m += g^2; w -= learning_rate * g / (sqrt(m) + epsilon)."""

    def __init__(self, learning_rate: Rate, epsilon: float = 1e-6,
                 parameters: Iterable[Any] | None = None,
                 weight_decay: WeightDecay | float | None = None,
                 grad_clip: ClipGradBase | None = None, name: str | None = None,
                 initial_accumulator_value: float = 0.0, **older: Unpack[Older]) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, **older)
        self._rule = rules.Adagrad(epsilon, initial_accumulator_value)

    def rule(self, parameter: Parameter | None = None) -> Rule:
        """The rule of these hyperparameters."""
        return self._rule
