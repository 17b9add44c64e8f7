"""Rules whose learning rate follows the norms of a whole parameter, for training with large batches.

- LarsMomentum (LARS; You, Gitman and Ginsburg, 2017): momentum with a learning rate for each parameter.
- Lamb (You et al., 2020): Adam's direction, scaled by the norms of weights and direction.

Both need the norms before they can update the first weight. So they are examples of `measure` and `combine`,
and Lamb also of `advance` and `direction` (explained by `Rule`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.core.base.validation.annotations import NonNegative
from psfleet.core.engine.rules.rule import DecayRate, OptimizerSpec, Rule, Slot, UnitInterval


# The functions of LARS. h: learning rate, momentum, lars_coeff, weight decay, epsilon, the largest squared
# norm for which the plain learning rate is used (0, or infinity without weight decay), then the local rate.
def lars_measure(w, g, velocity, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    return w * w, g * g


def lars_combine(squared_w, squared_g, count, h):  # type: ignore[no-untyped-def]
    norm_w, norm_g = math.sqrt(squared_w), math.sqrt(squared_g)
    local = h[0] * h[2] * norm_w / (norm_g + h[3] * norm_w + h[4])
    return (local if squared_w > h[5] and squared_g > h[5] else h[0],)


def lars(w, g, velocity, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    velocity = h[1] * velocity + h[6] * (g + h[3] * w)
    return w - velocity, velocity


@dataclass(frozen=True)
class LarsMomentum(Rule):
    """Momentum with a local learning rate proportional to |w| / |g|, the ratio of the parameter's norms.

    v = mu * v + local * (g + wd * w); w -= v; local = lr * coeff * |w| / (|g| + wd * |w| + eps).

    The local rate is lr if a norm is 0 or if there is no weight decay.
    """

    momentum: UnitInterval = 0.9
    lars_coeff: NonNegative = 0.001
    lars_weight_decay: NonNegative = 0.0005
    epsilon: NonNegative = 0.0
    name = "lars_momentum"
    optimizer = OptimizerSpec(
        learning_rate=None,
        required="momentum",
        arguments="momentum lars_coeff lars_weight_decay parameters weight_decay grad_clip name "
        "exclude_from_weight_decay epsilon rescale_grad",
        decay="lars_weight_decay",
        doc="""Momentum with the local rate learning_rate * lars_coeff * |w| / (|g| + wd * |w| + epsilon).

        Args:
            lars_weight_decay: Weight decay wd, which is also added to the gradient.
            exclude_from_weight_decay: Texts. Parameters with one of these texts in their names have wd 0.
            rescale_grad: Factor on the gradients.
        """,
    )
    unit = "parameter"

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("velocity", smallest="int8"),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return lars

    def measure(self) -> Callable[..., tuple[float, ...]]:
        return lars_measure

    def combine(self) -> Callable[..., tuple[float, ...]]:
        return lars_combine

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        # Largest squared norm for which the plain learning rate is used: 0, or infinity without weight decay.
        always = 0.0 if self.lars_weight_decay else math.inf
        return (
            learning_rate,
            self.momentum,
            self.lars_coeff,
            self.lars_weight_decay,
            self.epsilon,
            always,
        )


# The functions of Lamb. h: learning rate, beta1, 1 - beta1, beta2, 1 - beta2, epsilon * s, s / (1 - beta1^t)
# with s = sqrt(1 - beta2^t), weight decay, 1, the largest squared norm for which the trust ratio is 1 (0, or
# infinity without weight decay), then the learning rate times the trust ratio, from `lamb_combine`.
def lamb_advance(w, g, m, v, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    return h[1] * m + h[2] * g, h[3] * v + h[4] * (g * g)


def lamb_direction(w, m, v, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    return (h[6] * (m / (math.sqrt(v) + h[5])) + h[7] * w,)


def lamb_measure(w, u, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    return w * w, u * u


def lamb_combine(squared_w, squared_u, count, h):  # type: ignore[no-untyped-def]
    trust = math.sqrt(squared_w) / math.sqrt(squared_u)
    return (h[0] * (trust if squared_w > h[9] and squared_u > h[9] else h[8]),)


def lamb(w, u, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    return (w - h[10] * u,)


@dataclass(frozen=True)
class Lamb(Rule):
    """Adam's direction with weight decay, scaled to the norm of the parameter's weights.

    u = m^ / (sqrt(v^) + epsilon) + weight_decay * w; w -= lr * |w| / |u| * u.

    The trust ratio |w| / |u| is 1 if a norm is 0 or if there is no weight decay.
    """

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: NonNegative = 1e-6
    weight_decay: NonNegative = 0.01
    name = "lamb"
    optimizer = OptimizerSpec(
        arguments="lamb_weight_decay beta1 beta2 epsilon parameters grad_clip exclude_from_weight_decay_fn "
        "name weight_decay",
        older="regularization exclude_from_weight_decay_fn name",
        fields={"lamb_weight_decay": "weight_decay"},
        decay="weight_decay",
        doc="""Adam's direction plus lamb_weight_decay * w, scaled to the norm of w.

        Args:
            weight_decay: Regularization that every optimizer has: added to the gradient, in addition to
                lamb_weight_decay.
            exclude_from_weight_decay_fn: Function from a parameter to True if its weights must not decay. Its
                direction is then not scaled either, as in the reference (Paddle).
        """,
    )
    unit = "parameter"

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment1", smallest="int8"), Slot("moment2", smallest="bfloat16"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return lamb

    def advance(self) -> Callable[..., tuple[float, ...]]:
        return lamb_advance

    def direction(self) -> Callable[..., tuple[float, ...]]:
        return lamb_direction

    def measure(self) -> Callable[..., tuple[float, ...]]:
        return lamb_measure

    def combine(self) -> Callable[..., tuple[float, ...]]:
        return lamb_combine

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        root = math.sqrt(1 - self.beta2**step)
        # Largest squared norm for which the trust ratio is 1: 0, or infinity without weight decay.
        always = 0.0 if self.weight_decay else math.inf
        return (
            learning_rate,
            self.beta1,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            self.epsilon * root,
            root / (1 - self.beta1**step),
            self.weight_decay,
            1.0,
            always,
        )
