"""Adagrad (Duchi, Hazan and Singer, 2011), epsilon outside the root as in the reference."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.optimizer_spec import OptimizerSpec, TorchSpec
from psfleet.rules.rule import Rule, Slot
from psfleet.validation.annotations import NonNegative

__all__ = ["Adagrad"]


def adagrad(w, g, moment, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    moment = moment + g * g
    return w - h[0] * g / (math.sqrt(moment) + h[1]), moment


@dataclass(frozen=True)
class Adagrad(Rule):
    """s += g^2; w -= lr * g / (sqrt(s) + epsilon)."""

    epsilon: NonNegative = 1e-6
    initial_accumulator_value: NonNegative = 0.0
    name = "adagrad"
    optimizer = OptimizerSpec(
        learning_rate=None,
        arguments="epsilon parameters weight_decay grad_clip name initial_accumulator_value",
        older="regularization name initial_accumulator_value",
    )
    torch = (
        TorchSpec(
            "Adagrad",
            "eps initial_accumulator_value",
            "sum",
            required={"lr_decay": 0},
            hint={"lr_decay": "use a scheduler of torch.optim.lr_scheduler"},
            rows=True,
        ),
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment", self.initial_accumulator_value, smallest="bfloat16"),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return adagrad

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, self.epsilon)
