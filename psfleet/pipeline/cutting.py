"""What is asked of a pipeline, and how a program is cut and scheduled for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from psfleet.errors import ConfigError
from psfleet.pipeline.balance import balanced_parts
from psfleet.pipeline.chunk_plan import ChunkPlan, cut_plan
from psfleet.pipeline.simulation import live_micro_batches
from psfleet.program.backward import Automatic
from psfleet.program.operation import Record
from psfleet.program.plan import ExecutionPlan
from psfleet.stages.schedule import Schedule, make_schedule

__all__ = ["PartitionedPlan", "PipelineSpec", "check_share"]


@dataclass
class PartitionedPlan:
    """A plan cut for a number of stages.

    Attributes:
        pieces: One for each chunk.
        per_stage: Chunks of each stage.
    """

    pieces: list[ChunkPlan]
    per_stage: int


@dataclass(eq=False)
class PipelineSpec:
    """How a program is run as a pipeline; attached to its backward pass.

    Attributes:
        schedule: Kind of schedule.
        stages: How many chunks to make if no cuts are given, divided by `chunks`.
        micro_batches: How many parts a batch is cut into.
        chunks: Chunks of each stage if no cuts are given.
        parts: The program's records by chunk; None: the first step measures where the chunks are
            balanced (see timing.py), or it is cut by sizes where nobody measures.
        queue_size: Messages to a stage that may wait before their sender does.
    """

    schedule: str = "1f1b"
    stages: int = 1
    micro_batches: int = 1
    chunks: int = 1
    parts: Sequence[Sequence[Record]] | None = None
    queue_size: int = 30
    _cuts: dict[int, tuple[ExecutionPlan, PartitionedPlan]] = field(default_factory=dict)
    _schedules: dict[tuple[int, int, int], Schedule] = field(default_factory=dict)

    def cut(self, plan: ExecutionPlan, stages: int) -> PartitionedPlan:
        """The plan's pieces for a number of stages, made once.

        Raises:
            ConfigError: The stages cannot share the pieces evenly.
        """
        known = self._cuts.get(id(plan))
        if known is None or known[0] is not plan:
            known = self._cuts[id(plan)] = (plan, self._cut(plan, stages))
        return known[1]

    def _cut(self, plan: ExecutionPlan, stages: int) -> PartitionedPlan:
        parts = self.parts or balanced_parts(plan, max(self.stages, stages) * self.chunks)
        check_share(len(parts), stages)
        cut = PartitionedPlan(cut_plan(plan, parts), len(parts) // stages)
        for number, piece in enumerate(cut.pieces):
            self._set_budget(piece, number % stages, stages, cut.per_stage)
        return cut

    def _set_budget(self, piece: ChunkPlan, stage: int, stages: int, per_stage: int) -> None:
        """Share a memory budget for activations among the micro-batches that are alive at once."""
        for plan in piece.plan.backwards:
            wanted: Any = plan.backward.checkpoints
            if wanted is not None and self.schedule == "zero-bubble":
                raise ConfigError(
                    "pipeline schedule zero-bubble and recompute contradict each other:"
                    " one keeps what the other drops; use 1f1b"
                )
            if isinstance(wanted, Automatic) and wanted.budget is not None:
                schedule = self.order(stages, self.micro_batches, per_stage)
                live = live_micro_batches(schedule, stage)
                share = Automatic(max(wanted.budget // live, 1))
                plan.backward = replace(plan.backward, checkpoints=share)

    def order(self, stages: int, micro_batches: int, per_stage: int) -> Schedule:
        """The schedule, made once."""
        key = stages, micro_batches, per_stage
        if key not in self._schedules:
            self._schedules[key] = make_schedule(self.schedule, *key)
        return self._schedules[key]


def check_share(pieces: int, stages: int) -> None:
    """Refuse a number of stages that cannot share the pieces evenly."""
    if pieces % stages:
        raise ConfigError(
            f"the program is cut into {pieces} pieces, which {stages} stages cannot "
            "share evenly; start a number of stages that divides it"
        )
