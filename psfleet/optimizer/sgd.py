"""SGD and Momentum."""

from collections.abc import Iterable
from typing import Any, Unpack

from psfleet import rules
from psfleet.optimizer.arguments import as_documented
from psfleet.optimizer.clip import ClipGradBase
from psfleet.optimizer.optimizer import Older, Optimizer, Rate
from psfleet.parameters.regularizer import WeightDecay

__all__ = ["SGD", "Momentum"]


class SGD(Optimizer):
    """w -= learning_rate * g. Arguments as Optimizer."""

    _rule = rules.SGD()


class Momentum(Optimizer):
    """v = momentum * v + g; w -= learning_rate * v, or * (g + momentum * v) with `use_nesterov`.

    `rescale_grad` has no effect, as in the reference's CPU operator.
    """

    @as_documented("use_nesterov", "regularization", "name")
    def __init__(
        self,
        learning_rate: Rate = 0.001,
        momentum: float = 0.9,
        parameters: Iterable[Any] | None = None,
        use_nesterov: bool = False,
        weight_decay: WeightDecay | float | None = None,
        grad_clip: ClipGradBase | None = None,
        name: str | None = None,
        rescale_grad: float = 1.0,
        **older: Unpack[Older],
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, **older)
        self._rule = rules.Momentum(momentum, use_nesterov)
