"""Adam for sparse rows that makes up for the steps that a row has missed (sparse_mode="catch-up").

Dense Adam also moves a weight in steps without a gradient: its moments decay, and the weight drifts. Doing
that for every row of a large table in every step ("full") costs far more than the push itself. This rule
updates only the rows of a push, and first computes the steps that each row has missed since its last update:

    step               10          11          12          13
    row 7, full        gradient    drift       drift       gradient
    row 7, catch-up    gradient                            drift, drift, gradient
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.validation.annotations import NonNegative
from psfleet.core.engine.rules.adam import Adam
from psfleet.core.engine.rules.rule import DecayRate, Rule, Slot

# A step has up to 64 bits, but a slot is a float32, which represents whole numbers only up to 2**24 exactly.
# So the step of a row's last update is stored as three digits of this base: top, high, low.
_BASE = 2**24
_ERROR = 1e-6  # the missed steps beyond `limit` may move a weight by this many learning rates


# h: the six numbers of `adam`, epsilon, the digits of this step (7 to 9), _BASE, 1, limit, 0, then 1 -
# beta1^t, 1 - beta2^t and the learning rate of this step. The slots behind v have one value for the row, from
# its last update: the digits of the step, q1 = 1 - beta1^t, q2 = 1 - beta2^t, and the learning rate.
#
# `gap` is the number of missed steps. Each pass of the loop is a step of dense Adam with g = 0:
#
#     m = beta1 * m             v = beta2 * v             the moments decay
#     1 - beta1^(t+1) = beta1 * (1 - beta1^t) + 1 - beta1          q1 and q2 advance a step, without a power
#     w = w - rate * sqrt(q2) / q1 * m / (sqrt(v) + epsilon * sqrt(q2))
#
# Steps beyond `limit` hardly move w. For these steps only the moments decay, by a power.
def adam_catch_up(w, g, m, v, top, high, low, q1, q2, rate, h):  # type: ignore[no-untyped-def]
    gap = ((h[7] - top) * h[10] + (h[8] - high)) * h[10] + (h[9] - low) - h[11]
    if gap > h[13]:  # the same for a whole row: without it no row would be vectorised
        steps = min(gap, h[12])
        count = h[13]
        while count < steps and v > h[13]:
            m = h[1] * m
            v = h[3] * v
            q1 = h[1] * q1 + h[2]
            q2 = h[3] * q2 + h[4]
            root = math.sqrt(q2)
            w = w - rate * root / q1 * (m / (math.sqrt(v) + h[6] * root))
            count = count + h[11]
        if gap > steps:
            m = math.pow(h[1], gap - steps) * m
            v = math.pow(h[3], gap - steps) * v
    m = h[1] * m + h[2] * g
    v = h[3] * v + h[4] * (g * g)
    w = w - h[0] * (m / (math.sqrt(v) + h[5]))
    return w, m, v, h[7], h[8], h[9], h[14], h[15], h[16]


@dataclass(frozen=True)
class AdamCatchUp(Rule):
    """Adam that updates only the rows of a push, and first makes up for the steps that a row has missed.

    A row keeps the step of its last update. At its next update, the steps that it has missed are computed one
    by one with a gradient of 0, as the dense rule computes them: moments decay, and the weight drifts. After
    the update the row has the values that dense Adam would give it, except for rounding and the bound below.
    Pulls, snapshots and `state_dict` only read: they return the row as of its last update, which differs from
    the row of the dense rule by at most `drift` learning rates.

    The drift of missed step j is at most rate * A * r^j / (1 - beta1), with r = beta1 / sqrt(beta2) and A =
    (1 - beta1) / sqrt((1 - beta2) * (1 - beta1^2 / beta2)). A bounds |m| / sqrt(v) by Cauchy's inequality,
    and 1 / (1 - beta1) bounds the correction 1 / (1 - beta1^t), which is soon 1. So after `limit` missed
    steps, a number that follows from the betas (195 for the defaults), the remaining drift is below 1e-6 of
    the learning rate. The moments then decay by the remaining steps at once.

    The dense rule is that of sparse_mode="full". sparse_mode="reference" differs from it, because it leaves
    epsilon unscaled in rows without a gradient, which this rule does not imitate.

    The missed steps use the learning rate of the row's last update and no regularization. Step counters have
    64 bits.
    """

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: NonNegative = 1e-8
    name = "adam_catch_up"
    unit = "row"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta1**2 >= self.beta2:
            raise ConfigError(
                f"AdamCatchUp needs beta1^2 < beta2, else the drift of a row has no "
                f"bound; beta1 is {self.beta1!r} and beta2 is {self.beta2!r}"
            )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (
            Slot("moment1", smallest="bfloat16"),
            Slot("moment2", smallest="bfloat16"),
            *(
                Slot(name, per_unit=True)
                for name in (
                    "last_step_top",
                    "last_step_high",
                    "last_step_low",
                    "correction1",
                    "correction2",
                    "last_rate",
                )
            ),
        )

    @property
    def limit(self) -> int:
        """Largest number of missed steps that are computed one by one."""
        if self.beta1 == 0:
            return 1
        r, amplitude = self._decline()
        return max(
            1, math.ceil(math.log(_ERROR * (1 - r) * (1 - self.beta1) / amplitude) / math.log(r))
        )

    @property
    def drift(self) -> float:
        """Largest drift of a row that never has a gradient again, in learning rates, long after step 1.

        66 for the default betas. The worst gradients, which grow by beta2 / beta1 in each step, reach it;
        after random gradients the drift is below 10 or so.
        """
        r, amplitude = self._decline()
        return amplitude * r / (1 - r)

    def _decline(self) -> tuple[float, float]:
        """Return r and A of the bound in the class's docstring."""
        r = self.beta1 / math.sqrt(self.beta2)
        return r, (1 - self.beta1) / math.sqrt((1 - self.beta2) * (1 - r * r))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return adam_catch_up

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        adam = Adam(self.beta1, self.beta2, self.epsilon).scalars(learning_rate, step)
        above, low = divmod(step, _BASE)
        top, high = divmod(above, _BASE)
        return (
            *adam,
            self.epsilon,
            top,
            high,
            low,
            _BASE,
            1.0,
            self.limit,
            0.0,
            1 - self.beta1**step,
            1 - self.beta2**step,
            learning_rate,
        )
