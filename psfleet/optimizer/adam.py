"""Adam and its family."""

from collections.abc import Iterable
from typing import Any, Unpack

from psfleet import rules
from psfleet.clip import ClipGradBase
from psfleet.optimizer.base import Older, Optimizer, Rate
from psfleet.parameter import Parameter
from psfleet.regularizer import WeightDecay
from psfleet.rules.base import Rule

__all__ = ["Adam"]


class Adam(Optimizer):
    """w -= learning_rate * m^ / (sqrt(v^) + epsilon), with bias-corrected moments.

    Args:
        lazy_mode: Rows of a sparse parameter that have no gradient in a step rest: their moments do
            not decay and they do not drift. Parameters with rows for any id are always lazy.
    """

    def __init__(self, learning_rate: Rate = 0.001, beta1: float = 0.9, beta2: float = 0.999,
                 epsilon: float = 1e-8, parameters: Iterable[Any] | None = None,
                 weight_decay: WeightDecay | float | None = None,
                 grad_clip: ClipGradBase | None = None, lazy_mode: bool = False,
                 name: str | None = None, **older: Unpack[Older]) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, **older)
        self.lazy = lazy_mode
        self._rule = rules.Adam(beta1, beta2, epsilon)

    def rule(self, parameter: Parameter | None = None) -> Rule:
        """The rule of these hyperparameters."""
        return self._rule
