"""Adagrad and its relatives."""

from collections.abc import Iterable
from typing import Any, Unpack

from psfleet import rules
from psfleet.optimizer.arguments import as_documented
from psfleet.optimizer.clip import ClipGradBase
from psfleet.optimizer.optimizer import Older, Optimizer, Rate
from psfleet.parameters.regularizer import WeightDecay

__all__ = ["Adagrad", "DecayedAdagrad", "RowWiseAdagrad"]


class Adagrad(Optimizer):
    """m += g^2; w -= learning_rate * g / (sqrt(m) + epsilon)."""

    @as_documented("regularization", "name", "initial_accumulator_value")
    def __init__(
        self,
        learning_rate: Rate,
        epsilon: float = 1e-6,
        parameters: Iterable[Any] | None = None,
        weight_decay: WeightDecay | float | None = None,
        grad_clip: ClipGradBase | None = None,
        name: str | None = None,
        initial_accumulator_value: float = 0.0,
        **older: Unpack[Older],
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, **older)
        self._rule = rules.Adagrad(epsilon, initial_accumulator_value)


class DecayedAdagrad(Optimizer):
    """m = decay * m + (1 - decay) * g^2; w -= learning_rate * g / (sqrt(m) + epsilon)."""

    @as_documented("regularization", "name")
    def __init__(
        self,
        learning_rate: Rate,
        decay: float = 0.95,
        epsilon: float = 1e-6,
        parameters: Iterable[Any] | None = None,
        weight_decay: WeightDecay | float | None = None,
        grad_clip: ClipGradBase | None = None,
        name: str | None = None,
        **older: Unpack[Older],
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, **older)
        self._rule = rules.DecayedAdagrad(decay, epsilon)


class RowWiseAdagrad(Optimizer):
    """Adagrad with one m for each row, the mean of g^2 over the row: half the memory of large tables."""

    @as_documented("regularization", "name", "initial_accumulator_value")
    def __init__(
        self,
        learning_rate: Rate,
        epsilon: float = 1e-6,
        parameters: Iterable[Any] | None = None,
        weight_decay: WeightDecay | float | None = None,
        grad_clip: ClipGradBase | None = None,
        name: str | None = None,
        initial_accumulator_value: float = 0.0,
        **older: Unpack[Older],
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, **older)
        self._rule = rules.RowwiseAdagrad(epsilon, initial_accumulator_value)
