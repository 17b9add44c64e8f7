"""NAdam (Dozat, 2016): Adam with Nesterov's momentum."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.optimizer_spec import OptimizerSpec, TorchSpec
from psfleet.rules.rule import DecayRate, Rule, Slot
from psfleet.validation.annotations import NonNegative

__all__ = ["NAdam"]


def nadam(w, g, m, v, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[2] * m + h[3] * g
    v = h[4] * v + h[5] * (g * g)
    return w - (h[0] * m + h[1] * g) / (math.sqrt(v) + h[6]), m, v


@dataclass(frozen=True)
class NAdam(Rule):
    """w -= lr * m' / (sqrt(v^) + epsilon), m' looking one step ahead in the schedule mu_t.

    mu_t = beta1 * (1 - 0.96^(t * momentum_decay) / 2);
    m' = mu_(t+1) * m / (1 - mu_1 ... mu_(t+1)) + (1 - mu_t) * g / (1 - mu_1 ... mu_t).
    """

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: NonNegative = 1e-8
    momentum_decay: NonNegative = 0.004
    name = "nadam"
    optimizer = OptimizerSpec(learning_rate=0.002)
    torch = (
        TorchSpec(
            "NAdam",
            "betas.0 betas.1 eps momentum_decay",
            "exp_avg exp_avg_sq",
            required={"decoupled_weight_decay": False},
        ),
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment1", smallest="int8"), Slot("moment2", smallest="bfloat16"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return nadam

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        root = math.sqrt(1 - self.beta2**step)
        now, following = self.momentum(step), self.momentum(step + 1)
        product = self.product(step)
        rate = learning_rate * root
        return (
            rate * following / (1 - product * following),
            rate * (1 - now) / (1 - product),
            self.beta1,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            self.epsilon * root,
        )

    def momentum(self, step: int) -> float:
        """mu of a step."""
        return self.beta1 * (1 - 0.5 * math.pow(0.96, step * self.momentum_decay))

    def product(self, step: int) -> float:
        """mu_1 * ... * mu_step; 0 once it is nothing beside 1, which takes few steps."""
        product = 1.0
        for earlier in range(1, step + 1):
            product *= self.momentum(earlier)
            if product < 1e-20:
                return 0.0
        return product
