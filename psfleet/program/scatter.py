"""Adding rows into a dense array."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.program.operation import Array

__all__ = ["scatter_rows"]


def scatter_rows(ids: NDArray[np.int64], rows: Array, shape: tuple[int, ...]) -> Array:
    """Zeros of `shape` with rows[i] added to row ids[i], those of one id in their order.

    Sorted and summed in runs: several times faster than np.add.at.
    """
    out: NDArray[Any] = np.zeros(shape, rows.dtype)
    if len(ids) == 0:
        return out
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    out[ordered[starts]] = np.add.reduceat(rows[order], starts, axis=0)
    return out
