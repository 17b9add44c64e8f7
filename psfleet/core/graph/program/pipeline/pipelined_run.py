"""One step of a pipelined program, as one stage runs it.

Every stage runs the same script and gets the same feed; each cuts it into micro-batches and computes
its own pieces. Gradients of parameters are added up in the order of the micro-batches and divided by
their number, so they are the same bits on any number of stages, in any schedule.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.graph.parameters.parameter import Parameter, fetch
from psfleet.core.graph.program.operation import Array, Gradient, ancestors, summed
from psfleet.core.graph.program.pipeline.chunk import (
    ChunkRun,
    StepRows,
    chunk_run,
    combine,
    micro_feeds,
    micro_sizes,
    pack,
    settled,
    unpack,
)
from psfleet.core.graph.program.pipeline.cutting import PipelineSpec
from psfleet.core.graph.program.pipeline.estimates import agree_on_parts
from psfleet.core.graph.program.program import Program
from psfleet.core.graph.program.run import ExecutionPlan, ProgramRun
from psfleet.core.graph.program.variable import Variable
from psfleet.core.runtime import stages as ways
from psfleet.core.runtime.process_runtime import active
from psfleet.core.runtime.stages import Links, PipelineEngine, StagePosition

Values = dict[Variable, Any]


class PipelinedRun(PipelineEngine["Gradient | None"]):
    """One step.

    Args:
        plan: Plan of this step's results; its one backward pass wants a pipeline.
        place, links, number: As for PipelineEngine.
        meter: Meter as the Executor's.

    Attributes:
        values: After `complete`: gradients of this stage's own parameters, and losses.
    """

    _pack = staticmethod(pack)
    _unpack = staticmethod(unpack)

    def __init__(
        self,
        program: Program,
        plan: ExecutionPlan,
        feeds: Mapping[Variable, Array],
        place: StagePosition,
        links: Links | None,
        number: int,
        meter: Any = None,
    ) -> None:
        self._backward_pass = plan.backwards[0].backward
        spec: PipelineSpec = self._backward_pass.pipeline
        sizes = micro_sizes(feeds, spec.micro_batches)
        super().__init__(spec.schedule, sizes, place, links, number)
        self.values: Values = {}
        self._program = program
        self._plan = plan
        self._feeds = dict(feeds)
        self._meter = meter
        self._cut = spec.cut(plan, place.stages)
        self._parts = self._cut.parts
        self._mine = self._cut.chunks_of(place.stage)
        self._totals: dict[Variable, Gradient] = {}
        self._seen: dict[Variable, dict[int, Array]] = defaultdict(dict)
        self._runs: dict[tuple[int, int], ChunkRun] = {}
        self._mail: dict[
            tuple[str, int, int, str], Gradient | None
        ] = {}  # between pieces of this stage
        self._given: list[Values] = []  # by micro-batch: what is not computed by pieces
        self._rows: dict[str, StepRows] = {}
        self._results: Values = {}
        self._uneven = len(set(self._sizes)) > 1

    # -- the step --------------------------------------------------------------------------------

    def complete(self, results: Sequence[Variable]) -> None:
        """Run the step: all micro-batches forward and back, then share the results."""
        self._prepare(results)
        self._take_actions()
        # Servers average over the copies, of which each adds up its own micro-batches.
        copies = min(self._place.copies[self._place.stage], len(self._sizes))
        factor = copies * (1.0 if self._uneven else self._fractions[0])
        for leaf, total in self._totals.items():
            whole = total if factor == 1 else _scaled(total, factor)
            self.values[self._backward_pass.gradients[leaf]] = whole
        for variable in dict.fromkeys([self._backward_pass.loss, *results]):
            self._share(variable)
        self.values[self._backward_pass.loss] = self._results[self._backward_pass.loss]

    def result(self, variable: Variable) -> Any:
        """A value to hand out, as ProgramRun.result."""
        value = self._results.get(variable)
        if value is not None:
            return value
        if variable.parameter is not None:
            return variable.parameter.numpy().copy()
        return np.zeros([extent or 0 for extent in variable.shape], variable.dtype)

    def _prepare(self, results: Sequence[Variable]) -> None:
        """Cut the feed, compute ids, and fetch parameters and rows with one call."""
        parts = [self._parts[i] for i in self._mine]
        early = {r for part in parts for r in part.early}
        early |= set(ancestors(results)) & set(self._plan.early)
        for micro, feeds in enumerate(micro_feeds(self._feeds, self._sizes)):
            run = ProgramRun(
                self._micro_program(micro), ExecutionPlan(constants=self._plan.constants), feeds
            )
            run.forward(sorted(early, key=lambda record: record.serial))
            self._given.append(run.values)
        lookups = {(p.name, ids): (p, ids) for part in parts for p, ids in part.lookups}
        whole = [
            (p, ids, np.concatenate([values[ids].reshape(-1) for values in self._given]))
            for p, ids in lookups.values()
        ]
        dense = dict.fromkeys(v for part in parts for v in part.dense)
        fetch([v.parameter for v in dense if v.parameter], [(p, flat) for p, _, flat in whole])
        if self._links is not None:
            # In sync mode the next pull commits a push. A stage that has read nothing must not leave that
            # to a pull to come: the others wait for it, and it would wait for them.
            active().pull([])
        weights = {v: v.parameter.numpy() for v in dense if v.parameter}
        for values in self._given:
            values.update(weights)
        for parameter, ids, flat in whole:
            self._distribute_rows(parameter, ids, parameter.lookup(flat))

    def _distribute_rows(self, parameter: Parameter, ids: Variable, rows: Array) -> None:
        stand_in = self._rows.setdefault(parameter.name, StepRows(parameter))
        start = 0
        for values in self._given:
            own = values[ids]
            part = rows[start : start + own.size]
            stand_in.add(own, part.reshape(*own.shape, part.shape[-1]))
            start += own.size

    def _micro_program(self, micro: int) -> Program:
        """The program with a step of its own for each micro-batch, for masks that depend on it."""
        step = self._program.step * len(self._sizes) + micro
        return dataclasses.replace(self._program, step=step)

    # -- one action ------------------------------------------------------------------------------

    def _forward(self, micro: int) -> None:
        for chunk in self._mine:
            self._chunk_forward(chunk, micro)

    def _chunk_forward(self, chunk: int, micro: int) -> None:
        part = self._parts[chunk]
        run = chunk_run(
            self._micro_program(micro),
            part,
            self._given[micro],
            self._rows,
            _LiveActivations(self._meter, self._runs) if self._meter else None,
        )
        self._runs[chunk, micro] = run
        for variable, maker in part.takes.items():
            run.values[variable] = self._value_from("forward", chunk, micro, maker, variable.name)
        run.main()
        for variable, users in part.gives.items():
            for user in users:
                self._give("forward", user, micro, run.values[variable], variable.name)
        for variable in part.plan.kept:
            if variable in self._plan.kept:
                self._seen[variable][micro] = run.values[variable]
            if variable is not self._backward_pass.loss and not part.plan.recomputes:
                del run.values[variable]

    def _backward(self, micro: int) -> None:
        for chunk in reversed(self._mine):
            self._chunk_backward(chunk, micro)

    def _chunk_backward(self, chunk: int, micro: int) -> None:
        part, run = self._parts[chunk], self._runs[chunk, micro]
        for variable, after in part.next_user.items():
            gradient = self._value_from("back", chunk, micro, after, variable.name)
            if gradient is not None:
                run.arrived[variable] = gradient
        run.backward()
        for variable, before in part.last_user.items():
            self._give("back", before, micro, run.gradients.get(variable), variable.name)
        for leaf in part.own_leaves:
            self._add_up(leaf, run.gradients.get(leaf), micro)
        del self._runs[chunk, micro]

    def _add_up(self, leaf: Variable, gradient: Gradient | None, micro: int) -> None:
        """Add the gradient of an own parameter to those of the micro-batches before."""
        if gradient is None:
            return
        if self._uneven:
            gradient = _scaled(gradient, self._fractions[micro])
        before = self._totals.get(leaf)
        self._totals[leaf] = gradient if before is None else summed(before, gradient)

    # -- between pieces --------------------------------------------------------------------------

    def _give(self, way: str, chunk: int, micro: int, value: Gradient | None, name: str) -> None:
        """Leave a value for a piece, in this process with the same bits as in another."""
        stage = self._cut.stage_of(chunk)
        if stage == self._place.stage:
            self._mail[way, chunk, micro, name] = settled(value)
        else:
            self._send(way, stage, micro, settled(value), f"{chunk}/{name}")

    def _value_from(self, way: str, chunk: int, micro: int, source: int, name: str) -> Any:
        """The value that the piece `source` has left for the piece `chunk`."""
        stage = self._cut.stage_of(source)
        if stage == self._place.stage:
            return self._mail.pop((way, chunk, micro, name))
        return self._receive(way, stage, micro, f"{chunk}/{name}")

    def _share(self, variable: Variable) -> None:
        """Make a result known to every stage; parameters every stage can read for itself."""
        if variable in self._feeds:
            self._results[variable] = self._feeds[variable].copy()
        elif variable.value is not None:
            self._results[variable] = variable.value.copy()
        elif variable.record in set(self._plan.early):
            self._results[variable] = combine(
                variable, [g[variable] for g in self._given], self._fractions
            )
        elif variable.parameter is None:
            stage = self._cut.stage_of(self._owner_of(variable))
            copies = range(self._place.copies[stage])
            tellers = [self._place.runner(stage, copy) for copy in copies]
            if variable.backward_pass is None:
                self._results[variable] = self._spread_values(variable, tellers)
            else:
                self._results[variable] = self._spread_gradient(variable, tellers)

    def _owner_of(self, variable: Variable) -> int:
        """The piece that makes a value, or where a gradient comes together."""
        leaves = [
            leaf for leaf, gradient in self._backward_pass.gradients.items() if gradient is variable
        ]
        return next(
            (
                i
                for i, part in enumerate(self._parts)
                if variable in part.plan.kept or any(v in part.own_leaves for v in leaves)
            ),
            0,
        )

    def _spread_values(self, variable: Variable, tellers: Sequence[int]) -> Array:
        """Give all processes what the micro-batches have made, and put it together."""
        by_micro = self._seen.get(variable, {})
        mine = [by_micro[micro] for micro in sorted(by_micro)]
        by_copy = self._exchange(f"values/{variable.name}", tellers, mine)
        values = [by_copy[m % len(by_copy)][m // len(by_copy)] for m in range(len(self._sizes))]
        return combine(variable, values, self._fractions)

    def _spread_gradient(self, variable: Variable, tellers: Sequence[int]) -> Gradient | None:
        """Give all processes a gradient: the mean over the copies that have a part of it."""
        mine = pack(self.values.get(variable))
        by_copy = self._exchange(f"gradient/{variable.name}", tellers, mine)
        parts = [part for part in map(unpack, by_copy) if part is not None]
        if len(parts) < 2:
            return parts[0] if parts else None
        return _scaled(functools.reduce(summed, parts), 1 / len(parts))


def pipelined_step(
    program: Program,
    plan: ExecutionPlan,
    feeds: Mapping[Variable, Array],
    results: Sequence[Variable],
    meter: Any = None,
) -> PipelinedRun:
    """One step as this process's stage runs it, done but for the update."""
    place = ways.here()
    spec: PipelineSpec = plan.backwards[0].backward.pipeline
    far = ways.links(spec.queue_size) if place.processes > 1 else None
    settle_parts(program, plan, feeds, place, far)
    run = PipelinedRun(program, plan, feeds, place, far, ways.next_step(), meter)
    run.complete(results)
    return run


def settle_parts(
    program: Program,
    plan: ExecutionPlan,
    feeds: Mapping[Variable, Array],
    place: StagePosition,
    far: Links | None,
) -> None:
    """If the script has named no cuts, measure once, in the first step, where they are best."""
    spec: PipelineSpec = plan.backwards[0].backward.pipeline
    count = max(spec.stages, place.stages)
    if spec.parts is None and count > 1:
        tag = f"{ways.next_step()}/cuts"
        spec.parts = agree_on_parts(
            program, plan, feeds, spec.micro_batches, count, place, far, tag
        )


def _scaled(gradient: Gradient, factor: float) -> Gradient:
    if isinstance(gradient, SparseGrad):
        return gradient.with_rows(gradient.rows * np.float32(factor))
    return gradient * np.float32(factor)


class _LiveActivations:
    """Shows a meter all micro-batches that are alive as if they were one run."""

    def __init__(self, meter: Any, runs: Mapping[tuple[int, int], ChunkRun]) -> None:
        self._meter = meter
        self._runs = runs

    def measure(self, run: ProgramRun) -> None:
        """Called after each operation of any of them."""
        self._meter.measure(self)

    @property
    def values(self) -> dict[Any, Any]:
        return {(key, v): x for key, run in self._runs.items() for v, x in run.values.items()}

    @property
    def inputs(self) -> set[Any]:
        return {(key, v) for key, run in self._runs.items() for v in run.inputs}

    @property
    def contexts(self) -> dict[Any, Any]:
        return {(key, r): c for key, run in self._runs.items() for r, c in run.contexts.items()}
