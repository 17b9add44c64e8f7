"""One run of a program: the values alive at each moment."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from psfleet.program.gradient import BackwardPass
from psfleet.program.operation import Array, Context, Gradient, Record
from psfleet.program.plan import BackwardPlan, ExecutionPlan
from psfleet.program.program import Program
from psfleet.program.variable import Variable, compute, operand

__all__ = ["ProgramRun"]


class ProgramRun:
    """The state of one run.

    Attributes:
        values: Of the variables that something still needs.
        contexts: What forwards have left for backwards.
        inputs: Feeds, constants and parameters: values that are not the run's own.
    """

    def __init__(
        self, program: Program, plan: ExecutionPlan, feeds: dict[Variable, Array], meter: Any = None
    ) -> None:
        self.program = program
        self.plan = plan
        self.meter = meter
        self.values: dict[Variable, Any] = {**feeds, **{v: v.value for v in plan.constants}}
        self.contexts: dict[Record, Context] = {}
        self.inputs = set(self.values)

    def take_parameters(self) -> None:
        """Read the dense parameters' values."""
        for variable in self.plan.dense:
            if variable.parameter is not None:
                self.values[variable] = variable.parameter.numpy()
                self.inputs.add(variable)

    def forward(self, records: Sequence[Record]) -> None:
        """Compute records, keeping what their backward will need, and nothing else for longer than
        it is used."""
        for record in records:
            self.step(record, self.plan.needs.get(record, ()))
            for variable in self.plan.releases.get(record, ()):
                self.values.pop(variable, None)

    def main(self) -> None:
        """Compute what comes before the backward passes."""
        self.forward(self.plan.forward)

    def step(self, record: Record, needs: tuple[bool, ...]) -> None:
        """Compute one record."""
        context = Context(self.program, record, needs or (False,) * len(record.inputs))
        needed = record.needed(any(needs))
        inputs = [operand(record.op, variable, self.input(variable)) for variable in needed]
        self.values[record.output] = compute(record.op, context, inputs, record.output.dtype)
        if needs:
            self.contexts[record] = context
        if self.meter is not None:
            self.meter.measure(self)

    def backward(self) -> None:
        """Run the backward passes; each gradient becomes its variable's value."""
        for number, plan in enumerate(self.plan.backwards, 1):
            self._backward(plan, keep=number < len(self.plan.backwards))

    def _backward(self, plan: BackwardPlan, keep: bool) -> None:
        sweep = self.seeded(plan)
        for record in plan.records:
            self.contexts[record].needs = plan.needs[record]
        sweep.run(plan.records, self.contexts, keep)
        self.take_gradients(plan, sweep)

    def seeded(self, plan: BackwardPlan) -> BackwardPass:
        """A sweep that starts with the loss's own gradient, 1."""
        loss = plan.backward.loss
        return BackwardPass({loss: np.ones_like(self.values[loss])})

    def take_gradients(self, plan: BackwardPlan, sweep: BackwardPass) -> None:
        """Make the leaves' gradients the values of the variables that stand for them."""
        for variable, gradient in plan.backward.wanted.items():
            self.values[gradient] = sweep.gradients.get(variable)

    def result(self, variable: Variable) -> Array | Gradient:
        """A value to hand out: never memory that the program or the user goes on using."""
        value = self.values.get(variable)
        if variable.parameter is not None and value is None:
            return variable.parameter.numpy().copy()
        if isinstance(value, np.ndarray) and (variable in self.inputs or value.base is not None):
            return value.copy()
        if value is None:
            return np.zeros([extent or 0 for extent in variable.shape], variable.dtype)
        return value  # type: ignore[no-any-return]

    def input(self, variable: Variable) -> Any:
        """What an operation gets for this variable."""
        parameter = variable.parameter
        return parameter if parameter is not None and parameter.sparse else self.values[variable]
