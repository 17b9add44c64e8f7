"""ASGD."""

from collections.abc import Iterable
from typing import Any, Unpack

from psfleet import rules
from psfleet.optimizer.arguments import as_documented
from psfleet.optimizer.clip import ClipGradBase
from psfleet.optimizer.optimizer import Older, Optimizer, Rate
from psfleet.parameters.regularizer import WeightDecay

__all__ = ["ASGD"]


class ASGD(Optimizer):
    """Stochastic average gradient: w -= learning_rate / n * d, d the sum of the last gradient of each
    of `batch_num` batches that take turns, n how many of them there were.

    Weight decay follows the reference's code and not its printed formula. The code adds the decay to each
    batch's gradient, g + weight_decay * w, before the gradient enters the sum d: what d keeps of a batch
    holds the decay at the weights of that time, and d is divided by n with it. The printed formula leaves
    the decay out of d and adds it to the quotient at the current weights: w -= learning_rate * (d / n +
    weight_decay * w). For `batch_num` 1 the two are the same.

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
