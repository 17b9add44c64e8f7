"""Values and gradients as the arrays of a message between stages, and back."""

from collections.abc import Sequence

import numpy as np

from psfleet.parameters.parameter import SparseGrad
from psfleet.program.operation import Array, Gradient

__all__ = ["pack", "settled", "unpack"]


def settled(value: Gradient | None) -> Gradient | None:
    """A value as it would arrive at another process: the same layout, so the same bits."""
    if isinstance(value, np.ndarray) and not value.flags.forc:
        return np.ascontiguousarray(value)
    return value


def pack(value: Gradient | None) -> list[Array]:
    """A value or gradient as arrays: none, one, or ids and rows (and shows and clicks)."""
    if value is None:
        return []
    if not isinstance(value, SparseGrad):
        return [value]
    return [value.ids, value.rows, *([] if value.scores is None else [value.scores])]


def unpack(arrays: Sequence[Array]) -> Gradient | None:
    """What was packed."""
    if len(arrays) > 1:
        return SparseGrad(*arrays)
    return arrays[0] if arrays else None
