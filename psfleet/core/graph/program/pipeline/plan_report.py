"""Report on a strategy for a program: memory, bytes, schedule and bubble, from one measured step.

The step runs in this process, all pieces in turn, and changes nothing. What it measures is put
together for as many stages as are asked for.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.graph.program.operation import Array, Gradient
from psfleet.core.graph.program.pipeline.chunk import ChunkPlan
from psfleet.core.graph.program.pipeline.cutting import PipelineSpec, check_share
from psfleet.core.graph.program.pipeline.estimates import EQUAL, picture, simulate
from psfleet.core.graph.program.pipeline.pipelined_run import PipelinedRun, settle_parts
from psfleet.core.graph.program.program import Program
from psfleet.core.graph.program.recompute import ActivationMeter, RecomputePlan
from psfleet.core.graph.program.run import ExecutionPlan
from psfleet.core.graph.program.variable import Variable
from psfleet.core.runtime.stages import Action, Schedule, StagePosition, Work


@dataclass
class StepProfile:
    """Profile of one step, by chunk.

    Attributes:
        seconds: The least that an action took, by chunk and work.
        held: Bytes of activations that a micro-batch keeps between forward and backward.
        sent: Bytes that one chunk gives another, over all micro-batches.
    """

    seconds: dict[tuple[int, Work], float] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    sent: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))


class ProfilingRun(PipelinedRun):
    """A step in one process that measures itself.

    Attributes:
        measured: After `complete`.
    """

    def __init__(
        self, program: Program, plan: ExecutionPlan, feeds: Mapping[Variable, Array]
    ) -> None:
        super().__init__(program, plan, feeds, StagePosition(), None, 0)
        self.measured = StepProfile()
        self._chunk = 0

    @property
    def parts(self) -> list[ChunkPlan]:
        """Parts of the program."""
        return self._parts

    @property
    def sizes(self) -> Sequence[int]:
        """Samples of each micro-batch."""
        return self._sizes

    @property
    def gradients(self) -> Mapping[Variable, Gradient]:
        """Whole gradients by leaf."""
        return self._totals

    def row_bytes(self, part: ChunkPlan) -> int:
        """Bytes of the rows that a piece looks up, and of their ids."""
        return sum(
            given[ids].size * (8 + 4 * parameter.shape[1])
            for parameter, ids in part.lookups
            for given in self._given
        )

    def _perform(self, action: Action) -> None:
        self._chunk = action.chunk
        begin = time.perf_counter()
        super()._perform(action)
        key = action.chunk, action.work
        seconds = time.perf_counter() - begin
        self.measured.seconds[key] = min(seconds, self.measured.seconds.get(key, math.inf))
        if action.work is Work.FORWARD:
            meter = ActivationMeter()
            meter.measure(self._runs[action.chunk, action.micro])
            peaks = self.measured.held
            peaks[action.chunk] = max(peaks[action.chunk], meter.peak_bytes)

    def _give(
        self, way: str, chunk: int, micro: int, value: Gradient | None, name: str = ""
    ) -> None:
        self.measured.sent[self._chunk, chunk] += _bytes(value)
        super()._give(way, chunk, micro, value, name)


def study(program: Program, plan: ExecutionPlan, feeds: Mapping[Variable, Array]) -> str:
    """The report on a training step that could be run now; nothing is updated.

    Args:
        plan: Plan of the step. Without a pipeline it is reported as one stage and one micro-batch.
    """
    backward = plan.backwards[0].backward
    if backward.pipeline is None:
        backward.pipeline = PipelineSpec()
    settle_parts(program, plan, feeds, StagePosition(), None)
    for _ in range(2):  # the first one warms up
        run = ProfilingRun(program, plan, feeds)
        run.complete([])
    return report(run, backward.pipeline)


def report(run: ProfilingRun, spec: PipelineSpec) -> str:
    """Return the report of the measured step for the stages that are asked for."""
    stages = spec.stages
    check_share(len(run.parts), stages)
    schedule = spec.order(stages, len(run.sizes), len(run.parts) // stages)
    timeline = simulate(schedule, lambda action: run.measured.seconds[action.chunk, action.work])
    equal = simulate(schedule, EQUAL).bubble
    return "\n".join(
        [
            f"{schedule.kind} · {_count(stages, 'stage')} of each worker · "
            f"{_count(len(run.sizes), 'micro-batch', 'es')} of {max(run.sizes):,} samples",
            "",
            *_table(run, schedule),
            "",
            picture(schedule),
            "",
            f"bubble {timeline.bubble:.1%} of the stages' time as measured, {equal:.1%} if all pieces took "
            f"equally long; a step takes {timeline.length * 1e3:,.1f} ms and "
            f"{sum(timeline.busy) * 1e3:,.1f} ms of work",
            *_recomputes(run),
        ]
    )


def _table(run: ProfilingRun, schedule: Schedule) -> Iterator[str]:
    yield (
        f"{'':<9}{'operations':>11}{'parameters':>12}{'activations':>13}{'memory':>12}"
        f"{'to stages':>12}{'with servers':>14}  a step"
    )
    for stage, actions in enumerate(schedule.stages):
        chunks = range(stage, schedule.chunks, len(schedule.stages))
        parts = [run.parts[chunk] for chunk in chunks]
        weights = sum(
            4 * math.prod(v.parameter.shape) for part in parts for v in part.dense if v.parameter
        )
        gradients = sum(_bytes(run.gradients.get(v)) for part in parts for v in part.own_leaves)
        rows = sum(run.row_bytes(part) for part in parts)
        activations = _peak(actions, run.measured.held, schedule.kind == "zero-bubble")
        bytes_out = sum(
            size
            for (source, target), size in run.measured.sent.items()
            if source in chunks and schedule.stage_of(target) != stage
        )
        yield (
            f"stage {stage:<3}{sum(len(part.plan.forward) for part in parts):>11,}"
            f"{_size(weights):>12}{_size(activations):>13}"
            f"{_size(weights + gradients + rows + activations):>12}{_size(bytes_out):>12}"
            f"{_size(weights + gradients + rows):>14}"
        )


def _peak(actions: Sequence[Action], sizes: Mapping[int, int], split: bool) -> int:
    """The most bytes of activations that are alive at once in the order of the actions."""
    live = peak = 0
    for action in actions:
        if action.work is Work.FORWARD:
            live += sizes[action.chunk]
        elif action.work is (Work.WEIGHT if split else Work.BACKWARD):
            live -= sizes[action.chunk]
        peak = max(peak, live)
    return peak


def _recomputes(run: ProfilingRun) -> Iterator[str]:
    for number, part in enumerate(run.parts):
        plan: RecomputePlan | None = part.plan.recompute
        if plan is not None:
            spans = [
                f"{s.records[0].output.name} to {s.records[-1].output.name}"
                for s in plan.segments
                if s.dropped and s.records
            ]
            yield f"recompute in piece {number}: {'; '.join(spans) or 'nothing'}"


def _bytes(value: Any) -> int:
    if isinstance(value, SparseGrad):
        return value.ids.nbytes + value.rows.nbytes
    return 0 if value is None else int(value.nbytes)


def _size(number: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number} B"


def _count(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}" + (ending if number != 1 else "")
