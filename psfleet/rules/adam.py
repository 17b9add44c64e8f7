"""Adam (Kingma and Ba, 2015, algorithm 1)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from psfleet.rules.optimizer_spec import TorchSpec
from psfleet.rules.rule import DecayRate, Rule, Slot
from psfleet.validation.annotations import NonNegative, Range

__all__ = ["Adam"]


def adam(w, g, m, v, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[1] * m + h[2] * g
    v = h[3] * v + h[4] * (g * g)
    return w - h[0] * (m / (math.sqrt(v) + h[5])), m, v


@dataclass(frozen=True)
class Adam(Rule):
    """w -= lr * m^ / (sqrt(v^) + epsilon), with m^ and v^ the bias-corrected moments.

    The two corrections are folded into the rate and into epsilon, as in the paper's section 2:
    m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + e) = s / (1 - b1^t) * m / (sqrt(v) + e * s) with
    s = sqrt(1 - b2^t).

    `bias_correction_step` is added to t in the corrections. The reference's operator for sparse
    gradients behaves as if it were 1.

    `unscaled_rest`: in rows without a gradient, of a table that updates every row, the denominator is
    sqrt(v) + e in place of sqrt(v) + e * s, as in the reference's operator for sparse gradients. It
    reaches the same moments, and another update where e is not small beside sqrt(v).
    """

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: NonNegative = 1e-8
    bias_correction_step: Annotated[int, Range(0, 1)] = 0
    unscaled_rest: bool = False
    name = "adam"
    torch = (TorchSpec("Adam", "betas.0 betas.1 eps", "exp_avg exp_avg_sq"),)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment1", smallest="int8"), Slot("moment2", smallest="bfloat16"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return adam

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        step += self.bias_correction_step
        root = math.sqrt(1 - self.beta2**step)
        rate = learning_rate * root / (1 - self.beta1**step)
        return (rate, self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2, self.epsilon * root)

    def resting_scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        scalars = self.scalars(learning_rate, step)
        return (*scalars[:-1], self.epsilon) if self.unscaled_rest else scalars
