"""A tiny optimizer by hand, so that programs are tested without the real ones, and ways to run a program."""

from collections.abc import Callable
from typing import Any

import numpy as np

from psfleet import layers
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program.backward import append_backward
from psfleet.core.graph.program.program import default_main_program, default_startup_program
from psfleet.core.graph.program.variable import Variable, to_variable
from tests.runtimes import own_programs


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


Result = tuple[float, dict[str, Any]]
"""A loss, and the gradients by parameter."""
Build = Callable[..., tuple[Variable, Any]]
"""Makes of the inputs a loss, and the `checkpoints` of its backward pass (None: there are none)."""


def run_static(build: Build, feed: dict[str, Any]) -> Result:
    """One run of a program."""
    with own_programs():
        inputs = [layers.data(n, [None, *v.shape[1:]], v.dtype) for n, v in feed.items()]
        loss, checkpoints = build(*inputs)
        sgd = HandSGD(0)
        sgd.minimize(loss, checkpoints=checkpoints)
        (value,) = Executor().run(feed=feed, fetch_list=[loss])
        return value.item(), sgd.last


def run_eager(build: Build, feed: dict[str, Any]) -> Result:
    """The same, computed at once."""
    with own_programs():
        loss, _ = build(*[to_variable(value) for value in feed.values()])
        loss.backward()
        parameters = default_startup_program().parameters
        grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        return loss.item(), grads


def assert_same(first: Result, second: Result) -> None:
    """Losses and gradients are equal in every bit, those by rows too."""
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    for name, gradient in first[1].items():
        other = second[1][name]
        if isinstance(gradient, SparseGrad):
            np.testing.assert_array_equal(gradient.ids, other.ids)
            gradient, other = gradient.rows, other.rows
        np.testing.assert_array_equal(gradient, other)
