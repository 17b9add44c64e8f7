"""Plan of a program's run for given results: the records needed, their order, and how long values stay."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psfleet.errors import UsageError
from psfleet.parameters.parameter import Parameter
from psfleet.program.backward import Backward
from psfleet.program.operation import Record, ancestors
from psfleet.program.ops.embedding import Embedding
from psfleet.program.ops.normalize import BatchNorm
from psfleet.program.program import Program
from psfleet.program.variable import Variable
from psfleet.runtime.interface import Asked

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

    def asked(self, values: Mapping[Variable, Any]) -> Asked:
        """Return what to pull, from the values of these."""
        ids: Asked = self.record.op.asked(*(values[v] for v in self.inputs))  # type: ignore[attr-defined]
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

    def asked(self, values: Mapping[Variable, Any]) -> list[tuple[Parameter, Asked]]:
        """Return what its look-ups pull, from the values of their inputs."""
        return [(each.parameter, each.asked(values)) for each in self.lookups]

    @property
    def recomputes(self) -> bool:
        """True if a backward pass asks for recomputing."""
        return any(plan.backward.checkpoints is not None for plan in self.backwards)

    @property
    def pipelined(self) -> bool:
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
    if plan.pipelined and not program.for_test:
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
