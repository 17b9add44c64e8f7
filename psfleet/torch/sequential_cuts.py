"""Where an nn.Sequential is cut into the chunks of a pipeline."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from psfleet.errors import ConfigError, UsageError
from psfleet.pipeline.balance import balanced_edges
from psfleet.torch.stage_messages import samples_of, tensors_of
from psfleet.torch.table_weight import TableWeight

__all__ = ["check_cuts", "chunks_of", "refuse_shared"]


def check_cuts(model: nn.Module, cuts: Sequence[int] | None) -> nn.Sequential:
    """The model, if it can be cut, and there.

    Raises:
        UsageError: It is no nn.Sequential, or a cut is not between two of its modules.
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
            f"{len(model) - 1} that begin a piece"
        )
    return model


def chunks_of(
    model: nn.Sequential, cuts: Sequence[int] | None, count: int, batch: Any
) -> list[range]:
    """The modules of each chunk, by their places.

    Without cuts the chunks are about equal in work, measured on a batch by what each module's
    parameters and results count for one sample; then by what crosses the cuts. As no clock is asked,
    all stages find the same.

    Args:
        cuts: Modules that begin a chunk; None: `count` chunks.
        batch: Input of the model, a few samples.

    Raises:
        ConfigError: The model has fewer modules than that.
    """
    if cuts is not None:
        return [range(a, b) for a, b in pairwise([0, *cuts, len(model)])]
    if len(model) < count:
        raise ConfigError(
            f"the nn.Sequential has {len(model)} modules, too few for {count} pieces of a "
            "pipeline; use fewer stages"
        )
    if count == 1:
        return [range(len(model))]
    work, crossing = _measured(model, batch)
    return [range(a, b) for a, b in pairwise(balanced_edges(work, crossing, count))]


def refuse_shared(model: nn.Sequential, chunks: Sequence[range]) -> None:
    """Refuse a weight that two chunks use.

    Raises:
        UsageError: There is one.
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
                f"{names[parameter]!r} is used in {count} pieces of the pipeline, and a weight "
                "belongs to one stage; name cuts that keep its users together"
            )


@torch.no_grad()
def _measured(model: nn.Sequential, batch: Any) -> tuple[list[float], list[int]]:
    """Work of each module, and how many values cross before it and at the end, for one sample."""
    samples = samples_of(batch)
    work, crossing, value = [], [0], batch
    modes = {module: module.training for module in model.modules()}
    model.eval()  # neither masks nor running statistics are touched
    try:
        for place, child in enumerate(model):
            value, multiplications = _watched(child, value)
            size = sum(tensor.numel() for tensor in tensors_of(value, f"module {place}"))
            work.append((multiplications + size) / samples)
            crossing.append(math.ceil(size / samples))
    finally:
        for module, mode in modes.items():
            module.training = mode
    return work, [*crossing[:-1], 0]


def _watched(child: nn.Module, value: Any) -> tuple[Any, float]:
    """What a module gives, and the multiplications by all parameters in it."""
    found: list[float] = []

    def watch(module: nn.Module, _: Any, out: Any) -> None:
        found.append(_multiplications(module, out))

    hooks = [module.register_forward_hook(watch) for module in child.modules()]
    value = child(value)
    for hook in hooks:
        hook.remove()
    return value, sum(found)


def _multiplications(module: nn.Module, out: Any) -> float:
    """By a module's own dense parameters, on the whole batch."""
    own = [p for p in module._parameters.values() if p is not None]
    size = sum(p.numel() for p in own if not isinstance(p, TableWeight))
    first = out[0] if isinstance(out, tuple) and out else out
    if not size or not isinstance(first, Tensor):
        return size
    width = 1
    if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        width = module.weight.shape[0]  # each of these results has used every parameter once
    elif first.dim():
        width = math.prod(first.shape[1:])
    return size * first.numel() / max(width, 1)
