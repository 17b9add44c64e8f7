"""Rprop."""

from collections.abc import Iterable
from typing import Any, Unpack

from psfleet import rules
from psfleet.optimizer.arguments import as_documented
from psfleet.optimizer.clip import ClipGradBase
from psfleet.optimizer.optimizer import LegacyArguments, Optimizer, Rate
from psfleet.parameters.regularizer import WeightDecay

__all__ = ["Rprop"]


class Rprop(Optimizer):
    """w -= sign(g) * rate; each weight's rate grows while the sign stays and shrinks when it turns.

    Args:
        learning_rate: The first rate of every weight.
        learning_rate_range: Smallest and largest rate.
        etas: Factors on the rate: after a turn, and otherwise.
    """

    @as_documented("regularization", "name")
    def __init__(
        self,
        learning_rate: Rate = 0.001,
        learning_rate_range: tuple[float, float] = (1e-5, 50.0),
        parameters: Iterable[Any] | None = None,
        etas: tuple[float, float] = (0.5, 1.2),
        weight_decay: WeightDecay | float | None = None,
        grad_clip: ClipGradBase | None = None,
        name: str | None = None,
        **older: Unpack[LegacyArguments],
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, **older)
        self._rule = rules.Rprop(self.get_lr(), *learning_rate_range, *etas)
