"""Recompute: blocks of a torch model whose activations are dropped and computed again.

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

from psfleet.errors import ConfigError
from psfleet.strategy import RecomputeSettings

__all__ = ["blocks_of", "grouped", "recompute"]


def recompute(model: nn.Module, wish: RecomputeSettings) -> None:
    """Make blocks of the model drop their activations in training.

    A block keeps its input only, and its forward pass is run again when its gradients are computed;
    gradients are the same bits, dropout masks included. A module changes its class for one of the same
    name that is derived from it, so copies and state dicts are what they were.
    """
    blocks = blocks_of(model, wish)
    for block in blocks:
        if not isinstance(block, _Recomputed | _RecomputedRuns):
            kind = (
                _Recomputed
                if wish.checkpoints or type(block) is not nn.Sequential
                else _RecomputedRuns
            )
            block.__class__ = type(type(block).__name__, (kind, type(block)), {})


def blocks_of(model: nn.Module, wish: RecomputeSettings) -> list[nn.Module]:
    """The modules that `checkpoints` names; else each plain nn.Sequential, and each module of a ModuleList.

    Of modules within each other the outermost counts.

    Raises:
        ConfigError: There is none, a name is unknown, or a block cannot be run twice.
    """
    known = dict(model.named_modules())
    for name in wish.checkpoints:
        if name not in known:
            raise ConfigError(
                f"recompute checkpoints has {name!r}, and the model has no module of that name; "
                "see model.named_modules()"
            )
    found = {name: known[name] for name in wish.checkpoints} or _found(model)
    if not found:
        raise ConfigError(
            "recompute finds no nn.Sequential and no nn.ModuleList in the model to cut; name "
            "modules in checkpoints"
        )
    for name, block in found.items():
        check_repeatable(name, block)
    return list(found.values())


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
    found: dict[str, nn.Module] = {}
    for name, part in parts.items():
        found |= _found(part, f"{path}.{name}".lstrip("."))
    return found


class _Recomputed:
    """Mixed into a module's class: the module is one block."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """As the module's own."""
        own = super().forward  # type: ignore[misc]  # the module's class is behind this one
        if not torch.is_grad_enabled():
            return own(*inputs, **named)
        return checkpoint(own, *inputs, use_reentrant=False, **named)


class _RecomputedRuns:
    """Mixed into nn.Sequential: runs of its modules are blocks."""

    def forward(self, input: Any) -> Any:
        """As nn.Sequential's own."""
        modules: Sequence[nn.Module] = list(self)  # type: ignore[call-overload]  # as above
        value = input
        for run in grouped(len(modules)):
            part = nn.Sequential(*(modules[i] for i in run))
            value = (
                checkpoint(part, value, use_reentrant=False)
                if torch.is_grad_enabled()
                else part(value)
            )
        return value
