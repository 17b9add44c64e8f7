"""A tiny optimizer by hand, so that programs are tested without the real ones."""

from typing import Any

import numpy as np

from psfleet.parameters.parameter import Parameter, SparseGrad
from psfleet.program.backward import append_backward
from psfleet.program.program import default_main_program
from psfleet.program.variable import Variable


class HandSGD:
    """w -= rate * g on the parameters' own arrays; remembers what it was called with.

    A rate of 0 only remembers: a table of rows for any id has no array to update.
    """

    def __init__(self, rate: float = 0.1) -> None:
        self.rate = np.float32(rate)
        self.calls: list[tuple[int, float | None]] = []
        self.last: dict[str, Any] = {}

    def minimize(self, loss: Variable, **options: Any) -> list[tuple[Parameter, Variable]]:
        """Add the backward pass and this update to the default program."""
        pairs = append_backward(loss, **options)
        default_main_program().add_update(self, pairs, loss)
        return pairs

    def apply_values(
        self, values: list[tuple[Parameter, Any]], samples: int = 0, loss: float | None = None
    ) -> None:
        """Update."""
        self.calls.append((samples, loss))
        self.last = {parameter.name: gradient for parameter, gradient in values}
        for parameter, gradient in values if self.rate else ():
            self.update(parameter, gradient)

    def update(self, parameter: Parameter, gradient: Any) -> None:
        """Update one parameter."""
        value = parameter.numpy().copy()
        if isinstance(gradient, SparseGrad):
            np.subtract.at(value, gradient.ids, self.rate * gradient.rows)
        else:
            value -= self.rate * gradient
        parameter._value = value
