"""Support for strategies in torch: the parts that a torch model trains with, and recompute.

The work is torch.utils.checkpoint's; here is which blocks there are, and how a module becomes one.
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
    """Refuse what psfleet.torch cannot do.

    Args:
        settings: The strategy that counts.
        cut: The model is trained by psfleet.torch.Pipeline.

    Raises:
        ConfigError: The strategy has a part that torch's optimizers have no counterpart for.
        UsageError: It asks for a pipeline and the script does not train with one.
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
    """The pipeline that is asked for; one stage and one micro-batch by default.

    Raises:
        ConfigError: psfleet.torch cannot run it.
    """
    pipeline = settings.pipeline or PipelineSettings()
    if max(pipeline.copies, default=1) > 1:
        raise ConfigError(
            f"pipeline copies is {pipeline.copies}, and a stage of a torch model has one process; "
            "leave copies out"
        )
    return pipeline


def recompute(model: nn.Module, settings: RecomputeSettings) -> None:
    """Make blocks of the model drop their activations in training.

    A block keeps its input only, and its forward pass is run again when its gradients are computed;
    gradients are the same bits, dropout masks included. A module changes its class for one of the same
    name that is derived from it, so copies and state dicts are what they were.
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
    """The modules that `checkpoints` names; else each plain nn.Sequential, and each module of a ModuleList.

    Of modules within each other the outermost counts.

    Raises:
        ConfigError: There is none, a name is unknown, or a block cannot be run twice.
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
    """0 to count - 1 in about sqrt(count) runs, which is what keeps least (Chen et al. 2016)."""
    runs = max(math.isqrt(count), 1)
    edges = [round(i * count / runs) for i in range(runs + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def check_repeatable(name: str, block: nn.Module) -> None:
    """Refuse a block that does not give the same a second time.

    Raises:
        ConfigError: It has running statistics.
    """
    for path, module in block.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            place = ".".join(part for part in (name, path) if part)
            raise ConfigError(
                f"recompute would count each batch twice in the running statistics of {place!r}, a "
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
    """Mixed into a module's class: the module is one block."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Compute as the module's own forward does."""
        own = super().forward  # type: ignore[misc]  # the module's class is behind this one
        if not torch.is_grad_enabled():
            return own(*inputs, **options)
        return checkpoint(own, *inputs, use_reentrant=False, **options)


class _RecomputedRuns:
    """Mixed into nn.Sequential: runs of its modules are blocks."""

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
