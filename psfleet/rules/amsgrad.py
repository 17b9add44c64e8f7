"""AMSGrad (Reddi, Kale and Kumar, 2018): Adam whose second moment never shrinks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from psfleet.rules.adam import Adam
from psfleet.rules.rule import Rule, Slot, check_range

__all__ = ["AMSGrad"]


def amsgrad(w, g, m, v, highest, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[1] * m + h[2] * g
    v = h[3] * v + h[4] * (g * g)
    highest = max(highest, v)
    return w - h[0] * (m / (math.sqrt(highest) + h[5])), m, v, highest


@dataclass(frozen=True)
class AMSGrad(Rule):
    """Adam with the largest v so far in place of v; the bias of both moments is corrected."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    name: ClassVar[str] = "amsgrad"

    def __post_init__(self) -> None:
        check_range("AMSGrad", "beta1", self.beta1, 0, 1, high_open=True)
        check_range("AMSGrad", "beta2", self.beta2, 0, 1, high_open=True)
        check_range("AMSGrad", "epsilon", self.epsilon, 0, math.inf)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment1"), Slot("moment2"), Slot("moment2_max"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return amsgrad

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return Adam(self.beta1, self.beta2, self.epsilon).scalars(learning_rate, step)
