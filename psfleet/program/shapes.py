"""Shapes whose extents may be unknown (None) until a program runs."""

from collections.abc import Iterable, Sequence

import numpy as np

from psfleet.errors import ShapeError
from psfleet.program.operation import Shape

__all__ = ["axis_of", "broadcast", "extents", "same", "size_of"]


def extents(shape: Iterable[int | None]) -> Shape:
    """A user's shape: None and -1 both mean unknown."""
    if isinstance(shape, str) or not isinstance(shape, Iterable):
        raise ShapeError(f"a shape is {shape!r}; it must be a list of extents")
    found: list[int | None] = []
    for extent in shape:
        whole = isinstance(extent, int | float | np.number) and int(extent) == extent
        if extent is not None and (not whole or extent < -1):
            raise ShapeError(
                f"shape {tuple(shape)} has the extent {extent!r}; "
                "it must be a whole number, or None where it is unknown"
            )
        found.append(None if extent is None or extent == -1 else int(extent))
    return tuple(found)


def broadcast(first: Shape, second: Shape, what: str) -> Shape:
    """NumPy's rule; an unknown extent against 1 stays unknown, against n becomes n."""
    rank = max(len(first), len(second))
    left = (1,) * (rank - len(first)) + first
    right = (1,) * (rank - len(second)) + second
    found: list[int | None] = []
    for a, b in zip(left, right, strict=True):
        if a == b or b == 1:
            found.append(a)
        elif a == 1 or a is None:
            found.append(b)
        elif b is None:
            found.append(a)
        else:
            raise ShapeError(f"{what} cannot combine the shapes {first} and {second}")
    return tuple(found)


def same(first: Shape, second: Shape) -> bool:
    """Whether the two can be equal at run time."""
    return len(first) == len(second) and all(
        a is None or b is None or a == b for a, b in zip(first, second, strict=True)
    )


def axis_of(axis: int, shape: Sequence[object], what: str) -> int:
    """A possibly negative axis as 0 to rank - 1."""
    rank = len(shape)
    if not -rank <= axis < rank:
        raise ShapeError(f"{what}: axis {axis} is outside a shape of {rank} dimensions")
    return axis % rank


def size_of(shape: Shape) -> int | None:
    """The number of values, None if it depends on an unknown extent."""
    size = 1
    for extent in shape:
        if extent is None:
            return None
        size *= extent
    return size
