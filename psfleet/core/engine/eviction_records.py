"""Records of rows that a sparse table has evicted (removed by itself). `EvictionReader` reads them."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class EvictionCause(enum.IntEnum):
    """Reason for which a row was evicted."""

    EXPIRED = 1
    """The row was not pushed for the time of the table's TTLEntry."""
    CAPACITY = 2
    """The table was full."""
    MEMORY = 3
    """The server had no memory for new rows."""
    SHRUNK = 4
    """A call of `shrink` removed the row."""


@dataclass(frozen=True)
class EvictedIds:
    """Evictions of a sparse table, one server after the other, each in the order in which rows were evicted.

    Evictions of one step are sorted by id.

    Attributes:
        ids: Ids of the evicted rows: int64 [n].
        steps: Number of updates of the table before each eviction: int64 [n].
        causes: EvictionCause of each eviction: uint8 [n].
        position: For each server, the number of the eviction to read next. Each server numbers its evictions
            from 0.
        missed: Number of earlier evictions that the servers no longer store, so that they were not returned.
    """

    ids: Ids
    steps: Ids
    causes: NDArray[np.uint8]
    position: tuple[int, ...]
    missed: int = 0

    def __len__(self) -> int:
        return len(self.ids)


def joined(parts: Sequence[EvictedIds]) -> EvictedIds:
    """Join the evictions of several servers, one after the other."""
    return EvictedIds(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.steps for part in parts]),
        np.concatenate([part.causes for part in parts]),
        tuple(position for part in parts for position in part.position),
        sum(part.missed for part in parts),
    )
