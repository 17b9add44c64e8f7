"""Ids whose rows a sparse table has evicted, as its servers remember them. `EvictionReader` reads them."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class EvictionCause(enum.IntEnum):
    """Reason for which a row was evicted."""

    EXPIRED = 1
    """No push had named it for the time of a TTLEntry."""
    CAPACITY = 2
    """The table was full."""
    MEMORY = 3
    """The server's memory was used up."""
    SHRUNK = 4
    """`shrink` removed it."""


@dataclass(frozen=True)
class EvictedIds:
    """Evictions in their order, server by server. Evictions of one step are sorted by id.

    Attributes:
        ids: Ids of the evicted rows: int64 [n].
        steps: Step of the table at each eviction: int64 [n].
        causes: EvictionCause of each eviction: uint8 [n].
        position: For each server, the position after its last eviction here. Each server counts from 0.
        missed: Number of earlier evictions that the servers no longer remember.
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
