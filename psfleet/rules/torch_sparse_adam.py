"""Adam as torch.optim.SparseAdam computes it: epsilon is not scaled by the bias correction."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.adam import adam
from psfleet.rules.optimizer_spec import TorchSpec
from psfleet.rules.rule import DecayRate, Rule, Slot
from psfleet.validation.annotations import NonNegative

__all__ = ["TorchSparseAdam"]


@dataclass(frozen=True)
class TorchSparseAdam(Rule):
    """w -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon)."""

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: NonNegative = 1e-8
    name = "torch_sparse_adam"
    torch = (
        TorchSpec(
            "SparseAdam", "betas.0 betas.1 eps", "exp_avg exp_avg_sq", dense=False, rows=True
        ),
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment1", smallest="int8"), Slot("moment2", smallest="bfloat16"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return adam

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        rate = learning_rate * math.sqrt(1 - self.beta2**step) / (1 - self.beta1**step)
        return (rate, self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2, self.epsilon)
