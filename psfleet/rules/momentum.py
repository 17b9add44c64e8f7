"""Stochastic gradient descent with momentum, plain or Nesterov's."""

from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.optimizer_spec import OptimizerSpec, TorchSpec
from psfleet.rules.rule import Rule, Slot, UnitInterval

__all__ = ["Momentum"]


def momentum(w, g, velocity, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    velocity = h[1] * velocity + g
    return w - h[0] * velocity, velocity


def nesterov(w, g, velocity, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    velocity = h[1] * velocity + g
    return w - h[0] * (g + h[1] * velocity), velocity


@dataclass(frozen=True)
class Momentum(Rule):
    """v = mu * v + g; w -= lr * v. Nesterov: w -= lr * (g + mu * v). The rate is not in v.

    The optimizer's `rescale_grad` has no effect, as in the reference's CPU operator.
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
