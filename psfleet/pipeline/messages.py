"""Values and gradients as the arrays of a message between stages, and back."""

from collections.abc import Sequence

from psfleet.parameters.parameter import SparseGrad
from psfleet.program.operation import Array, Gradient

__all__ = ["pack", "unpack"]


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
