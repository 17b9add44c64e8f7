"""Stochastic average gradient (Schmidt, Le Roux and Bach, 2013): the reference's ASGD."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from psfleet.errors import ConfigError
from psfleet.rules.rule import Rule, Slot

__all__ = ["ASGD"]


def asgd(w, g, total, kept, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    total = total - kept + g
    return w - h[0] * total, total, g


@dataclass(frozen=True)
class ASGD(Rule):
    """d += g - y_i; y_i = g; w -= lr / n * d, where i = (t - 1) % batch_num, n = min(t, batch_num).

    d is the sum of the last gradient of each of `batch_num` batches, which take turns. In a sparse
    table a row that a batch does not name keeps its y_i, and d stays the sum of the row's y.
    """

    batch_num: int = 1
    name: ClassVar[str] = "asgd"

    def __post_init__(self) -> None:
        if not isinstance(self.batch_num, int | np.integer) or self.batch_num < 1:
            raise ConfigError(
                f"ASGD: batch_num is {self.batch_num!r}, it must be a whole number of at least 1"
            )

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
