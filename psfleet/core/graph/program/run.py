"""One run of a program: its plan, the check of what is fed, and the values alive at each moment."""

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from psfleet.core.base.errors import IdError, ShapeError, UsageError
from psfleet.core.engine.gradient_checks import exact_below
from psfleet.core.engine.interface import Asked
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program.backward import Backward
from psfleet.core.graph.program.operation import (
    Array,
    BackwardPass,
    Context,
    Gradient,
    Record,
    ancestors,
    same,
)
from psfleet.core.graph.program.ops.embedding import Embedding
from psfleet.core.graph.program.ops.normalize import BatchNorm
from psfleet.core.graph.program.program import Program
from psfleet.core.graph.program.variable import Variable, compute, operand

Needs = dict[Record, tuple[bool, ...]]


@dataclass
class BackwardPlan:
    """One backward pass: the records that gradients go through, and which inputs get one."""

    backward: Backward
    records: list[Record]
    needs: Needs


@dataclass(frozen=True)
class LookUp:
    """Look-up of a record in a sparse parameter."""

    parameter: Parameter
    record: Record

    @property
    def inputs(self) -> list[Variable]:
        """Variables that it depends on: the ids first. Shows and clicks are no part of it."""
        ids, _, *others = self.record.op.predicting(self.record.inputs)
        return [ids, *others]

    def wanted_ids(self, values: Mapping[Variable, Any]) -> Asked:
        """Return what to pull, from the values of these."""
        ids: Asked = self.record.op.wanted_ids(*(values[v] for v in self.inputs))  # type: ignore[attr-defined]
        return ids


@dataclass
class ExecutionPlan:
    """The pruned program.

    Attributes:
        constants: Leaves with a value of their own.
        early: Records that compute ids of lookups without any parameter: run first, so that all
            rows can be fetched in one call.
        lookups: Those in sparse parameters whose ids are early.
        late: Records that compute with gradients.
        needs: Over all backward passes, which inputs of a record get a gradient.
        releases: By record, variables whose value is not needed after it.
        kept: Variables whose values are results or are used late.
        recompute: Once made, how segments of `forward` are dropped and computed again.
    """

    feeds: list[Variable] = field(default_factory=list)
    constants: list[Variable] = field(default_factory=list)
    dense: list[Variable] = field(default_factory=list)
    early: list[Record] = field(default_factory=list)
    lookups: list[LookUp] = field(default_factory=list)
    forward: list[Record] = field(default_factory=list)
    backwards: list[BackwardPlan] = field(default_factory=list)
    late: list[Record] = field(default_factory=list)
    needs: Needs = field(default_factory=dict)
    releases: dict[Record, list[Variable]] = field(default_factory=dict)
    kept: set[Variable] = field(default_factory=set)
    recompute: Any = None

    def wanted_reads(self, values: Mapping[Variable, Any]) -> list[tuple[Parameter, Asked]]:
        """Return what its look-ups pull, from the values of their inputs."""
        return [(each.parameter, each.wanted_ids(values)) for each in self.lookups]

    @property
    def recomputes(self) -> bool:
        """True if a backward pass asks for recomputing."""
        return any(plan.backward.checkpoints is not None for plan in self.backwards)

    @property
    def is_pipelined(self) -> bool:
        """True if a backward pass asks for a pipeline."""
        return any(plan.backward.pipeline is not None for plan in self.backwards)


def make_plan(program: Program, fetches: Sequence[Variable]) -> ExecutionPlan:
    """The plan for these results and the program's updates."""
    results = list(fetches)
    for update in program.updates:
        results += [variable for _, variable in update.params_grads]
        results += [update.loss] if update.loss is not None else []
    records, backwards = _needed(results)
    plan = ExecutionPlan()
    plan.late = _depending_on_gradients(records)
    before = [record for record in records if record not in set(plan.late)]
    plan.backwards = [_backward_plan(backward) for backward in backwards]
    plan.needs = _union(plan.backwards)
    _leaves(plan, [*results, *(b.loss for b in backwards)], records)
    plan.early, plan.lookups = _early(before)
    plan.forward = [record for record in before if record not in set(plan.early)]
    plan.kept = {
        *results,
        *(b.loss for b in backwards),
        *(v for record in plan.late for v in record.inputs),
    }
    plan.releases = last_uses([*plan.early, *plan.forward], plan.kept)
    if plan.is_pipelined and not program.for_test:
        _check_batches(plan.forward)
    return plan


def _check_batches(records: Sequence[Record]) -> None:
    """Refuse in a pipeline what looks at a whole batch, of which a stage sees parts."""
    for record in records:
        if isinstance(record.op, BatchNorm) and not (record.op.is_test or record.op.fixed):
            raise UsageError(
                f"{record.output.name!r} is a batch_norm that trains, and a pipeline cuts batches into "
                "micro-batches; use layer_norm, or batch_norm with use_global_stats=True"
            )


def _needed(results: Iterable[Variable]) -> tuple[list[Record], list[Backward]]:
    """Every record that the results need, also through backward passes; and those passes."""
    backwards: dict[Backward, None] = {}
    targets = list(results)
    while True:
        records = ancestors(targets)
        variables = [*targets, *(v for record in records for v in record.inputs)]
        new = {
            v.backward_pass: None
            for v in variables
            if v.backward_pass is not None and v.backward_pass not in backwards
        }
        if not new:
            return records, list(backwards)
        backwards.update(new)
        targets += [backward.loss for backward in new]


def _depending_on_gradients(records: Sequence[Record]) -> list[Record]:
    late: set[Variable] = set()
    late_records = []
    for record in records:
        if any(v.backward_pass is not None or v in late for v in record.inputs):
            late.add(record.output)
            late_records.append(record)
    return late_records


def _leaves(plan: ExecutionPlan, results: Iterable[Variable], records: Sequence[Record]) -> None:
    """Sort the variables that no record makes."""
    inputs = [v for r in records for v in r.needed(any(plan.needs.get(r, ())))]
    for variable in dict.fromkeys([*inputs, *results]):
        if variable.record is not None or variable.backward_pass is not None:
            continue
        if variable.parameter is not None:
            if not variable.parameter.sparse:
                plan.dense.append(variable)
        elif variable.value is not None:
            plan.constants.append(variable)
        elif variable.is_data:
            plan.feeds.append(variable)
        else:
            raise UsageError(f"nothing gives the variable {variable.name!r} a value")


def _early(records: Sequence[Record]) -> tuple[list[Record], list[LookUp]]:
    lookups = []
    early: dict[Record, None] = {}
    for record in records:
        if not isinstance(record.op, Embedding):
            continue
        table = record.inputs[1].parameter
        lookup = None if table is None else LookUp(table, record)
        makers = ancestors(lookup.inputs if lookup else [])
        if lookup and not any(v.parameter for maker in makers for v in maker.inputs):
            lookups.append(lookup)
            early.update(dict.fromkeys(makers))
    return sorted(early, key=lambda record: record.serial), lookups


def _backward_plan(backward: Backward) -> BackwardPlan:
    records, variables = backward.active()
    needs = {
        record: tuple(
            (v in variables and not v.stop_gradient) or v in backward.gradients
            for v in record.inputs
        )
        for record in records
    }
    return BackwardPlan(backward, records, needs)


def _union(plans: Sequence[BackwardPlan]) -> Needs:
    total: Needs = {}
    for plan in plans:
        for record, needs in plan.needs.items():
            before = total.get(record, (False,) * len(needs))
            total[record] = tuple(a or b for a, b in zip(before, needs, strict=True))
    return total


def last_uses(records: Sequence[Record], results: set[Variable]) -> dict[Record, list[Variable]]:
    """By record, the computed variables that it is the last one to use."""
    last: dict[Variable, Record] = {}
    for record in records:
        last[record.output] = record
        for variable in record.inputs:
            if variable.record is not None:
                last[variable] = record
    uses: dict[Record, list[Variable]] = {}
    for variable, record in last.items():
        if variable not in results:
            uses.setdefault(record, []).append(variable)
    return uses


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
        IdError: A value is fractional, NaN, does not fit 64 bits, or is a float that may have been rounded.
    """
    if array.dtype.kind in "ib":
        return array.astype(np.int64)
    if array.dtype.kind == "u":
        bad = array > np.iinfo(np.int64).max
    else:
        # A larger float may have been another whole number before it was one.
        with np.errstate(invalid="ignore"):
            bad = ~((array == np.floor(array)) & (np.abs(array) < exact_below(array.dtype)))
    if bad.any():
        value, why = array[bad].flat[0], ""
        if array.dtype.kind == "f" and float(value).is_integer():
            why = f", and {array.dtype} is exact below {exact_below(array.dtype):.0f}; keep ids as integers"
        raise IdError(f"{what} must be whole numbers of 64 bits; one is {value}{why}")
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
