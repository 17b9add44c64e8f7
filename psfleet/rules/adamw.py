"""Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.adam import Adam
from psfleet.rules.optimizer_spec import TorchSpec
from psfleet.rules.rule import DecayRate, Rule, Slot
from psfleet.validation.annotations import NonNegative

__all__ = ["AdamW"]


def adamw(w, g, m, v, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[1] * m + h[2] * g
    v = h[3] * v + h[4] * (g * g)
    return h[6] * w - h[0] * (m / (math.sqrt(v) + h[5])), m, v


@dataclass(frozen=True)
class AdamW(Rule):
    """w *= 1 - lr * weight_decay, then Adam's update."""

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: NonNegative = 1e-8
    weight_decay: NonNegative = 0.01
    name = "adamw"
    torch = (
        TorchSpec(
            "AdamW",
            "betas.0 betas.1 eps weight_decay",
            "exp_avg exp_avg_sq",
            required={"amsgrad": False},
        ),
        TorchSpec(
            "Adam",
            "betas.0 betas.1 eps weight_decay",
            "exp_avg exp_avg_sq",
            {"decoupled_weight_decay": True},
            required={"amsgrad": False},
        ),
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment1", smallest="int8"), Slot("moment2", smallest="bfloat16"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return adamw

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        adam = Adam(self.beta1, self.beta2, self.epsilon).scalars(learning_rate, step)
        return (*adam, 1 - learning_rate * self.weight_decay)
