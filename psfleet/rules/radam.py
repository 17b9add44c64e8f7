"""RAdam (Liu et al., 2020): Adam whose rate is rectified while the second moment is young."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.optimizer_spec import OptimizerSpec, TorchSpec
from psfleet.rules.rule import DecayRate, Rule, Slot
from psfleet.validation.annotations import NonNegative

__all__ = ["RAdam"]


def radam(w, g, m, v, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[2] * m + h[3] * g
    v = h[4] * v + h[5] * (g * g)
    return w - (h[0] * (m / (math.sqrt(v) + h[6])) + h[1] * m), m, v


@dataclass(frozen=True)
class RAdam(Rule):
    """w -= lr * r_t * m^ / (sqrt(v) + epsilon) * sqrt(1 - beta2^t) once rho_t > 5, before: lr * m^.

    rho_t = rho - 2 t beta2^t / (1 - beta2^t), rho = 2 / (1 - beta2) - 1;
    r_t^2 = (rho_t - 4)(rho_t - 2) rho / ((rho - 4)(rho - 2) rho_t).
    """

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: NonNegative = 1e-8
    name = "radam"
    optimizer = OptimizerSpec()
    torch = (
        TorchSpec(
            "RAdam",
            "betas.0 betas.1 eps",
            "exp_avg exp_avg_sq",
            required={"decoupled_weight_decay": False},
        ),
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment1", smallest="int8"), Slot("moment2", smallest="bfloat16"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return radam

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        power = self.beta2**step
        whole = 2 / (1 - self.beta2) - 1
        length = whole - 2 * step * power / (1 - power)
        rate, rectified, plain = learning_rate / (1 - self.beta1**step), 0.0, 1.0
        if length > 5:
            rectified = math.sqrt(
                (length - 4)
                * (length - 2)
                * whole
                * (1 - power)
                / ((whole - 4) * (whole - 2) * length)
            )
            plain = 0.0
        return (
            rate * rectified,
            rate * plain,
            self.beta1,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            self.epsilon,
        )
