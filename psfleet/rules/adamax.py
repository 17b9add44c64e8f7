"""Adamax (Kingma and Ba, 2015, algorithm 2), epsilon inside the maximum as in the reference."""

from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.optimizer_spec import OptimizerSpec
from psfleet.rules.rule import DecayRate, Rule, Slot
from psfleet.validation.annotations import NonNegative

__all__ = ["Adamax"]


def adamax(w, g, m, norm, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[1] * m + h[2] * g
    norm = max(abs(g), h[3] * norm + h[4])
    return w - h[0] * (m / norm), m, norm


@dataclass(frozen=True)
class Adamax(Rule):
    """u = max(|g|, beta2 * u + epsilon); w -= lr / (1 - beta1^t) * m / u."""

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: NonNegative = 1e-8
    name = "adamax"
    optimizer = OptimizerSpec()

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment", smallest="int8"), Slot("inf_norm", smallest="bfloat16"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return adamax

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        rate = learning_rate / (1 - self.beta1**step)
        return (rate, self.beta1, 1 - self.beta1, self.beta2, self.epsilon)
