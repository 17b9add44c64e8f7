"""Strategy for torch models: a check that psfleet.torch supports its parts, and recomputation of activations.

Recomputation saves memory. A block of the model keeps only its input, and runs its forward pass a second
time when its gradients are computed. torch.utils.checkpoint does this; this module chooses the blocks and
makes them use it. Checks run before training begins and raise ConfigError or UsageError.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.runtime.stages import here
from psfleet.core.runtime.strategy import PipelineSettings, RecomputeSettings, Settings

_OTHER_OPTIMIZERS = {
    "dgc": "amp halves the bytes of gradients",
    "lars": "train with an optimizer of torch.optim",
    "lamb": "train with an optimizer of torch.optim",
}


def check_strategy(settings: Settings, *, cut: bool) -> None:
    """Refuse a strategy that psfleet.torch cannot carry out.

    Args:
        cut: True if psfleet.torch.Pipeline trains the model.

    Raises:
        ConfigError: A part of the strategy would replace the script's optimizer and has no counterpart for
            torch, or recompute has a memory budget.
        UsageError: The strategy has a pipeline, and the script does not use psfleet.torch.Pipeline.
    """
    for part, instead in _OTHER_OPTIMIZERS.items():
        if getattr(settings, part) is not None:
            raise ConfigError(
                f"the strategy part {part!r} puts an optimizer of psfleet in place of the script's, "
                f"and psfleet.torch has none for it; leave it out ({instead})"
            )
    if settings.recompute is not None and settings.recompute.memory_budget:
        raise ConfigError(
            f"recompute memory_budget is {settings.recompute.memory_budget!r}, and psfleet.torch "
            "does not measure a torch model's activations; name modules in checkpoints, or neither"
        )
    pipeline = settings.pipeline or PipelineSettings()
    if not cut and (here().processes > 1 or pipeline.micro_batches > 1):
        raise UsageError(
            f"the strategy asks for a pipeline of {pipeline.stages} stages and {pipeline.micro_batches} "
            "micro-batches, and this model is not cut; train an nn.Sequential with "
            "psfleet.torch.Pipeline"
        )


def pipeline_of(settings: Settings) -> PipelineSettings:
    """Return the strategy's pipeline, by default one stage and one micro-batch.

    Raises:
        ConfigError: The pipeline has several copies of a stage, which psfleet.torch cannot run.
    """
    pipeline = settings.pipeline or PipelineSettings()
    if max(pipeline.copies, default=1) > 1:
        raise ConfigError(
            f"pipeline copies is {pipeline.copies}, and a stage of a torch model has one process; "
            "leave copies out"
        )
    return pipeline


def recompute(model: nn.Module, settings: RecomputeSettings) -> None:
    """Make blocks of the model drop their activations in training, and compute them again for their
    gradients.

    Each block keeps only its input and runs its forward pass a second time. Gradients are bit-identical to
    those without recomputation, dropout masks included. The class of each block is replaced by a derived
    class of the same name, so copies and state dicts do not change.
    """
    blocks = blocks_of(model, settings)
    for block in blocks:
        if not isinstance(block, _Recomputed | _RecomputedRuns):
            kind = (
                _Recomputed
                if settings.checkpoints or type(block) is not nn.Sequential
                else _RecomputedRuns
            )
            block.__class__ = type(type(block).__name__, (kind, type(block)), {})


def blocks_of(model: nn.Module, settings: RecomputeSettings) -> list[nn.Module]:
    """Return the modules that `settings.checkpoints` names, or else the blocks found from the model's
    structure.

    Blocks are then each plain nn.Sequential and each module of an nn.ModuleList. If such modules are
    nested, only the outermost is a block.

    Raises:
        ConfigError: The model has no block, a name is unknown, or a block cannot be run twice.
    """
    modules = dict(model.named_modules())
    for name in settings.checkpoints:
        if name not in modules:
            raise ConfigError(
                f"recompute checkpoints has {name!r}, and the model has no module of that name; "
                "see model.named_modules()"
            )
    blocks = {name: modules[name] for name in settings.checkpoints} or _found(model)
    if not blocks:
        raise ConfigError(
            "recompute finds no nn.Sequential and no nn.ModuleList in the model to cut; name "
            "modules in checkpoints"
        )
    for name, block in blocks.items():
        check_repeatable(name, block)
    return list(blocks.values())


def grouped(count: int) -> list[range]:
    """Split 0 to count - 1 into about sqrt(count) ranges. This number needs the least memory (Chen et al.
    2016).
    """
    runs = max(math.isqrt(count), 1)
    edges = [round(i * count / runs) for i in range(runs + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def check_repeatable(name: str, block: nn.Module) -> None:
    """Refuse a block that has a side effect if it runs twice on the same batch.

    Raises:
        ConfigError: The block has a batch norm with running statistics.
    """
    for path, module in block.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            module_path = ".".join(part for part in (name, path) if part)
            raise ConfigError(
                f"recompute would count each batch twice in the running statistics of {module_path!r}, a "
                f"{type(module).__name__}; name other modules in checkpoints"
            )


def _found(module: nn.Module, path: str = "") -> dict[str, nn.Module]:
    if type(module) is nn.Sequential and len(module) > 1:
        return {path: module}
    parts = dict(module.named_children())
    if isinstance(module, nn.ModuleList) and len(parts) > 1:
        return {f"{path}.{name}".lstrip("."): part for name, part in parts.items()}
    blocks: dict[str, nn.Module] = {}
    for name, part in parts.items():
        blocks |= _found(part, f"{path}.{name}".lstrip("."))
    return blocks


class _Recomputed:
    """Mixin for a module's class: the whole module is one block that is recomputed."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Compute as the module's own forward does."""
        compute = super().forward  # type: ignore[misc]  # the module's class is behind this one
        if not torch.is_grad_enabled():
            return compute(*inputs, **options)
        return checkpoint(compute, *inputs, use_reentrant=False, **options)


class _RecomputedRuns:
    """Mixin for nn.Sequential: its n modules are split into about sqrt(n) blocks that are recomputed."""

    def forward(self, input: Any) -> Any:
        """Compute as nn.Sequential's own forward does."""
        modules: Sequence[nn.Module] = list(self)  # type: ignore[call-overload]  # as above
        value = input
        for span in grouped(len(modules)):
            part = nn.Sequential(*(modules[i] for i in span))
            value = (
                checkpoint(part, value, use_reentrant=False)
                if torch.is_grad_enabled()
                else part(value)
            )
        return value
