"""Execution plan of a program, the check of a feed, and the state of one run.

`make_plan` keeps only the records that the requested results and the updates need, and sorts them by phase:

    early      compute the ids of look-ups from the feed alone; one pull can then bring rows and parameters
    forward    all other records that do not depend on gradients
    backwards  one sweep for each loss
    late       compute with gradients

The plan also lists after which record each value may be released, so that a run holds few values at a time.
`ProgramRun` executes a plan in the calling thread; the Executor calls the phases in this order. Subclasses
for recomputing and for chunks of a pipeline change single phases.
"""

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from psfleet.core.base.errors import IdError, ShapeError, UsageError
from psfleet.core.engine.gradient_checks import exact_below
from psfleet.core.engine.runtime_interface import Asked
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
    """Plan of a backward pass: the records that gradients flow through, and the inputs that need gradients.

    Attributes:
        backward: Backward pass as the script declared it.
        records: Records that gradients flow through, in forward order.
        needs: For each record a flag per input: True if the input needs a gradient.
    """

    backward: Backward
    records: list[Record]
    needs: Needs


@dataclass(frozen=True)
class LookUp:
    """Look-up of rows of a sparse parameter, by one record (use of an operation)."""

    parameter: Parameter
    record: Record

    @property
    def inputs(self) -> list[Variable]:
        """Variables that determine the rows to pull, the ids first.

        Excludes inputs that only the gradient uses.
        """
        ids, _, *extra_inputs = self.record.op.predicting(self.record.inputs)
        return [ids, *extra_inputs]

    def wanted_ids(self, values: Mapping[Variable, Any]) -> Asked:
        """Return the ids, or bags of ids, whose rows must be pulled.

        `values`: Values of `inputs`, and perhaps of other variables.
        """
        ids: Asked = self.record.op.wanted_ids(*(values[v] for v in self.inputs))  # type: ignore[attr-defined]
        return ids


@dataclass
class ExecutionPlan:
    """The records of a program that a run needs, sorted by phase.

    A *leaf* is a variable that no record computes.

    Attributes:
        feeds: Data variables that must be fed.
        constants: Leaves that have a value.
        dense: Leaves that represent dense parameters.
        early: Records that compute ids of look-ups without any parameter. They run first, so that one call
            can pull all rows.
        lookups: Look-ups whose ids are known after `early`. Other look-ups pull their rows during `forward`.
        forward: Other records that do not depend on gradients.
        backwards: Plan of each backward pass, in the order in which they run.
        needs: For each record a flag per input: True if the input needs a gradient in any backward pass.
        releases: For each record, the variables whose values are not needed after it.
        kept: Variables whose values are results, or inputs of late records.
        recompute: RecomputePlan, made in the first run that recomputes, else None.
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
        """Return the parameter and ids to pull for each look-up, given the look-ups' inputs."""
        return [(lookup.parameter, lookup.wanted_ids(values)) for lookup in self.lookups]

    @property
    def recomputes(self) -> bool:
        """True if a backward pass has checkpoints, so that activations are dropped and computed again."""
        return any(plan.backward.checkpoints is not None for plan in self.backwards)

    @property
    def is_pipelined(self) -> bool:
        """True if a backward pass is to run as a pipeline."""
        return any(plan.backward.pipeline is not None for plan in self.backwards)


def make_plan(program: Program, fetches: Sequence[Variable]) -> ExecutionPlan:
    """Plan a run that computes these results, and the gradients that the program's updates need."""
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
    # Some inputs matter only for a gradient, such as clicks. They must be fed only if `needs` has a gradient.
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
    """Raise an error if an operation needs a whole batch, which a pipeline never gives it."""
    for record in records:
        if isinstance(record.op, BatchNorm) and not (record.op.is_test or record.op.fixed):
            raise UsageError(
                f"{record.output.name!r} is a batch_norm that trains, and a pipeline cuts batches into "
                "micro-batches; use layer_norm, or batch_norm with use_global_stats=True"
            )


def _needed(results: Iterable[Variable]) -> tuple[list[Record], list[Backward]]:
    """Return every record that the results depend on, and the backward passes among them.

    A gradient needs the records of its loss, and these may in turn use gradients of other losses. So this
    repeats until there is no new backward pass.
    """
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
    """Add to the plan the variables that no record computes: dense parameters, constants and feeds."""
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
    """Return the records that compute ids without any parameter, and the look-ups of these ids."""
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
    """Return, for each record, the variables whose values may be released after it.

    These are the variables that no later record uses, except for `results` and for leaves (parameters, data
    and constants).
    """
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
    """Check a feed, and convert each array to the dtype of its variable.

    Args:
        feeds: Variables that must be fed. Other data variables of the program may be fed too.

    Raises:
        UsageError: An array is missing, or its name is not that of a data variable.
        ShapeError: An array has the wrong shape or cannot be converted.
        IdError: An array should have whole numbers, and has a value that is not one.
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
    """Return the number of samples: the length of the first array that is fed for an unknown first extent."""
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
        lengths = {len(sample) if isinstance(sample, Sized) else 1 for sample in value}
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


def whole_numbers(what: str, array: Array) -> Array:
    """Convert an array to int64 without loss.

    `what`: Subject of the error message.

    Raises:
        IdError: A value is fractional or NaN, does not fit into 64 bits, or is a float so large that it may
            have been rounded.
    """
    if array.dtype.kind in "ib":
        return array.astype(np.int64)
    if array.dtype.kind == "u":
        bad = array > np.iinfo(np.int64).max
    else:
        # Floats beyond this limit are further apart than 1, so such a value may have been rounded from
        # another one.
        with np.errstate(invalid="ignore"):
            bad = ~((array == np.floor(array)) & (np.abs(array) < exact_below(array.dtype)))
    if bad.any():
        value, why = array[bad].flat[0], ""
        if array.dtype.kind == "f" and float(value).is_integer():
            why = f", and {array.dtype} is exact below {exact_below(array.dtype):.0f}; keep ids as integers"
        raise IdError(f"{what} must be whole numbers of 64 bits; one is {value}{why}")
    return array.astype(np.int64)


class ProgramRun:
    """State of one run: the values and contexts that are in memory.

    Use it in one thread. Call, in this order, `forward(plan.early)`, `take_parameters`, `main`, `backward`
    and `forward(plan.late)`.

    Args:
        meter: Object whose `measure(run)` is called after every operation, or None.

    Attributes:
        contexts: Context of each record whose backward pass has not run yet.
        inputs: Variables whose values belong to others than the run: feeds, constants and parameters.
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
        """Read the values of dense parameters. They must have been pulled."""
        for variable in self.plan.dense:
            if variable.parameter is not None:
                self.values[variable] = variable.parameter.numpy()
                self.inputs.add(variable)

    def forward(self, records: Sequence[Record]) -> None:
        """Compute records in order. Releases each value after its last use, unless `backward` needs it."""
        for record in records:
            self.step(record, self.plan.needs.get(record, ()))
            for variable in self.plan.releases.get(record, ()):
                self.values.pop(variable, None)

    def main(self) -> None:
        """Compute the forward records of the plan."""
        self.forward(self.plan.forward)

    def step(self, record: Record, needs: tuple[bool, ...]) -> None:
        """Compute one record.

        Args:
            record: Record whose inputs have values.
            needs: For each input, True if it will get a gradient. Empty if no backward pass goes through the
                record; no context is then kept.
        """
        context = Context(self.program, record, needs or (False,) * len(record.inputs))
        variables = record.needed(any(needs))
        inputs = [operand(record.op, variable, self.input(variable)) for variable in variables]
        self.values[record.output] = compute(record.op, context, inputs, record.output.dtype)
        if needs:
            self.contexts[record] = context
        if self.meter is not None:
            self.meter.measure(self)

    def backward(self) -> None:
        """Run the backward passes. Each gradient becomes the value of its variable."""
        for number, plan in enumerate(self.plan.backwards, 1):
            # Losses may share records, so only the last sweep may free their contexts.
            self._backward(plan, keep=number < len(self.plan.backwards))

    def _backward(self, plan: BackwardPlan, keep: bool) -> None:
        sweep = self.seeded(plan)
        # The forward pass has saved the values that all backward passes need. This sweep computes only its
        # own gradients.
        for record in plan.records:
            self.contexts[record].needs = plan.needs[record]
        sweep.run(plan.records, self.contexts, keep)
        self.take_gradients(plan, sweep)

    def seeded(self, plan: BackwardPlan) -> BackwardPass:
        """Return a backward sweep that starts from the loss, whose gradient by itself is 1."""
        loss = plan.backward.loss
        return BackwardPass({loss: np.ones_like(self.values[loss])})

    def take_gradients(self, plan: BackwardPlan, sweep: BackwardPass) -> None:
        """Store the gradients of parameters and data as values of the gradients' variables."""
        for variable, gradient in plan.backward.gradients.items():
            self.values[gradient] = sweep.gradients.get(variable)

    def result(self, variable: Variable) -> Array | Gradient:
        """Return a value for the user. It is a copy if the program or the user may still change its memory.

        Returns zeros for a gradient with respect to a variable that the loss does not depend on.
        """
        value = self.values.get(variable)
        if variable.parameter is not None and value is None:
            return variable.parameter.numpy().copy()
        if isinstance(value, np.ndarray) and (variable in self.inputs or value.base is not None):
            return value.copy()
        if value is None:
            return np.zeros([extent or 0 for extent in variable.shape], variable.dtype)
        return value  # type: ignore[no-any-return]

    def input(self, variable: Variable) -> Any:
        """Return the value of an operation's input, or the Parameter itself if it is sparse."""
        parameter = variable.parameter
        return parameter if parameter is not None and parameter.sparse else self.values[variable]
