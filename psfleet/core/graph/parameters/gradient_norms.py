"""Norms of gradients, and the scaling that clipping makes of them.

Each stage of a pipeline has some of the parameters. Within `gathering` a global norm counts the parameters of
all stages.
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
    """Compute global norms over the parameters of all stages inside the block.

    Args:
        gather: Function that turns the names and squared norms here into the squared norms of all.
    """
    global _gather
    before, _gather = _gather, gather
    try:
        yield
    finally:
        _gather = before


def gathered_squares(names: list[str], squares: list[float]) -> list[float]:
    """Return the squared norms of all parameters: of these, and within `gathering` of other stages' too.

    Args:
        names: Names of the parameters that are clipped here.
        squares: Squared norm of each gradient.
    """
    return squares if _gather is None else _gather(names, squares)


def squared_norm(values: Floats) -> float:
    """Return the squared norm, summed in float64 so that it does not depend on the array's layout."""
    return float(np.sum(np.square(values, dtype=np.float64)))


def scaled_down(values: Floats, clip_norm: float, norm: float) -> Floats:
    """Return the values times clip_norm / norm if `norm` is above clip_norm, else the values as they are."""
    return values * np.float32(clip_norm / norm) if norm > clip_norm else values
