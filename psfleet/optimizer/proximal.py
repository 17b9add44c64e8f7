"""Proximal gradient descent."""

from collections.abc import Iterable
from typing import Any, Unpack

from psfleet import rules
from psfleet.optimizer.arguments import as_documented
from psfleet.optimizer.clip import ClipGradBase
from psfleet.optimizer.optimizer import Older, Optimizer, Rate
from psfleet.parameters.regularizer import WeightDecay

__all__ = ["ProximalGD"]


class ProximalGD(Optimizer):
    """q = w - lr * g; w = sign(q) * max(|q| - lr * l1, 0) / (1 + lr * l2), lr the learning rate."""

    @as_documented("regularization", "name")
    def __init__(
        self,
        learning_rate: Rate,
        l1: float = 0.0,
        l2: float = 0.0,
        parameters: Iterable[Any] | None = None,
        weight_decay: WeightDecay | float | None = None,
        grad_clip: ClipGradBase | None = None,
        name: str | None = None,
        **older: Unpack[Older],
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, **older)
        self._rule = rules.ProximalGD(l1, l2)
