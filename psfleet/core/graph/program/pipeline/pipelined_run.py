"""Training step of a pipelined program, as the stage of this process runs it.

Every stage runs the same script and gets the same feed. It divides the feed into micro-batches and computes
its own chunks of the program. These are the phases of a step, in the thread that trains:

    ids of all micro-batches -> one pull -> forward and backward passes by schedule -> exchange of results

Gradients of parameters are added up in the order of the micro-batches and divided by their number. So they
are bit-identical for any number of stages and any schedule. The executor then pushes them; each stage
pushes the gradients of its own parameters only.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from psfleet.core.engine.gradients import scaled
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
    """Run of one training step in one stage.

    Args:
        plan: Plan of this step's results, with one backward pass that has a PipelineSpec.
        feeds: Checked feeds of the whole batch.
        place: Position of this process in the pipeline.
        links: Links to the other processes of the pipeline, or None if there are none.
        number: Number of the step, the same in all stages.
        meter: Object whose `measure(run)` is called after every operation, or None.

    Attributes:
        values: After `complete`, the gradients of this stage's own parameters, and the loss.
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
        # Values between chunks of this stage, by direction, receiving chunk, micro-batch and name.
        self._mail: dict[tuple[str, int, int, str], Gradient | None] = {}
        self._given: list[
            Values
        ] = []  # for each micro-batch the feeds, ids and weights that chunks start from
        self._rows: dict[str, StepRows] = {}
        self._results: Values = {}
        self._uneven = len(set(self._sizes)) > 1

    def complete(self, results: Sequence[Variable]) -> None:
        """Run all micro-batches forward and back, then exchange the results with the other stages."""
        self._prepare(results)
        self._take_actions()
        # Servers average over the copies of a stage. So each copy pushes its sum times the number of
        # copies. Micro-batches of different sizes were weighted when they were added. Equal ones all have
        # the same fraction.
        copies = min(self._place.copies[self._place.stage], len(self._sizes))
        factor = copies * (1.0 if self._uneven else self._fractions[0])
        for leaf, total in self._totals.items():
            whole = total if factor == 1 else scaled(total, factor)
            self.values[self._backward_pass.gradients[leaf]] = whole
        for variable in dict.fromkeys([self._backward_pass.loss, *results]):
            self._share(variable)
        self.values[self._backward_pass.loss] = self._results[self._backward_pass.loss]

    def result(self, variable: Variable) -> Any:
        """Return a value for the user. Returns zeros if no stage has computed it."""
        value = self._results.get(variable)
        if value is not None:
            return value
        if variable.parameter is not None:
            return variable.parameter.numpy().copy()
        return np.zeros([extent or 0 for extent in variable.shape], variable.dtype)

    def _prepare(self, results: Sequence[Variable]) -> None:
        """Divide the feed into micro-batches, compute ids, and pull all parameters and rows with one call."""
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
            # In sync mode, the next pull of a stage also commits its push, and pulls of other stages wait
            # for that. A stage that reads nothing would block the other stages, and then wait for their
            # values. So every stage pulls, even if the pull is empty.
            active().pull([])
        weights = {v: v.parameter.numpy() for v in dense if v.parameter}
        for values in self._given:
            values.update(weights)
        for parameter, ids, flat in whole:
            self._distribute_rows(parameter, ids, parameter.lookup(flat))

    def _distribute_rows(self, parameter: Parameter, ids: Variable, rows: Array) -> None:
        """Divide the rows that were pulled for all micro-batches together among the micro-batches."""
        stand_in = self._rows.setdefault(parameter.name, StepRows(parameter))
        start = 0
        for values in self._given:
            micro_ids = values[ids]
            part = rows[start : start + micro_ids.size]
            stand_in.add(micro_ids, part.reshape(*micro_ids.shape, part.shape[-1]))
            start += micro_ids.size

    def _micro_program(self, micro: int) -> Program:
        """Return the program with this micro-batch's own step number, so that dropout masks differ."""
        step = self._program.step * len(self._sizes) + micro
        return dataclasses.replace(self._program, step=step)

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
        # Store results, and drop them here; values for other chunks have been sent. The loss must stay to
        # start the backward pass. A recomputing run decides itself which values to drop.
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
        """Add a micro-batch's gradient of this stage's parameter to those of earlier micro-batches."""
        if gradient is None:
            return
        if self._uneven:
            gradient = scaled(gradient, self._fractions[micro])
        before = self._totals.get(leaf)
        self._totals[leaf] = gradient if before is None else summed(before, gradient)

    def _give(self, way: str, chunk: int, micro: int, value: Gradient | None, name: str) -> None:
        """Pass a value or gradient on to a chunk of this stage or of another stage.

        `settled` gives the value the memory layout that it would have after a message. So computing with it
        is bit-identical in both cases.
        """
        stage = self._cut.stage_of(chunk)
        if stage == self._place.stage:
            self._mail[way, chunk, micro, name] = settled(value)
        else:
            self._send(way, stage, micro, settled(value), f"{chunk}/{name}")

    def _value_from(self, way: str, chunk: int, micro: int, source: int, name: str) -> Any:
        """Return the value that the chunk `source` passes on to `chunk`. Waits until it has arrived."""
        stage = self._cut.stage_of(source)
        if stage == self._place.stage:
            return self._mail.pop((way, chunk, micro, name))
        return self._receive(way, stage, micro, f"{chunk}/{name}")

    def _share(self, variable: Variable) -> None:
        """Send a result to every stage. Parameters are not sent, because every stage can read them."""
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
        """Return the chunk that computes a value, or that completes the gradient of a parameter or input."""
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
        """Exchange a result of each micro-batch among all processes, and return the result of the batch.

        Several processes may be copies of one stage. They take micro-batches in turn: the result of
        micro-batch m is in copy m % copies, at index m // copies.

        `tellers`: Numbers of the processes that have the result: the copies of its stage.
        """
        by_micro = self._seen.get(variable, {})
        own_values = [by_micro[micro] for micro in sorted(by_micro)]
        by_copy = self._exchange(f"values/{variable.name}", tellers, own_values)
        values = [by_copy[m % len(by_copy)][m // len(by_copy)] for m in range(len(self._sizes))]
        return combine(variable, values, self._fractions)

    def _spread_gradient(self, variable: Variable, tellers: Sequence[int]) -> Gradient | None:
        """Exchange the gradient of a parameter or input among all processes.

        Returns the mean over `tellers`, the processes that are copies of the stage which computes it.
        """
        own_gradient = pack(self.values.get(variable))
        by_copy = self._exchange(f"gradient/{variable.name}", tellers, own_gradient)
        parts = [part for part in map(unpack, by_copy) if part is not None]
        if len(parts) < 2:
            return parts[0] if parts else None
        return scaled(functools.reduce(summed, parts), 1 / len(parts))


def pipelined_step(
    program: Program,
    plan: ExecutionPlan,
    feeds: Mapping[Variable, Array],
    results: Sequence[Variable],
    meter: Any = None,
) -> PipelinedRun:
    """Run a training step in this process's stage, up to the update of parameters.

    Args:
        feeds: Checked feeds of the whole batch.
        results: Variables to fetch. Every stage gets them.
        meter: Object whose `measure(run)` is called after every operation, or None.
    """
    position = ways.here()
    spec: PipelineSpec = plan.backwards[0].backward.pipeline
    stage_links = ways.links(spec.queue_size) if position.processes > 1 else None
    settle_parts(program, plan, feeds, position, stage_links)
    run = PipelinedRun(program, plan, feeds, position, stage_links, ways.next_step(), meter)
    run.complete(results)
    return run


def settle_parts(
    program: Program,
    plan: ExecutionPlan,
    feeds: Mapping[Variable, Array],
    place: StagePosition,
    far: Links | None,
) -> None:
    """Measure in the first step where to cut the program into chunks, unless the script has given cuts.

    All stages must call this.
    """
    spec: PipelineSpec = plan.backwards[0].backward.pipeline
    count = max(spec.stages, place.stages)
    if spec.parts is None and count > 1:
        tag = f"{ways.next_step()}/cuts"
        spec.parts = agree_on_parts(
            program, plan, feeds, spec.micro_batches, count, place, far, tag
        )


class _LiveActivations:
    """Presents the runs of all micro-batches that are in memory as a single run, for a meter."""

    def __init__(self, meter: Any, runs: Mapping[tuple[int, int], ChunkRun]) -> None:
        self._meter = meter
        self._runs = runs

    def measure(self, run: ProgramRun) -> None:
        """Measure all runs. Called after an operation of any run."""
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
