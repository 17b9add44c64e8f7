"""Adadelta."""

from collections.abc import Iterable
from typing import Any, Unpack

from psfleet import rules
from psfleet.optimizer.arguments import as_documented
from psfleet.optimizer.clip import ClipGradBase
from psfleet.optimizer.optimizer import Older, Optimizer, Rate
from psfleet.parameters.regularizer import WeightDecay

__all__ = ["Adadelta"]


class Adadelta(Optimizer):
    """w -= learning_rate * g * sqrt((U + epsilon) / (G + epsilon)), with running means U of the
    squared updates and G of g^2.
    """

    @as_documented("regularization", "name")
    def __init__(
        self,
        learning_rate: Rate = 0.001,
        epsilon: float = 1e-6,
        rho: float = 0.95,
        parameters: Iterable[Any] | None = None,
        weight_decay: WeightDecay | float | None = None,
        grad_clip: ClipGradBase | None = None,
        name: str | None = None,
        **older: Unpack[Older],
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, **older)
        self._rule = rules.Adadelta(rho, epsilon)
