"""ASGD."""

from collections.abc import Iterable
from typing import Any, Unpack

from psfleet import rules
from psfleet.clip import ClipGradBase
from psfleet.optimizer.arguments import as_documented
from psfleet.optimizer.base import Older, Optimizer, Rate
from psfleet.regularizer import WeightDecay

__all__ = ["ASGD"]


class ASGD(Optimizer):
    """Stochastic average gradient: w -= learning_rate / n * d, d the sum of the last gradient of each
    of `batch_num` batches that take turns, n how many of them there were.

    In the state the gradients are `name.y_0` and so on. Rows of a distributed parameter that a
    batch does not name keep that batch's last gradient.
    """

    @as_documented("parameters", "weight_decay", "grad_clip", "multi_precision", "name")
    def __init__(
        self,
        learning_rate: Rate = 0.001,
        batch_num: int = 1,
        parameters: Iterable[Any] | None = None,
        weight_decay: WeightDecay | float | None = None,
        grad_clip: ClipGradBase | None = None,
        name: str | None = None,
        **older: Unpack[Older],
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, **older)
        self._rule = rules.ASGD(batch_num)
