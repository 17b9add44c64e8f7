"""Moving averages of what batches show, such as batch_norm's means: dense tables that no optimizer trains."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.parameters.binding import tables
from psfleet.parameters.parameter import Parameter
from psfleet.parameters.placement import LazyBinding
from psfleet.rules.momentum import SGD
from psfleet.rules.rule import Rule
from psfleet.schema.table import DecaySpec


@dataclass(eq=False)
class _Average:
    """Updates a table as average = momentum * average + (1 - momentum) * value.

    That is SGD at the rate 1 - momentum with the gradient -value and the L2 decay 1. The decay is the
    servers': it takes the average that they have, however old the one is that a worker has seen, so that an
    average of variances never falls below 0.
    """

    momentum: float
    lazy: bool = False
    every_row: bool = False

    def rule(self, parameter: Parameter | None = None) -> Rule:
        return SGD()

    def decay(self, parameter: Parameter | None = None) -> DecaySpec:
        return DecaySpec(l2=1.0)

    def lender(self, parameter: Parameter) -> "_Average":
        return self


@cache
def _average(momentum: float) -> _Average:
    return _Average(momentum)


def promise(parameter: Parameter, momentum: float) -> None:
    """Let a parameter's value come from its table, which is made when it is first needed."""
    owner = _average(momentum)
    binding = LazyBinding(lambda target: tables().seat(owner, target), early=True)
    parameter.binding = parameter.binding or binding


def note(parameter: Parameter, momentum: float, value: NDArray[Any]) -> None:
    """Take a value into the average, with the next push of this worker."""
    home = tables()
    seat = home.seat(_average(momentum), parameter)
    home.send_along(seat, -np.asarray(value, np.float32), 1.0 - momentum)
