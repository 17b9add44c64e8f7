"""Stochastic average gradient (Schmidt, Le Roux and Bach, 2013): the reference's ASGD."""

from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.optimizer_spec import OptimizerSpec
from psfleet.rules.rule import Rule, Slot
from psfleet.validation.annotations import PositiveInt

__all__ = ["ASGD"]


def asgd(w, g, total, kept, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    total = total - kept + g
    return w - h[0] * total, total, g


@dataclass(frozen=True)
class ASGD(Rule):
    """d += g - y_i; y_i = g; w -= lr / n * d, where i = (t - 1) % batch_num, n = min(t, batch_num).

    d is the sum of the last gradient of each of `batch_num` batches, which take turns. In a sparse
    table a row that a batch does not name keeps its y_i, and d stays the sum of the row's y. In the state
    the gradients are `name.y_0` and so on.

    Weight decay follows the reference's code and not its printed formula. The code adds the decay to each
    batch's gradient, g + weight_decay * w, before the gradient enters the sum d: what d keeps of a batch
    holds the decay at the weights of that time, and d is divided by n with it. The printed formula leaves
    the decay out of d and adds it to the quotient at the current weights: w -= learning_rate * (d / n +
    weight_decay * w). For `batch_num` 1 the two are the same.
    """

    batch_num: PositiveInt = 1
    name = "asgd"
    optimizer = OptimizerSpec(older="parameters weight_decay grad_clip multi_precision name")

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("d"), *(Slot(f"y_{i}") for i in range(self.batch_num)))

    @property
    def turns(self) -> int:
        return self.batch_num

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return asgd

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate / min(step, self.batch_num),)
