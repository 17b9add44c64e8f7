"""Adagrad and its relatives, which sum up squared gradients, and proximal rules, for sparse weights.

- Adagrad (Duchi, Hazan and Singer, 2011), epsilon outside the root as in the reference, Paddle.
- DecayedAdagrad: Adagrad with a running mean instead of the sum, so that it forgets old gradients.
- RowWiseAdagrad: Adagrad with one sum for each row, which needs hardly more memory than the weights alone.
- Adadelta (Zeiler, 2012); the learning rate scales the update, as in the reference.

Proximal rules make small weights exactly 0:

- Ftrl: follow the regularized leader, proximal (McMahan et al., 2013), as the reference computes it.
- ProximalGD: gradient descent with soft thresholding after each step (Duchi and Singer, 2009).
- ProximalAdagrad: Adagrad with soft thresholding after each step (Duchi and Singer, 2009).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.validation.annotations import NonNegative, Range
from psfleet.core.engine.rules.rule import DecayRate, OptimizerSpec, Rule, Slot, TorchSpec

# The reference adds this to l1 and l2. Without it, a weight that has had no gradient would become 0 / 0.
_TINY = 1e-10


# h: learning rate, epsilon.
def adagrad(w, g, moment, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    moment = moment + g * g
    return w - h[0] * g / (math.sqrt(moment) + h[1]), moment


@dataclass(frozen=True)
class Adagrad(Rule):
    """Adagrad: the learning rate of each weight falls with the sum s of its squared gradients.

    s += g^2; w -= lr * g / (sqrt(s) + epsilon).
    """

    epsilon: NonNegative = 1e-6
    initial_accumulator_value: NonNegative = 0.0
    name = "adagrad"
    optimizer = OptimizerSpec(
        learning_rate=None,
        arguments="epsilon parameters weight_decay grad_clip name initial_accumulator_value",
        older="regularization name initial_accumulator_value",
    )
    torch = (
        TorchSpec(
            "Adagrad",
            "eps initial_accumulator_value",
            "sum",
            required={"lr_decay": 0},
            hint={"lr_decay": "use a scheduler of torch.optim.lr_scheduler"},
            rows=True,
        ),
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment", self.initial_accumulator_value, smallest="bfloat16"),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return adagrad

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, self.epsilon)


# h: learning rate, decay, 1 - decay, epsilon.
def decayed_adagrad(w, g, moment, h):  # type: ignore[no-untyped-def]
    moment = h[1] * moment + h[2] * (g * g)
    return w - h[0] * g / (math.sqrt(moment) + h[3]), moment


@dataclass(frozen=True)
class DecayedAdagrad(Rule):
    """Adagrad with a running mean s of the squared gradients instead of their sum.

    s = decay * s + (1 - decay) * g^2; w -= lr * g / (sqrt(s) + epsilon).
    """

    decay: DecayRate = 0.95
    epsilon: NonNegative = 1e-6
    name = "decayed_adagrad"
    optimizer = OptimizerSpec(learning_rate=None)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment", smallest="bfloat16"),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return decayed_adagrad

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, self.decay, 1 - self.decay, self.epsilon)


def rowwise_measure(w, g, moment, h):  # type: ignore[no-untyped-def]
    return (g * g,)


def rowwise_combine(squares, count, h):  # type: ignore[no-untyped-def]
    return (squares / count,)


def rowwise_adagrad(w, g, moment, h):  # type: ignore[no-untyped-def]
    moment = moment + h[2]
    return w - h[0] * g / (math.sqrt(moment) + h[1]), moment


@dataclass(frozen=True)
class RowWiseAdagrad(Rule):
    """Adagrad with one sum s for each row, which halves the memory of large tables.

    s += mean of g^2 over the row; w -= lr * g / (sqrt(s) + epsilon).

    A row of a dense array is a slice along the first axis. In a vector each element is a row.
    """

    epsilon: NonNegative = 1e-6
    initial_accumulator_value: NonNegative = 0.0
    name = "rowwise_adagrad"
    unit = "row"
    optimizer = OptimizerSpec(
        learning_rate=None,
        arguments="epsilon parameters weight_decay grad_clip name initial_accumulator_value",
        older="regularization name initial_accumulator_value",
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment", self.initial_accumulator_value, per_unit=True),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return rowwise_adagrad

    def measure(self) -> Callable[..., tuple[float, ...]]:
        return rowwise_measure

    def combine(self) -> Callable[..., tuple[float, ...]]:
        return rowwise_combine

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, self.epsilon)


# h: learning rate, rho, 1 - rho, epsilon.
def adadelta(w, g, squared_grad, squared_update, h):  # type: ignore[no-untyped-def]
    squared_grad = h[1] * squared_grad + h[2] * (g * g)
    update = math.sqrt((squared_update + h[3]) / (squared_grad + h[3])) * g
    squared_update = h[1] * squared_update + h[2] * (update * update)
    return w - h[0] * update, squared_grad, squared_update


@dataclass(frozen=True)
class Adadelta(Rule):
    """Adadelta: scales each update by the ratio of past updates to past gradients.

    u = g * sqrt((U + epsilon) / (G + epsilon)); w -= lr * u, with the running means G of g^2 and U of u^2.
    """

    rho: DecayRate = 0.95
    epsilon: NonNegative = 1e-6
    name = "adadelta"
    optimizer = OptimizerSpec(arguments="epsilon rho parameters weight_decay grad_clip name")
    torch = (TorchSpec("Adadelta", "rho eps", "square_avg acc_delta"),)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (
            Slot("avg_squared_grad", smallest="bfloat16"),
            Slot("avg_squared_update", smallest="bfloat16"),
        )

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return adadelta

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, self.rho, 1 - self.rho, self.epsilon)


# h: learning rate, l1, 2 * l2 * lr, 0, -lr_power, 1 / lr. `total` is m in the formula of `Ftrl`. `size` and
# copysign compute the soft thresholding of z: lr * sign(-z) * max(|z| - l1, 0).
def ftrl(w, g, squared, linear, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    total = squared + g * g
    root = math.sqrt(total)
    linear = linear + g - (root - math.sqrt(squared)) * h[5] * w
    size = max(abs(linear) - h[1], h[3]) * h[0]
    return math.copysign(size, -linear) / (root + h[2]), total, linear


# `ftrl` for any lr_power. The default of -0.5 has its own function, because that power is a square root.
def ftrl_power(w, g, squared, linear, h):  # type: ignore[no-untyped-def]  # inlined as text
    total = squared + g * g
    root = math.pow(total, h[4])
    linear = linear + g - (root - math.pow(squared, h[4])) * h[5] * w
    size = max(abs(linear) - h[1], h[3]) * h[0]
    return math.copysign(size, -linear) / (root + h[2]), total, linear


@dataclass(frozen=True)
class Ftrl(Rule):
    """FTRL-Proximal: the learning rates of Adagrad with l1 and l2, where l1 makes weights exactly 0.

    m = n + g^2; z += g - (m^-p - n^-p) / lr * w; w = (l1 * sign(z) - z) / (m^-p / lr + 2 * l2); n = m.

    p is `lr_power`, n the slot `squared` and z the slot `linear`. w is 0 where |z| <= l1. The kernel computes
    lr * (l1 * sign(z) - z) / (m^-p + 2 * l2 * lr), which needs one division instead of three.

    A row of a sparse parameter that has no gradient does not change. In a dense parameter, an update sets a
    weight that has never had a gradient to 0.
    """

    l1: NonNegative = 0.0
    l2: NonNegative = 0.0
    lr_power: Annotated[float, Range(high=0)] = -0.5
    name = "ftrl"
    optimizer = OptimizerSpec(learning_rate=None, lazy=True)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("squared", smallest="bfloat16"), Slot("linear", smallest="bfloat16"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return ftrl if self.lr_power == -0.5 else ftrl_power

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        if learning_rate <= 0:
            raise ConfigError(
                f"Ftrl divides by the learning rate, which is {learning_rate!r}; it must be above 0"
            )
        pull = 2 * (self.l2 + _TINY) * learning_rate
        return (learning_rate, self.l1 + _TINY, pull, 0.0, -self.lr_power, 1 / learning_rate)


# h: learning rate, lr * l1, 1 + lr * l2, 0. copysign and max compute soft thresholding,
# sign(target) * max(|target| - lr * l1, 0).
def proximal_gd(w, g, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    target = w - h[0] * g
    return (math.copysign(max(abs(target) - h[1], h[3]), target) / h[2],)


@dataclass(frozen=True)
class ProximalGD(Rule):
    """Gradient descent, then soft thresholding, which makes weights exactly 0.

    q = w - lr * g; w = sign(q) * max(|q| - lr * l1, 0) / (1 + lr * l2).
    """

    l1: NonNegative = 0.0
    l2: NonNegative = 0.0
    name = "proximal_gd"
    optimizer = OptimizerSpec(learning_rate=None)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return proximal_gd

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, learning_rate * self.l1, 1 + learning_rate * self.l2, 0.0)


# h: learning rate, lr * l1, 1 + lr * l2, 0, the smallest normal float32.
def proximal_adagrad(w, g, moment, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    moment = moment + g * g
    target = w - h[0] * g / math.sqrt(max(moment, h[4]))
    return math.copysign(max(abs(target) - h[1], h[3]), target) / h[2], moment


@dataclass(frozen=True)
class ProximalAdagrad(Rule):
    """Adagrad without epsilon, then soft thresholding, which makes weights exactly 0.

    s += g^2; q = w - lr * g / sqrt(s); w = sign(q) * max(|q| - lr * l1, 0) / (1 + lr * l2).

    If all gradients of a weight were 0, g / sqrt(s) is 0 / 0, which is replaced by 0. The operator of the
    reference (Paddle) makes such a weight NaN.
    """

    l1: NonNegative = 0.0
    l2: NonNegative = 0.0
    name = "proximal_adagrad"
    optimizer = OptimizerSpec(learning_rate=None)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment", smallest="bfloat16"),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return proximal_adagrad

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        smallest_normal = 2.0**-126  # of float32
        return (
            learning_rate,
            learning_rate * self.l1,
            1 + learning_rate * self.l2,
            0.0,
            smallest_normal,
        )
