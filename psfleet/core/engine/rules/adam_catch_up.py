"""Adam for sparse rows that makes up for the steps a row has missed."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.validation.annotations import NonNegative
from psfleet.core.engine.rules.adam import Adam
from psfleet.core.engine.rules.rule import DecayRate, Rule, Slot

_BASE = 2**24  # float32 holds whole numbers up to here: a step is kept as three digits of this base
_ERROR = 1e-6  # of the learning rate: what the missed steps beyond `limit` may move a weight


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
    """Adam after which a touched row is where a dense Adam would have it, but for rounding and a bound.

    A row keeps the step of its last update. When it is updated again, the steps that it has missed
    are made one by one with a zero gradient, as the dense rule makes them: moments decay, the weight
    drifts. Pulls, saving and `state_dict` only read: they give the row as its last update left it,
    which differs from the dense rule's by at most `drift` learning rates.

    The drift of missed step j is at most rate * A * r^j / (1 - beta1), with r = beta1 / sqrt(beta2)
    and A = (1 - beta1) / sqrt((1 - beta2) * (1 - beta1^2 / beta2)), which bounds |m| / sqrt(v) by
    Cauchy's inequality; the last factor is 1 once beta1^t is nothing beside 1. So after `limit`
    steps, chosen from the betas (195 for the defaults), what is left of the drift is below 1e-6 of
    the learning rate; the moments then decay in one go.

    The dense rule is what the mode "full" gives. The reference's operator, and the mode "reference", leave
    epsilon unscaled in rows without a gradient; nothing here makes up for that.

    The missed steps are made at the learning rate of the row's last update, and without
    regularization. Step counters have 64 bits.
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
        """Number of missed steps that are made one by one."""
        if self.beta1 == 0:
            return 1
        r, most = self._decline()
        return max(1, math.ceil(math.log(_ERROR * (1 - r) * (1 - self.beta1) / most) / math.log(r)))

    @property
    def drift(self) -> float:
        """Largest drift of a row that rests for ever, in learning rates, long after step 1.

        66 for the default betas; the worst gradients, growing by beta2 / beta1 in each step, reach it,
        and a row whose gradients come to rest after random ones stays below 10 or so.
        """
        r, most = self._decline()
        return most * r / (1 - r)

    def _decline(self) -> tuple[float, float]:
        """(r, A) of the bound above."""
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
