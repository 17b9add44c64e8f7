"""PipelineOptimizer: a program cut into sections, run in micro-batches by stages."""

import warnings
from collections.abc import Sequence
from typing import Any

from psfleet.errors import ConfigError, UsageError
from psfleet.optimizer.optimizer import Optimizer
from psfleet.optimizer.wrapping_optimizers import COMMON, WrappingOptimizer
from psfleet.settings.environment import read_environment
from psfleet.stages.links import StagePosition, here
from psfleet.strategy import PipelineSettings, resolve
from psfleet.validation.annotations import NonNegativeInt, PositiveInt, checked


class PipelineOptimizer(WrappingOptimizer):
    """Cuts the program that it minimizes into 2k - 1 sections at k cuts.

    How many micro-batches, which schedule and how many stages there are is the strategy's matter
    (`psfleet-launch --pipeline`, or the part `pipeline` of a DistributedStrategy). Without one the
    sections run one after the other on the whole batch: the results are those of the program as it
    was. Everything but `minimize` is the wrapped optimizer's own.

    Args:
        optimizer: Updates the parameters.
        cut_list: For each forward piece the variables that it ends with; the last is [loss]. None:
            pieces of about equal work, as many as the strategy's stages need.
        place_list: For each section where it runs; may be left out. If it is given, a stage process
            whose sections are on CPUPlace keeps to cores of its own, as many as its BLAS has threads.
            CUDAPlace is accepted: sections run on the CPU, and the process may use every core.
        concurrency_list: For each section how many copies of it run; may be left out. In a job the
            strategy's `copies` decide; where they are fewer, a warning says so.
        queue_size: Number of micro-batches that may wait before a section.
        sync_steps: Steps between two synchronisations of copies: 1, as they share weights on servers.
        start_cpu_core_id: The first process's first core.

    Attributes:
        sections: After `minimize`: psfleet.program.pipeline.cutting.Section, in the order of a step.
        asked: The strategy's part `pipeline`; None: as the launcher says.

    Raises:
        ConfigError: A list has another length than 2k - 1, or a number is out of range.
    """

    own = COMMON | {
        "_cut",
        "_settle_process",
        "apply_gradients",
        "apply_optimize",
        "asked",
        "concurrency_list",
        "cut_list",
        "place_list",
        "queue_size",
        "sections",
        "start_cpu_core_id",
        "sync_steps",
    }

    @checked
    def __init__(
        self,
        optimizer: Optimizer,
        cut_list: Sequence[Any] | None = None,
        place_list: Sequence[Any] | None = None,
        concurrency_list: Sequence[PositiveInt] | None = None,
        queue_size: PositiveInt = 30,
        sync_steps: PositiveInt = 1,
        start_cpu_core_id: NonNegativeInt = 0,
    ) -> None:
        cuts = [] if cut_list is None else list(cut_list)
        count = 2 * len(cuts) - 1
        for name, entries in (("place_list", place_list), ("concurrency_list", concurrency_list)):
            if entries is not None and cuts and len(entries) != count:
                raise ConfigError(
                    f"PipelineOptimizer: {len(cuts)} cuts make {count} sections, but "
                    f"{name} has {len(entries)} entries"
                )
        if sync_steps > 1:
            raise ConfigError(
                f"PipelineOptimizer: sync_steps is {sync_steps}, but copies of a section have one set "
                "of weights, on the servers, and meet in every step; leave it at 1 (the strategy "
                "gradient_merge makes updates rarer)"
            )
        super().__init__(
            optimizer,
            cut_list=cuts,
            place_list=[] if place_list is None else list(place_list),
            concurrency_list=list(concurrency_list or [1] * max(count, 1)),
            queue_size=queue_size,
            sync_steps=sync_steps,
            start_cpu_core_id=start_cpu_core_id,
            sections=[],
            asked=None,
        )

    @checked
    def apply_optimize(
        self, loss: Any, startup_program: Any, params_grads: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """Second part of minimize: cut the program, and update at the end of each run."""
        passes = {getattr(gradient, "backward_pass", None) for _, gradient in params_grads}
        backward = passes.pop() if passes else None
        if backward is None or passes:
            raise UsageError(
                "a pipeline needs the gradients of one loss, as minimize() makes them; "
                "what is computed at once cannot be cut: build a program and minimize() its "
                "loss, or train without a pipeline"
            )
        self._cut(backward)
        operations: list[Any] = self._inner.apply_optimize(loss, startup_program, params_grads)
        return operations

    def _cut(self, backward: Any) -> None:
        from psfleet.program.pipeline.cutting import PipelineSpec, split

        sections = split(backward.loss, self.cut_list or [[backward.loss]])
        object.__setattr__(self, "sections", sections)
        parts = [section.records for section in sections if section.forward]
        settings = self.asked or asked_by_launcher() or PipelineSettings()
        backward.pipeline = PipelineSpec(
            settings.schedule,
            settings.stages,
            settings.micro_batches,
            settings.per_stage,
            parts if self.cut_list else None,
            min(self.queue_size, settings.queue_size),
        )
        if here().processes > 1 and self.cut_list:
            self._settle_process(here())

    def _settle_process(self, place: StagePosition) -> None:
        """Keep to the stage's cores, and say if there are fewer copies than the script asks for."""
        from psfleet.execution.executor import CUDAPlace
        from psfleet.program.pipeline.cutting import pin

        parts = len(self.cut_list)
        own = range(place.stage, parts, place.stages)
        if self.place_list and not all(isinstance(self.place_list[i], CUDAPlace) for i in own):
            pin(place, self.start_cpu_core_id)
        sections = {i for part in own for i in (part, 2 * parts - 2 - part)}
        copies = max((self.concurrency_list[i] for i in sections), default=1)
        if copies > place.copies[place.stage] and place.copy == 0:
            warnings.warn(
                f"concurrency_list asks for {copies} copies of stage {place.stage}, and the job was "
                f"started with {place.copies[place.stage]}; set copies in the strategy's part pipeline",
                stacklevel=2,
            )


def pipelining(optimizer: Optimizer, settings: PipelineSettings) -> Optimizer:
    """The optimizer with a pipeline as a strategy asks for it; one of its own keeps its cuts."""
    inner: Any = optimizer
    while inner is not None:
        if isinstance(inner, PipelineOptimizer):
            object.__setattr__(inner, "asked", settings)
            return optimizer
        inner = object.__getattribute__(inner, "__dict__").get("_inner")
    pipeline = PipelineOptimizer(optimizer)
    object.__setattr__(pipeline, "asked", settings)
    return pipeline


def asked_by_launcher() -> PipelineSettings | None:
    """Return the pipeline settings of the launcher's strategy."""
    return resolve(None, read_environment().strategy).pipeline
