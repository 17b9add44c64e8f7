"""Pipeline: an nn.Sequential trained in micro-batches, by as many stages as the launcher starts."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from psfleet import fleet
from psfleet.pipeline.cutting import check_share
from psfleet.runtime.interface import Runtime
from psfleet.stages.links import here
from psfleet.stages.schedule import Schedule, even_sizes, make_schedule
from psfleet.strategy import Settings
from psfleet.torch.conversion import converted
from psfleet.torch.optimizers import DistributedOptimizer
from psfleet.torch.parameter_plan import Optimizers
from psfleet.torch.pipeline_step import Loss, PipelineStep
from psfleet.torch.recompute_blocks import blocks_of, check_repeatable, recompute
from psfleet.torch.sequential_chunks import StageModules, StepSeeds
from psfleet.torch.sequential_cuts import check_cuts, chunks_of, refuse_shared
from psfleet.torch.stage_messages import micro_batch, samples_of
from psfleet.torch.strategy_support import check_strategy, pipeline_of

__all__ = ["Pipeline"]


class _PipelineOptimizer(DistributedOptimizer):
    """Of a model that is trained in pieces."""

    _cut = True

    def _prepare(self, model: nn.Module, settings: Settings) -> None:
        if settings.recompute is not None and settings.recompute.checkpoints:
            recompute(model, settings.recompute)


class Pipeline:
    """Trains an nn.Sequential, cut into the stages that `psfleet-launch --stages` starts.

        trainer = Pipeline(model, torch.optim.Adam(model.parameters()), nn.functional.mse_loss)
        for x, y in fleet.shard(loader):
            loss = trainer.step(x, y)

    The same script runs in one process and on stages: every stage runs all of it with the same batches
    and computes its own modules. With the same micro-batches, losses and weights are the same bits on
    any number of stages, in every schedule. Without a launcher there is one micro-batch, the batch.

    The model is moved to the servers as convert() does. `model(x)` and `model.state_dict()` are of the
    whole model, in every stage.

    Args:
        model: Is changed in place. Its modules give a tensor or a tuple of tensors.
        optimizers: As for convert().
        loss: Of the model's output and the targets: a mean over the samples.
        cuts: Places of the modules that begin a piece, such as [2, 5]; None: pieces of about equal
            work, found with the first batch.
        name, runtime: As for DistributedOptimizer.
        servers: As for convert().

    Attributes:
        model: The converted model.
        optimizer: Its DistributedOptimizer, for schedulers of the learning rate.

    Raises:
        ConfigError: The strategy asks for what there is not, see docs/torch.md.
        UsageError: The model or the optimizers cannot be cut.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        loss: Loss,
        *,
        cuts: Sequence[int] | None = None,
        name: str = "",
        runtime: Runtime | None = None,
        servers: Mapping[str, int] | None = None,
    ) -> None:
        settings = fleet.settings()
        check_strategy(settings, cut=True)
        self._asked = pipeline_of(settings)
        self._cuts = cuts
        self._loss = loss
        check_cuts(model, cuts)
        if cuts is not None:
            check_share(len(cuts) + 1, here().stages)
        wish = settings.recompute
        self._recomputes = wish is not None and not wish.checkpoints
        if wish is not None and wish.checkpoints:
            blocks_of(model, wish)
        elif wish is not None:
            check_repeatable("", model)
        self.model, self.optimizer = converted(
            check_cuts(model, cuts),
            optimizers,
            _PipelineOptimizer,
            name=name,
            runtime=runtime,
            servers=servers,
        )
        self._seed = torch.initial_seed()
        self._steps = 0
        self._pieces: StageModules | None = None

    def step(self, inputs: Any, targets: Any) -> Tensor:
        """Train on one batch: all micro-batches forward and back, then one update.

        Args:
            inputs: Of the first module: tensors of equal length, in tuples, lists and dicts.
            targets: Of the loss, likewise.

        Returns:
            The loss of the batch before the update, float32 []; the same in every stage.

        Raises:
            ShapeError: Tensors differ in length, or the loss is no single number.
        """
        samples = samples_of((inputs, targets))
        sizes = even_sizes(samples, self._asked.micro_batches)
        if self._pieces is None:
            self._pieces = self._cut(micro_batch(inputs, 0, sizes[0]))
        self.optimizer.zero_grad()
        schedule = self._schedule(self._pieces, len(sizes))
        seeds = StepSeeds(self._seed, here().worker, self._steps)
        run = PipelineStep(self._pieces, schedule, sizes, inputs, targets, self._loss, seeds)
        loss = run.complete()
        self._steps += 1
        self.optimizer.step(samples=0 if here().process else samples, loss=loss)
        return torch.tensor(loss)

    def _cut(self, batch: Any) -> StageModules:
        stages = max(self._asked.stages, here().stages)
        chunks = chunks_of(self.model, self._cuts, stages * self._asked.per_stage, batch)
        refuse_shared(self.model, chunks)
        pieces = StageModules(
            self.model, chunks, here().stages, self._recomputes, self._asked.queue_size
        )
        self.optimizer.narrow(pieces.own)
        return pieces

    def _schedule(self, pieces: StageModules, micro_batches: int) -> Schedule:
        per_stage = len(pieces.chunks) // here().stages
        return make_schedule(self._asked.schedule, here().stages, micro_batches, per_stage)
