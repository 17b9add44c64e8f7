"""Adagrad (Duchi, Hazan and Singer, 2011), and rules that forget or share its accumulator.

- Adagrad (Duchi, Hazan and Singer, 2011), epsilon outside the root as in the reference.
- Adagrad whose accumulator forgets.
- Adagrad with one accumulator per row: the memory of the rows alone, nearly.
- Adadelta (Zeiler, 2012); the learning rate scales the update, as in the reference.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.rule import DecayRate, OptimizerSpec, Rule, Slot, TorchSpec
from psfleet.validation.annotations import NonNegative


def adagrad(w, g, moment, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    moment = moment + g * g
    return w - h[0] * g / (math.sqrt(moment) + h[1]), moment


@dataclass(frozen=True)
class Adagrad(Rule):
    """s += g^2; w -= lr * g / (sqrt(s) + epsilon)."""

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


def decayed_adagrad(w, g, moment, h):  # type: ignore[no-untyped-def]
    moment = h[1] * moment + h[2] * (g * g)
    return w - h[0] * g / (math.sqrt(moment) + h[3]), moment


@dataclass(frozen=True)
class DecayedAdagrad(Rule):
    """s = decay * s + (1 - decay) * g^2; w -= lr * g / (sqrt(s) + epsilon)."""

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
    """Adagrad with one s for each row: s += mean of g^2 over the row; w -= lr * g / (sqrt(s) + epsilon).

    It halves the memory of large tables. A dense array's rows are the slices that its first axis names;
    a vector's are its elements.
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


def adadelta(w, g, squared_grad, squared_update, h):  # type: ignore[no-untyped-def]
    squared_grad = h[1] * squared_grad + h[2] * (g * g)
    update = math.sqrt((squared_update + h[3]) / (squared_grad + h[3])) * g
    squared_update = h[1] * squared_update + h[2] * (update * update)
    return w - h[0] * update, squared_grad, squared_update


@dataclass(frozen=True)
class Adadelta(Rule):
    """u = g * sqrt((U + epsilon) / (G + epsilon)); w -= lr * u; G, U: means of g^2, u^2."""

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
