"""Stochastic gradient descent."""

from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.optimizer_spec import OptimizerSpec, TorchSpec
from psfleet.rules.rule import Rule

__all__ = ["SGD"]


def sgd(w, g, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    return (w - h[0] * g,)


@dataclass(frozen=True)
class SGD(Rule):
    """w -= learning_rate * g."""

    name = "sgd"
    optimizer = OptimizerSpec()
    torch = (TorchSpec("SGD", when={"momentum": 0}, rows=True),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return sgd

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate,)
