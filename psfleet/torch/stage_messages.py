"""Tensors as messages between stages, and batches as micro-batches."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psfleet.errors import ShapeError, UsageError
from psfleet.program.operation import Array

__all__ = ["detached", "from_arrays", "micro_batch", "samples_of", "tensors_of", "to_arrays"]

_PLAIN = {torch.bfloat16: torch.int16}  # what NumPy has no name for travels as
_KINDS = {str(kind): kind for kind in _PLAIN}


def tensors_of(value: Any, maker: str) -> list[Tensor]:
    """The tensors of what a module gives: a tensor, or a tuple of them.

    Raises:
        UsageError: It is something else.
    """
    parts = list(value) if isinstance(value, tuple) else [value]
    for part in parts:
        if not isinstance(part, Tensor):
            raise UsageError(
                f"{maker} gives a {type(part).__name__}; what goes from one stage to the next must "
                "be a tensor or a tuple of tensors"
            )
    return parts


def detached(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Leaves with the same values; they require gradients where the tensors do."""
    return [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]


def to_arrays(tensors: Sequence[Tensor | None]) -> list[Array]:
    """Contiguous tensors, some of which may be missing, as arrays that share their memory."""
    header = [
        None if t is None else [str(t.dtype) if t.dtype in _PLAIN else "", t.requires_grad]
        for t in tensors
    ]
    arrays = [_plain(t.detach()).cpu().numpy() for t in tensors if t is not None]
    return [np.frombuffer(json.dumps(header).encode(), np.uint8), *arrays]


def from_arrays(arrays: Sequence[Array]) -> list[Tensor | None]:
    """What was sent, in memory of its own; it requires gradients where it did at the sender's."""
    header, found = json.loads(arrays[0].tobytes()), iter(arrays[1:])
    return [None if about is None else _tensor(next(found), *about) for about in header]


def _plain(tensor: Tensor) -> Tensor:
    kind = _PLAIN.get(tensor.dtype)
    return tensor if kind is None else tensor.view(kind)


def _tensor(array: Array, kind: str, needs_gradient: bool) -> Tensor:
    tensor = torch.tensor(array)  # in memory that is aligned as torch's kernels like it
    return (tensor.view(_KINDS[kind]) if kind else tensor).requires_grad_(needs_gradient)


def samples_of(batch: Any) -> int:
    """How many samples a batch has: the length of every tensor in it but for single numbers.

    Raises:
        ShapeError: They differ, or there is none.
    """
    lengths = sorted({len(tensor) for tensor in _tensors(batch)})
    if len(lengths) != 1:
        raise ShapeError(
            f"the tensors of a batch have the lengths {lengths}; a pipeline cuts all of them into "
            "the same micro-batches, so they must have one"
        )
    return lengths[0]


def micro_batch(batch: Any, start: int, end: int) -> Any:
    """The samples from start to end of every tensor, at any depth of tuples, lists and dicts."""
    if isinstance(batch, Tensor):
        return batch[start:end] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {key: micro_batch(part, start, end) for key, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(micro_batch(part, start, end) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(micro_batch(part, start, end) for part in batch)
    return batch


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch] if batch.dim() else []
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(batch, Mapping | list | tuple):
        return [tensor for part in parts for tensor in _tensors(part)]
    return []
