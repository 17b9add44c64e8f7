"""One run of a program: the check of what is fed, and the values alive at each moment."""

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np

from psfleet.errors import IdError, ShapeError, UsageError
from psfleet.program.operation import Array, BackwardPass, Context, Gradient, Record, same
from psfleet.program.plan import BackwardPlan, ExecutionPlan
from psfleet.program.program import Program
from psfleet.program.variable import Variable, compute, operand


def check_feed(
    program: Program, feeds: Sequence[Variable], feed: Mapping[str, Any]
) -> dict[Variable, Array]:
    """The fed arrays by variable, each in its variable's dtype.

    Raises:
        UsageError: One is missing, or its name is not that of the program's data.
        ShapeError: One has the wrong shape or cannot be converted.
        IdError: One should be whole numbers and is not.
    """
    if not isinstance(feed, Mapping):
        raise UsageError(f"a feed is {feed!r}; it must be a dict of arrays by the names of data")
    for name in feed:
        variable = program.variables.get(name)
        if variable is None or not variable.is_data:
            names = [v.name for v in program.list_vars() if v.is_data]
            raise UsageError(
                f"feed {name!r} is not data of the program; it has {', '.join(names) or 'none'}"
            )
    missing = [variable.name for variable in feeds if variable.name not in feed]
    if missing:
        raise UsageError(f"feed {missing[0]!r} is missing; the program needs it for these results")
    arrays = {}
    for name, value in feed.items():
        variable = program.variables[name]
        arrays[variable] = _array(variable, value)
    return arrays


def batch_size(program: Program, arrays: Mapping[Variable, Array]) -> int:
    """The number of samples: the first extent of the first fed variable that leaves it open."""
    for variable, array in arrays.items():
        if variable.shape and variable.shape[0] is None:
            return len(array)
    return next((len(array) for array in arrays.values() if array.ndim), 0)


def _array(variable: Variable, value: Any) -> Array:
    if isinstance(value, Variable):
        value = value.numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        lengths = _lengths(value)
        if len(lengths) > 1:
            raise ShapeError(
                f"feed {variable.name!r} has samples of {min(lengths)} to {max(lengths)} values; pad them to "
                "one length, or look ids of any number up as a psfleet.features.Feature"
            ) from None
        raise ShapeError(f"feed {variable.name!r} cannot be read as an array: {error}") from None
    if not same(array.shape, variable.shape):
        raise ShapeError(
            f"feed {variable.name!r} has shape {array.shape}, the program wants {variable.shape}"
        )
    if array.dtype == variable.dtype:
        return array
    if array.dtype.kind not in "fiub":
        raise ShapeError(
            f"feed {variable.name!r} has dtype {array.dtype}, the program wants {variable.dtype}"
        )
    if variable.dtype.kind == "i":
        return whole_numbers(f"feed {variable.name!r}", array).astype(variable.dtype, copy=False)
    return array.astype(variable.dtype)


def _lengths(samples: Sequence[Any]) -> set[int]:
    """Return the numbers of values of samples; one that is a single value has one."""
    return {len(sample) if isinstance(sample, Sized) else 1 for sample in samples}


def whole_numbers(what: str, array: Array) -> Array:
    """The array as int64.

    Raises:
        IdError: A value is fractional, NaN or does not fit 64 bits.
    """
    if array.dtype.kind in "ib":
        return array.astype(np.int64)
    if array.dtype.kind == "u":
        bad = array > np.iinfo(np.int64).max
    else:
        # float64 cannot hold 2**63 - 1; the first float that does not fit is 2**63 itself.
        with np.errstate(invalid="ignore"):
            bad = ~((array == np.floor(array)) & (array >= -(2.0**63)) & (array < 2.0**63))
    if bad.any():
        raise IdError(f"{what} must be whole numbers of 64 bits; one is {array[bad].flat[0]}")
    return array.astype(np.int64)


class ProgramRun:
    """The state of one run.

    Attributes:
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
        variables = record.needed(any(needs))
        inputs = [operand(record.op, variable, self.input(variable)) for variable in variables]
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
        for variable, gradient in plan.backward.gradients.items():
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
        """Return an operation's input for this variable."""
        parameter = variable.parameter
        return parameter if parameter is not None and parameter.sparse else self.values[variable]
