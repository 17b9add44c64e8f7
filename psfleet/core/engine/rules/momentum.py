"""Stochastic gradient descent: plain, with momentum, averaged; and exact sums.

The shortest rules are here, so read this file before you write a rule.

- SGD: stochastic gradient descent.
- Momentum: stochastic gradient descent with momentum, plain or Nesterov's.
- DGCMomentum: the servers' part of deep gradient compression (Lin et al., 2018).
- ASGD: the stochastic average gradient (Schmidt, Le Roux and Bach, 2013), named as in the reference, Paddle.
- ExactSum: sums in twice the precision of float32, for psfleet's own counts.
"""

from collections.abc import Callable
from dataclasses import dataclass

from psfleet.core.base.validation.annotations import PositiveInt
from psfleet.core.engine.rules.rule import OptimizerSpec, Rule, Slot, TorchSpec, UnitInterval


# h: learning rate.
def sgd(w, g, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    return (w - h[0] * g,)


@dataclass(frozen=True)
class SGD(Rule):
    """Stochastic gradient descent: w -= learning_rate * g."""

    name = "sgd"
    optimizer = OptimizerSpec()
    torch = (TorchSpec("SGD", when={"momentum": 0}, rows=True),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return sgd

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate,)


# h: learning rate, momentum.
def momentum(w, g, velocity, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    velocity = h[1] * velocity + g
    return w - h[0] * velocity, velocity


def nesterov(w, g, velocity, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    velocity = h[1] * velocity + g
    return w - h[0] * (g + h[1] * velocity), velocity


@dataclass(frozen=True)
class Momentum(Rule):
    """Momentum: follows a velocity v that sums up gradients and decays by mu in each step.

    v = mu * v + g; w -= lr * v. With Nesterov's momentum, w -= lr * (g + mu * v).

    The learning rate is not part of v, so a new learning rate takes full effect at once. The optimizer's
    `rescale_grad` has no effect, as in the CPU operator of the reference (Paddle).
    """

    momentum: UnitInterval = 0.9
    use_nesterov: bool = False
    name = "momentum"
    optimizer = OptimizerSpec(
        arguments="momentum parameters use_nesterov weight_decay grad_clip name rescale_grad",
        older="use_nesterov regularization name",
        ignored={"rescale_grad": 1.0},
    )
    torch = (
        TorchSpec(
            "SGD",
            "momentum nesterov",
            "momentum_buffer",
            required={"dampening": 0},
            rows=True,
            every_row=True,  # torch's velocity keeps moving the rows that it has ever touched
        ),
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("velocity", smallest="int8"),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return nesterov if self.use_nesterov else momentum

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate, self.momentum)


# h: learning rate, factor on the velocity, factor on g in the velocity, weight of the velocity in the update,
# weight of g in the update. After `rampup_begin_step` updates h is (learning rate, 1, 0, 0, 1): the velocity
# does not change, and the update is that of SGD.
def dgc_momentum(w, g, velocity, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    velocity = h[1] * velocity + h[2] * g
    return w - h[0] * (h[3] * velocity + h[4] * g), velocity


@dataclass(frozen=True)
class DGCMomentum(Rule):
    """Momentum for the first `rampup_begin_step` updates, and then w -= lr * g.

    From then on workers send compressed gradients that already contain the momentum, so the velocity on the
    servers no longer changes.
    """

    momentum: UnitInterval = 0.9
    rampup_begin_step: int = 0
    use_nesterov: bool = False
    name = "dgc_momentum"

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("velocity", smallest="int8"),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return dgc_momentum

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        if step > self.rampup_begin_step:
            return (learning_rate, 1.0, 0.0, 0.0, 1.0)
        ahead = (self.momentum, 1.0) if self.use_nesterov else (1.0, 0.0)
        return (learning_rate, self.momentum, 1.0, *ahead)


# h: learning rate / n. `previous` is the slot y_i whose turn it is; g replaces it in the sum.
def asgd(w, g, total, previous, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    total = total - previous + g
    return w - h[0] * total, total, g


@dataclass(frozen=True)
class ASGD(Rule):
    """Stochastic average gradient: follows the mean of the last gradients of `batch_num` batches.

    d += g - y_i; y_i = g; w -= lr / n * d, where i = (t - 1) % batch_num and n = min(t, batch_num).

    Batches take turns: y_i is the last gradient of batch i, and d is the sum of all y. A row of a sparse
    table that a batch does not name keeps its y_i and d. In the state the gradients are `name.y_0` and so on.

    Weight decay follows the code of the reference (Paddle) and not its printed formula. The code adds the
    decay to each batch's gradient, g + weight_decay * w, before the gradient is added to d. So the part of a
    batch in d contains the decay of that batch's weights, and is divided by n. The printed formula instead
    adds the decay of the current weights to the quotient: w -= learning_rate * (d / n + weight_decay * w).
    For `batch_num` 1 both are the same.
    """

    batch_num: PositiveInt = 1
    name = "asgd"
    optimizer = OptimizerSpec(older="parameters weight_decay grad_clip multi_precision name")

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("d"), *(Slot(f"y_{i}") for i in range(self.batch_num)))

    @property
    def turns(self) -> int:
        return self.batch_num

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return asgd

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate / min(step, self.batch_num),)


# Two-sum (Knuth): total is w + g rounded, and (w - (total - part)) + (g - part) is exactly the error of this
# rounding. The error is added to `rest`. A second, shorter two-sum moves the part of `rest` that has grown
# large enough back into w. Kernels have no fastmath flags (decision 1), or the compiler would simplify all of
# this to w + g.
def exact_sum(w, g, rest, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    total = w + g
    part = total - w
    rest = rest + ((w - (total - part)) + (g - part))
    result = total + rest
    return result, rest - (result - total)


@dataclass(frozen=True)
class ExactSum(Rule):
    """Sum in twice the precision of float32: w + rest += g.

    w is the sum rounded to float32, and the slot `rest` is the error of this rounding. This is the addition
    of a double word and a word (Joldes, Muller and Popescu, "Tight and rigorous error bounds for basic
    building blocks of double-word arithmetic", ACM TOMS 44(2), 2017, algorithm 4). Its relative error is at
    most 2**-47, and sums of whole numbers are exact below 2**47. The learning rate is unused.
    """

    name = "exact_sum"
    counts = True

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("rest"),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return exact_sum

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate,)
