"""AMSGrad (Reddi, Kale and Kumar, 2018): Adam whose second moment never shrinks."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.adam import Adam
from psfleet.rules.optimizer_spec import OptimizerSpec, TorchSpec
from psfleet.rules.rule import DecayRate, Rule, Slot
from psfleet.validation.annotations import NonNegative

__all__ = ["AMSGrad"]


def amsgrad(w, g, m, v, highest, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[1] * m + h[2] * g
    v = h[3] * v + h[4] * (g * g)
    highest = max(highest, v)
    return w - h[0] * (m / (math.sqrt(highest) + h[5])), m, v, highest


@dataclass(frozen=True)
class AMSGrad(Rule):
    """Adam with the largest v so far in place of v; the bias of both moments is corrected."""

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: NonNegative = 1e-8
    name = "amsgrad"
    optimizer = OptimizerSpec(
        arguments="beta1 beta2 epsilon parameters weight_decay grad_clip lazy_mode name",
        older="regularization name lazy_mode",
    )
    torch = (
        TorchSpec(
            "Adam",
            "betas.0 betas.1 eps",
            "exp_avg exp_avg_sq max_exp_avg_sq",
            when={"amsgrad": True},
        ),
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (
            Slot("moment1", smallest="int8"),
            Slot("moment2", smallest="bfloat16"),
            Slot("moment2_max"),
        )

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return amsgrad

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return Adam(self.beta1, self.beta2, self.epsilon).scalars(learning_rate, step)
