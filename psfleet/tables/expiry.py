"""Which rows go because no push has named them for long."""

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.hash_index import SEGMENT_COUNT
from psfleet.tables.row_memory import RowMemory

__all__ = ["SETTLED", "due", "leaving"]

Ids = NDArray[np.int64]

SETTLED = 1 << 29  # a step that is a multiple of this has stamps brought up to date
_PART = 16  # of a full table, the part that goes at a time


def due(step: int, ttl: int) -> tuple[int, int]:
    """The segments to be looked over at this step, so that each has its turn in ttl / 8 steps.

    A segment is chosen by the id's hash, so which step a row goes at depends on nothing else.
    """
    period = max(ttl // 8, 1)
    turn = step % period
    return turn * SEGMENT_COUNT // period, (turn + 1) * SEGMENT_COUNT // period


def leaving(index: RowMemory, step: int, wanted: int, capacity: int) -> Ids:
    """Ids of the rows that have to go so that `wanted` more fit; none if they do.

    At least a sixteenth of the capacity goes, so that a full table is not looked over with each push.
    Rows that were pushed at this very step stay.
    """
    short = len(index) + wanted - capacity
    if short <= 0:
        return np.zeros(0, np.int64)
    return index.oldest(step, max(short, capacity // _PART), least=1)
