"""RMSProp (Tieleman and Hinton, 2012), as Paddle and as torch compute it, and Rprop.

- RMSProp: plain, with momentum, or centered. Epsilon is inside the root, and the learning rate inside the
  momentum, as in the reference, Paddle.
- TorchRMSprop: torch.optim.RMSprop, with epsilon outside the root and the learning rate outside the momentum.
- Rprop (Riedmiller and Braun, 1993): a learning rate for each weight that follows the sign of its gradient.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.validation.annotations import NonNegative, Positive, Range
from psfleet.core.engine.rules.rule import (
    DecayRate,
    OptimizerRules,
    OptimizerSpec,
    Rule,
    Slot,
    TorchSpec,
    UnitInterval,
)


# h: learning rate, rho, 1 - rho, epsilon, momentum. Same for `rmsprop_centered`.
def rmsprop(w, g, momentum, mean_square, h):  # type: ignore[no-untyped-def]
    mean_square = h[1] * mean_square + h[2] * (g * g)
    momentum = h[4] * momentum + h[0] * g / math.sqrt(mean_square + h[3])
    return w - momentum, momentum, mean_square


def rmsprop_centered(w, g, momentum, mean_square, mean_grad, h):  # type: ignore[no-untyped-def]
    mean_square = h[1] * mean_square + h[2] * (g * g)
    mean_grad = h[1] * mean_grad + h[2] * g
    variance = mean_square - mean_grad * mean_grad
    momentum = h[4] * momentum + h[0] * g / math.sqrt(variance + h[3])
    return w - momentum, momentum, mean_square, mean_grad


@dataclass(frozen=True)
class RMSProp(Rule):
    """RMSProp: divides the gradient by the root of the running mean s of its square.

    s = rho * s + (1 - rho) * g^2; v = momentum * v + lr * g / sqrt(s + epsilon); w -= v.

    Epsilon is inside the root and the learning rate inside v, as in the reference (Paddle). If centered, s in
    the root is replaced by the variance, s minus the square of the running mean of g.
    """

    rho: DecayRate = 0.95
    epsilon: NonNegative = 1e-6
    momentum: UnitInterval = 0.0
    centered: bool = False
    name = "rmsprop"
    optimizer = OptimizerSpec(learning_rate=None)

    @property
    def slots(self) -> tuple[Slot, ...]:
        # If centered, both means stay float32: rounded, the mean of the squares might be below the square of
        # the mean, and the root would be NaN.
        if self.centered:
            return (Slot("momentum", smallest="int8"), Slot("mean_square"), Slot("mean_grad"))
        return (Slot("momentum", smallest="int8"), Slot("mean_square", smallest="bfloat16"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return rmsprop_centered if self.centered else rmsprop

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, self.rho, 1 - self.rho, self.epsilon, self.momentum)


# h: learning rate, alpha, 1 - alpha, epsilon, momentum. Same for `torch_rmsprop_centered`.
def torch_rmsprop(w, g, mean_square, momentum, h):  # type: ignore[no-untyped-def]
    mean_square = h[1] * mean_square + h[2] * (g * g)
    momentum = h[4] * momentum + g / (math.sqrt(mean_square) + h[3])
    return w - h[0] * momentum, mean_square, momentum


def torch_rmsprop_centered(w, g, mean_square, momentum, mean_grad, h):  # type: ignore[no-untyped-def]
    mean_square = h[1] * mean_square + h[2] * (g * g)
    mean_grad = mean_grad + h[2] * (g - mean_grad)
    variance = mean_square - mean_grad * mean_grad
    momentum = h[4] * momentum + g / (math.sqrt(variance) + h[3])
    return w - h[0] * momentum, mean_square, momentum, mean_grad


@dataclass(frozen=True)
class TorchRMSprop(Rule):
    """RMSProp as torch.optim.RMSprop computes it, with epsilon outside the root and the rate outside b.

    s = alpha * s + (1 - alpha) * g^2; b = momentum * b + g / (sqrt(s) + epsilon); w -= lr * b.

    If centered, s in the root is replaced by the variance, s minus the square of the running mean of g.
    """

    alpha: DecayRate = 0.99
    epsilon: NonNegative = 1e-8
    momentum: NonNegative = 0.0
    centered: bool = False
    name = "torch_rmsprop"
    torch = (
        TorchSpec("RMSprop", "alpha eps momentum centered", "square_avg momentum_buffer grad_avg"),
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        # If centered, both means stay float32: rounded, the mean of the squares might be below the square of
        # the mean, and the root would be NaN.
        if self.centered:
            return (Slot("mean_square"), Slot("momentum", smallest="int8"), Slot("mean_grad"))
        return (Slot("mean_square", smallest="bfloat16"), Slot("momentum", smallest="int8"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return torch_rmsprop_centered if self.centered else torch_rmsprop

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, self.alpha, 1 - self.alpha, self.epsilon, self.momentum)


# h: eta_minus, eta_plus, smallest rate, largest rate, 0. `before` is the gradient of the step before, or 0 if
# the sign turned in that step. The product is then 0, and the rate stays the same for a step.
def rprop(w, g, before, rate, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    product = g * before
    g = h[4] if product < h[4] else g
    rate = (
        min(rate * h[1], h[3])
        if product > h[4]
        else (max(rate * h[0], h[2]) if product < h[4] else rate)
    )
    return w - (rate if g > h[4] else (-rate if g < h[4] else h[4])), g, rate


def _rprop_rules(
    kind: type["Rprop"],
    fields: Mapping[str, float],
    rate: float,
    lazy: bool,
    learning_rate_range: tuple[float, float],
    etas: tuple[float, float],
) -> OptimizerRules:
    return OptimizerRules(kind(rate, *learning_rate_range, *etas))


@dataclass(frozen=True)
class Rprop(Rule):
    """Rprop: uses only the sign of the gradient, with a learning rate for each weight.

    w -= sign(g) * rate. The rate is multiplied by `eta_plus` while the sign stays the same and by `eta_minus`
    when the sign turns; in a step where it turns, the gradient is replaced by 0. Each weight's rate starts at
    `first_rate` (`learning_rate` in the reference, Paddle). The learning rate of a push is not used.
    """

    first_rate: Positive = 0.001
    smallest: NonNegative = 1e-5
    largest: NonNegative = 50.0
    eta_minus: Annotated[float, Range(0, 1, low_open=True, high_open=True)] = 0.5
    eta_plus: Annotated[float, Range(1, low_open=True)] = 1.2
    name = "rprop"
    optimizer = OptimizerSpec(
        arguments="learning_rate_range parameters etas weight_decay grad_clip name",
        options={
            "learning_rate_range": (tuple[float, float], (1e-5, 50.0)),
            "etas": (tuple[float, float], (0.5, 1.2)),
        },
        rules=_rprop_rules,
        doc="""Rprop: w -= sign(g) * rate. A rate grows while the sign of g stays, and shrinks when it turns.

        Args:
            learning_rate: Initial rate of every weight.
            learning_rate_range: Smallest and largest rate.
            etas: Factor on the rate when the sign of g has turned, and factor while it stays the same.
        """,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.smallest <= self.first_rate <= self.largest:
            raise ConfigError(
                f"Rprop: the first rate is {self.first_rate!r}; it must be in the range of rates, "
                f"[{self.smallest!r}, {self.largest!r}]"
            )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (
            Slot("prevs", smallest="bfloat16"),
            Slot("learning_rates", self.first_rate, smallest="bfloat16"),
        )

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return rprop

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (self.eta_minus, self.eta_plus, self.smallest, self.largest, 0.0)
