"""Ftrl."""

from collections.abc import Iterable
from typing import Any, Unpack

from psfleet import rules
from psfleet.optimizer.arguments import as_documented
from psfleet.optimizer.clip import ClipGradBase
from psfleet.optimizer.optimizer import Older, Optimizer, Rate
from psfleet.parameters.regularizer import WeightDecay

__all__ = ["Ftrl"]


class Ftrl(Optimizer):
    """Follow the regularized leader; see psfleet.rules.ftrl for the formula.

    Rows of a sparse parameter without a gradient rest. (The dense rule sets a weight that has never
    had a gradient to zero.)
    """

    lazy = True

    @as_documented("regularization", "name")
    def __init__(
        self,
        learning_rate: Rate,
        l1: float = 0.0,
        l2: float = 0.0,
        lr_power: float = -0.5,
        parameters: Iterable[Any] | None = None,
        weight_decay: WeightDecay | float | None = None,
        grad_clip: ClipGradBase | None = None,
        name: str | None = None,
        **older: Unpack[Older],
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, **older)
        self._rule = rules.Ftrl(l1, l2, lr_power)
