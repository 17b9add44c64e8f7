"""Adam as torch.optim.SparseAdam computes it: epsilon is not scaled by the bias correction."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from psfleet.rules.adam import adam
from psfleet.rules.rule import Rule, Slot, check_range

__all__ = ["TorchSparseAdam"]


@dataclass(frozen=True)
class TorchSparseAdam(Rule):
    """w -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon)."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    name: ClassVar[str] = "torch_sparse_adam"

    def __post_init__(self) -> None:
        check_range("SparseAdam", "beta1", self.beta1, 0, 1, high_open=True)
        check_range("SparseAdam", "beta2", self.beta2, 0, 1, high_open=True)
        check_range("SparseAdam", "epsilon", self.epsilon, 0, math.inf)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment1"), Slot("moment2"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return adam

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        rate = learning_rate * math.sqrt(1 - self.beta2**step) / (1 - self.beta1**step)
        return (rate, self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2, self.epsilon)
