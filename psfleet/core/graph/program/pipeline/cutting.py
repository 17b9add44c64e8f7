"""Settings of a pipeline, cutting a program into chunks or sections, and pinning processes to cores.

The program is cut into k *chunks* of neighboring operations. The last chunk and its backward pass form one
*section*. With the other k - 1 forward and k - 1 backward passes there are 2k - 1 sections:

    F0 -> F1 -> ... -> F(k-1) + B(k-1) -> ... -> B1 -> B0

`split` cuts where the user says (`cut_list` of PipelineOptimizer). Without cuts, `estimates.py` finds
chunks of about equal work. Each stage (a process) runs the same number of neighboring chunks.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.settings.environment import threads
from psfleet.core.base.settings.kinds import Schedule
from psfleet.core.graph.program.backward import Automatic, known_variable
from psfleet.core.graph.program.operation import Record, ancestors
from psfleet.core.graph.program.pipeline.chunk import ChunkPlan, cut_plan
from psfleet.core.graph.program.pipeline.estimates import balanced_parts
from psfleet.core.graph.program.run import ExecutionPlan
from psfleet.core.graph.program.variable import Variable
from psfleet.core.runtime.stages import StagePosition, live_micro_batches


@dataclass
class PartitionedPlan:
    """Plan of a program that is cut into chunks for a number of stages.

    Attributes:
        parts: Plan of each chunk, in forward order.
        per_stage: Number of neighboring chunks that each stage runs.
    """

    parts: list[ChunkPlan]
    per_stage: int

    def stage_of(self, chunk: int) -> int:
        """Return the index of the stage (process) that runs a chunk."""
        return chunk // self.per_stage

    def chunks_of(self, stage: int) -> range:
        """Return the numbers of the chunks that a stage runs, in forward order."""
        return range(stage * self.per_stage, (stage + 1) * self.per_stage)


@dataclass(eq=False)
class PipelineSpec:
    """Settings for running a program as a pipeline. A program's backward pass has them.

    Attributes:
        schedule: Order of forward and backward passes.
        stages: Number of chunks to make if the user gives no cuts.
        micro_batches: Number of micro-batches that a batch is divided into.
        parts: Records of each chunk. None means that the first step measures where to cut (`agree_on_parts`).
            A plan that is cut without a measurement is cut by shapes.
        queue_size: Number of messages to a stage that may wait before `send` blocks.
    """

    schedule: Schedule = "1f1b"
    stages: int = 1
    micro_batches: int = 1
    parts: Sequence[Sequence[Record]] | None = None
    queue_size: int = 30
    _cuts: dict[int, tuple[ExecutionPlan, PartitionedPlan]] = field(default_factory=dict)

    def cut(self, plan: ExecutionPlan, stages: int) -> PartitionedPlan:
        """Cut a plan into chunks for a number of stages. The result is cached for later calls.

        Raises:
            ConfigError: The number of stages does not divide the number of chunks.
        """
        # The entry also holds the plan, so that no other object can get its id(). A plan itself is not
        # hashable.
        entry = self._cuts.get(id(plan))
        if entry is None or entry[0] is not plan:
            entry = self._cuts[id(plan)] = (plan, self._cut(plan, stages))
        return entry[1]

    def _cut(self, plan: ExecutionPlan, stages: int) -> PartitionedPlan:
        parts = self.parts or balanced_parts(plan, max(self.stages, stages))
        check_share(len(parts), stages)
        cut = PartitionedPlan(cut_plan(plan, parts), len(parts) // stages)
        for chunk, part in enumerate(cut.parts):
            stage = cut.stage_of(chunk)
            live = live_micro_batches(self.schedule, stage, stages, self.micro_batches)
            _set_budget(part, live * cut.per_stage)
        return cut


def _set_budget(part: ChunkPlan, live: int) -> None:
    """Divide the memory budget of recomputation by `live`, the number of runs in memory at a time."""
    for plan in part.plan.backwards:
        checkpoints: Any = plan.backward.checkpoints
        if isinstance(checkpoints, Automatic) and checkpoints.budget is not None:
            share = Automatic(max(checkpoints.budget // live, 1))
            plan.backward = replace(plan.backward, checkpoints=share)


def check_share(parts: int, stages: int) -> None:
    """Raise an error if the number of stages does not divide the number of chunks."""
    if parts % stages:
        raise ConfigError(
            f"the program is cut into {parts} sections, which {stages} stages cannot "
            "share evenly; start a number of stages that divides it"
        )


def cores_of(place: StagePosition, start: int, width: int, available: Sequence[int]) -> list[int]:
    """Return the cores for a process: `width` neighboring cores, after those of the previous process.

    Args:
        place: Position of the process. Processes of worker 1 come after all processes of worker 0.
        start: Index of the first process's first core among the available cores. After the last core the
            first one is used again, so processes may share cores.
        available: Numbers of the cores that may be used.
    """
    first = start + (place.worker * place.processes + place.process) * width
    return sorted({available[(first + i) % len(available)] for i in range(width)})


def pin(place: StagePosition, start: int) -> None:
    """Restrict all threads of this process to some cores: as many as its BLAS has threads.

    Every process gets the cores after those of the process before. Processes of workers on other hosts are
    counted too, as if they were on this host.

    Args:
        start: Index of the first process's first core among the available cores.
    """
    available, width = _available(), threads()
    cores = cores_of(place, start, width, available)
    end = start + (place.worker + 1) * place.processes * width
    if end > len(available) and place.process == 0:
        warnings.warn(
            f"start_cpu_core_id is {start}: {place.processes} processes of {width} "
            f"thread(s) up to {place.name(0)} want {end} cores and there are {len(available)}, so "
            "some share one",
            stacklevel=2,
        )
    # sched_setaffinity changes one thread; BLAS has started its threads already.
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(task.name), cores)


@functools.cache
def _available() -> tuple[int, ...]:
    """Return the cores that the process may use. Cached before the first `pin`, which restricts them."""
    return tuple(sorted(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class Section:
    """Part of a training step between two cuts.

    Attributes:
        number: Index of the section among all 2k - 1.
        part: Index of the chunk that the section computes, or goes back through.
        records: Records of that chunk, in forward order.
        forward, backward: True if the section computes the chunk, and True if it goes back through the chunk.
            For the middle section both are True.
        takes: Variables of earlier chunks that the chunk reads. A backward section computes their gradients.
        gives: Variables of the chunk that later chunks read. A backward section receives their gradients.
    """

    number: int
    part: int
    records: tuple[Record, ...]
    forward: bool
    backward: bool
    takes: tuple[Variable, ...]
    gives: tuple[Variable, ...]


def split(
    loss: Variable, cut_list: Sequence[Sequence[Variable | str] | Variable | str]
) -> list[Section]:
    """Cut a training step into sections: the forward pass to a loss, and its backward pass.

    Args:
        loss: Loss to minimize.
        cut_list: Variables that each chunk ends with, or names of variables or layers. The last cut must be
            the loss.

    Raises:
        UsageError: A cut is empty, the loss is not computed from it, or there is no operation between it and
            the cuts before it.
    """
    cuts = [_variables(number, cut) for number, cut in enumerate(cut_list)]
    if not cuts or cuts[-1] != [loss]:
        raise UsageError(
            f"cut_list must end with the loss, [{loss.name!r}]; it ends with "
            f"{[v.name for v in cuts[-1]] if cuts else 'nothing'}"
        )
    parts = _parts(loss, cuts)
    count = len(parts)
    ends = [(_taken(parts, i), _given(parts, i, loss)) for i in range(count)]
    order = [(i, True, i == count - 1) for i in range(count)]
    order += [(i, False, True) for i in reversed(range(count - 1))]
    return [
        Section(number, i, tuple(parts[i]), forward, backward, *ends[i])
        for number, (i, forward, backward) in enumerate(order)
    ]


def _variables(number: int, cut: Any) -> list[Variable]:
    entries = list(cut) if isinstance(cut, list | tuple) else [cut]
    if not entries:
        raise UsageError(f"cut {number} is empty; it must have a variable")
    return [known_variable(entry, f"cut {number}:") for entry in entries]


def _parts(loss: Variable, cuts: list[list[Variable]]) -> list[list[Record]]:
    whole = set(ancestors([loss]))
    earlier: set[Record] = set()
    parts = []
    for number, cut in enumerate(cuts):
        foreign = [v.name for v in cut if v.record not in whole]
        if foreign:
            raise UsageError(
                f"cut {number} has {foreign[0]!r}, which the loss {loss.name!r} is not computed by"
            )
        part = [record for record in ancestors(cut) if record not in earlier]
        if not part:
            raise UsageError(
                f"cut {number}, {[v.name for v in cut]}, is behind an earlier cut: "
                "between two cuts there must be an operation"
            )
        earlier.update(part)
        parts.append(part)
    return parts


def _taken(parts: list[list[Record]], i: int) -> tuple[Variable, ...]:
    part_records = set(parts[i])
    variables: dict[Any, None] = {
        v: None
        for record in parts[i]
        for v in record.inputs
        if v.record is not None and v.record not in part_records
    }
    return tuple(variables)


def _given(parts: list[list[Record]], i: int, loss: Variable) -> tuple[Variable, ...]:
    later = {v for part in parts[i + 1 :] for record in part for v in record.inputs} | {loss}
    return tuple(record.output for record in parts[i] if record.output in later)
