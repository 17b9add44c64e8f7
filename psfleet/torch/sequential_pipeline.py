"""Pipeline: trains an nn.Sequential in micro-batches, split over the stages that the launcher starts.

This file has the class for scripts, and splits the model into chunks. pipeline_step runs one step of one
stage.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from psfleet import fleet
from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.validation.annotations import checked
from psfleet.core.engine.runtime_interface import Runtime
from psfleet.core.graph.program.pipeline.cutting import check_share
from psfleet.core.graph.program.pipeline.estimates import balanced_edges
from psfleet.core.runtime.stages import even_sizes, here
from psfleet.core.runtime.strategy import Settings
from psfleet.torch.conversion import converted
from psfleet.torch.optimizers import DistributedOptimizer
from psfleet.torch.parameter_plan import Optimizers
from psfleet.torch.pipeline_step import (
    Loss,
    PipelineStep,
    StageModules,
    StepSeeds,
    micro_batch,
    samples_of,
    tensors_of,
)
from psfleet.torch.strategy_support import (
    blocks_of,
    check_repeatable,
    check_strategy,
    pipeline_of,
    recompute,
)
from psfleet.torch.table_weight import TableWeight


def check_cuts(model: nn.Module, cuts: Sequence[int] | None) -> nn.Sequential:
    """Check that the model can be split before these modules, and return the model.

    Raises:
        UsageError: The model is no nn.Sequential, or an entry of `cuts` is not the index of a module, or
            `cuts` is not ascending.
    """
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        raise UsageError(
            f"a pipeline cuts an nn.Sequential between its modules; the model is a "
            f"{type(model).__name__}"
        )
    edges = [0, *(cuts or ()), len(model)]
    if any(a >= b for a, b in pairwise(edges)):
        raise UsageError(
            f"cuts is {list(cuts or ())}; it must name, in ascending order, modules from 1 to "
            f"{len(model) - 1} that begin a section"
        )
    return model


def chunks_of(
    model: nn.Sequential, cuts: Sequence[int] | None, count: int, batch: Any
) -> list[range]:
    """Split the model into chunks (consecutive modules that run in one process).

    Returns the modules of each chunk as a range of indices in the model. Without `cuts`, the chunks have
    about equal work. Among equally good splits, the one that sends the least data between chunks is taken.
    The work of a module is the number of its multiplications and results for one sample. It is counted and
    not timed, so that all stages find the same split.

    Args:
        cuts: Index of the first module of each chunk but the first, or None to find `count` chunks.
        count: Number of chunks, if `cuts` is None.
        batch: Input of the model, a few samples.

    Raises:
        ConfigError: The model has fewer modules than chunks.
    """
    if cuts is not None:
        return [range(a, b) for a, b in pairwise([0, *cuts, len(model)])]
    if len(model) < count:
        raise ConfigError(
            f"the nn.Sequential has {len(model)} modules, too few for {count} sections of a "
            "pipeline; use fewer stages"
        )
    if count == 1:
        return [range(len(model))]
    work, crossing = _measured(model, batch)
    return [range(a, b) for a, b in pairwise(balanced_edges(work, crossing, count))]


def refuse_shared(model: nn.Sequential, chunks: Sequence[range]) -> None:
    """Refuse a model in which modules of two chunks share a weight, because a weight belongs to one stage.

    Raises:
        UsageError: Two chunks share a weight.
    """
    users = Counter(
        parameter
        for chunk in chunks
        for parameter in {p for i in chunk for p in model[i].parameters()}
    )
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, count in users.items():
        if count > 1:
            raise UsageError(
                f"{names[parameter]!r} is used in {count} sections of the pipeline, and a weight "
                "belongs to one stage; name cuts that keep its users together"
            )


@torch.no_grad()
def _measured(model: nn.Sequential, batch: Any) -> tuple[list[float], list[int]]:
    """Return for one sample the work of each module, and the number of values sent if the model is split
    before it.

    The second list has one entry more, for the end of the model. Its first and last entry are 0.
    """
    samples = samples_of(batch)
    work, crossing, value = [], [0], batch
    modes = {module: module.training for module in model.modules()}
    model.eval()  # so that random masks and running statistics do not change
    try:
        for index, child in enumerate(model):
            value, multiplications = _watched(child, value)
            size = sum(tensor.numel() for tensor in tensors_of(value, f"module {index}"))
            work.append((multiplications + size) / samples)
            crossing.append(math.ceil(size / samples))
    finally:
        for module, mode in modes.items():
            module.training = mode
    return work, [*crossing[:-1], 0]


def _watched(child: nn.Module, value: Any) -> tuple[Any, float]:
    """Return a module's output, and the number of multiplications by parameters in the module and its
    children.
    """
    costs: list[float] = []

    def watch(module: nn.Module, _: Any, out: Any) -> None:
        costs.append(_multiplications(module, out))

    hooks = [module.register_forward_hook(watch) for module in child.modules()]
    value = child(value)
    for hook in hooks:
        hook.remove()
    return value, sum(costs)


def _multiplications(module: nn.Module, out: Any) -> float:
    """Return the number of multiplications by the module's own dense parameters, without its children, on a
    batch.
    """
    parameters = [p for p in module._parameters.values() if p is not None]
    size = sum(p.numel() for p in parameters if not isinstance(p, TableWeight))
    first = out[0] if isinstance(out, tuple) and out else out
    if not size or not isinstance(first, Tensor):
        return size
    # Each output position of a linear layer or convolution uses each parameter once, and has `width`
    # values. So the number is parameters times positions.
    width = 1
    if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        width = module.weight.shape[0]
    elif first.dim():
        width = math.prod(first.shape[1:])
    return size * first.numel() / max(width, 1)


class _PipelineOptimizer(DistributedOptimizer):
    """Optimizer of a model that is split over stages."""

    _cut = True

    def _prepare(self, model: nn.Module, settings: Settings) -> None:
        if settings.recompute is not None and settings.recompute.checkpoints:
            recompute(model, settings.recompute)


@checked
class Pipeline:
    """Trains an nn.Sequential, split over the stages that `psfleet-launch --stages` starts.

        trainer = Pipeline(model, torch.optim.Adam(model.parameters()), nn.functional.mse_loss)
        for x, y in fleet.shard(loader):
            loss = trainer.step(x, y)

    The same script runs in one process and on stages. Every stage runs the whole script with the same
    batches, and computes only its own modules. With the same micro-batches, losses and weights are
    bit-identical on any number of stages and in every schedule. Without a launcher, the whole batch is one
    micro-batch.

    The model is moved to the servers as convert() does. In every stage, `model(x)` and `model.state_dict()`
    work with the whole model.

    Args:
        model: nn.Sequential to train, changed in place. Its modules return a tensor or a tuple of tensors.
        optimizers: Optimizers as in convert().
        loss: Function of the model's output and the targets that returns the mean loss over the samples.
        cuts: Index of the first module of each stage but stage 0, such as [2, 5] for three stages. None
            splits the model at the first step into parts of about equal work.
        name, runtime: As in DistributedOptimizer.
        servers: Number of servers that hold an embedding's table, as in convert().

    Attributes:
        model: The converted model.
        optimizer: The DistributedOptimizer, for schedulers of the learning rate.

    Raises:
        ConfigError: The strategy has a part that pipelines of torch do not support. docs/torch.md lists them.
        UsageError: The model cannot be split at `cuts`, or the optimizers do not fit the model.
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
        recompute = settings.recompute
        self._recomputes = recompute is not None and not recompute.checkpoints
        if recompute is not None and recompute.checkpoints:
            blocks_of(model, recompute)
        elif recompute is not None:
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
        self._parts: StageModules | None = None

    def step(self, inputs: Any, targets: Any) -> Tensor:
        """Train on one batch: all micro-batches forward and back, then one update.

        Args:
            inputs: Inputs of the first module: tensors of equal length, which may be nested in tuples,
                lists and dicts.
            targets: Targets of the loss, in the same form.

        Returns:
            The mean loss of the batch before the update, float32 [], the same in every stage.

        Raises:
            ShapeError: Tensors differ in length, or the loss is not a single number.
        """
        # The model is split at the first step, because measuring the modules' work needs a batch.
        samples = samples_of((inputs, targets))
        sizes = even_sizes(samples, self._asked.micro_batches)
        if self._parts is None:
            self._parts = self._cut(micro_batch(inputs, 0, sizes[0]))
        self.optimizer.zero_grad()
        seeds = StepSeeds(self._seed, here().worker, self._steps)
        run = PipelineStep(
            self._parts, self._asked.schedule, sizes, inputs, targets, self._loss, seeds
        )
        loss = run.complete()
        self._steps += 1
        self.optimizer.step(samples=0 if here().process else samples, loss=loss)
        return torch.tensor(loss)

    def _cut(self, batch: Any) -> StageModules:
        stages = here().stages
        chunks = chunks_of(self.model, self._cuts, max(self._asked.stages, stages), batch)
        refuse_shared(self.model, chunks)
        check_share(len(chunks), stages)
        # Each stage gets consecutive chunks: with 4 chunks on 2 stages, stage 0 gets chunks 0 and 1.
        last = len(chunks) // stages - 1
        firsts = range(0, len(chunks), last + 1)
        stage_spans = [range(chunks[i].start, chunks[i + last].stop) for i in firsts]
        parts = StageModules(self.model, stage_spans, self._recomputes, self._asked.queue_size)
        self.optimizer.narrow(parts.own)
        return parts
