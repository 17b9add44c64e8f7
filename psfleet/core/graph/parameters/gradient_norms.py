"""Norms of gradients, and the scaling that clips a gradient to a norm.

In a pipeline each stage has only some of the parameters. Within `gathering`, a global norm includes the
parameters of all stages.
"""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Gather = Callable[[list[str], list[float]], list[float]]
_gather: Gather | None = None


@contextlib.contextmanager
def gathering(gather: Gather) -> Iterator[None]:
    """Compute global norms over the parameters of all pipeline stages (processes) within the block.

    Args:
        gather: Called with the names and squared norms of this stage's gradients. Returns the squared norms
            of all stages' gradients.
    """
    global _gather
    before, _gather = _gather, gather
    try:
        yield
    finally:
        _gather = before


def gathered_squares(names: list[str], squares: list[float]) -> list[float]:
    """Return the squared norms of all gradients to clip together. Within `gathering`, includes other stages.

    Args:
        names: Names of the parameters that this process clips.
        squares: Squared norm of the gradient of each.
    """
    return squares if _gather is None else _gather(names, squares)


def squared_norm(values: Floats) -> float:
    """Return the squared norm of a gradient, summed in float64 so that its memory layout has no influence."""
    return float(np.sum(np.square(values, dtype=np.float64)))


def scaled_down(values: Floats, clip_norm: float, norm: float) -> Floats:
    """Scale values by clip_norm / norm if `norm` exceeds `clip_norm`. Otherwise return them unchanged."""
    return values * np.float32(clip_norm / norm) if norm > clip_norm else values
