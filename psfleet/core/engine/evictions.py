"""Ids whose rows have gone from a sparse table, as its servers remember them, and a reader of them."""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.schema.table import TableSpec, key_of

if TYPE_CHECKING:
    from psfleet.core.engine.interface import Runtime

Ids = NDArray[np.int64]
_PAGE = 1 << 16  # evictions of a server at a time


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
    """Evictions of each server in the order in which they took place; those of one step by id.

    Attributes:
        ids: int64 [n].
        steps: int64 [n]: the table's step when each row went.
        causes: uint8 [n], each an EvictionCause.
        position: For each server the position after its last eviction here; a server counts from 0.
        missed: Evictions before these that are no longer remembered.
    """

    ids: Ids
    steps: Ids
    causes: NDArray[np.uint8]
    position: tuple[int, ...]
    missed: int = 0

    def __len__(self) -> int:
        return len(self.ids)


def joined(parts: Sequence[EvictedIds]) -> EvictedIds:
    """Return those of several servers, one after the other."""
    return EvictedIds(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.steps for part in parts]),
        np.concatenate([part.causes for part in parts]),
        tuple(position for part in parts for position in part.position),
        sum(part.missed for part in parts),
    )


class EvictionReader:
    """The evictions of a sparse table whose entry has an EvictionStreamEntry.

        reader = fleet.evictions("users")
        for gone in reader:  # ends where the servers are now; begin again later to go on
            cache.delete(gone.ids)

    Each eviction is read once, as long as the reader is at most the entry's `keep` behind; what it has missed
    beyond that is in `EvictedIds.missed`. With `fleet.remember("evictions", reader)` it goes on where it was.

    Attributes:
        position: Start of the next read, a number for each server; () before the first read of
            a reader that begins with the oldest evictions that the servers remember.
    """

    def __init__(
        self, runtime: "Runtime", table: str | TableSpec, position: Sequence[int] = ()
    ) -> None:
        self._runtime = runtime
        self._table = key_of(table) if isinstance(table, str) else table.key
        self.position = tuple(map(int, position))

    def read(self) -> EvictedIds:
        """Return the ids evicted since the last read, at most 65,536 of each server.

        Raises:
            UsageError: The table does not remember evictions, or the position is of other servers or beyond
                what they have come to.
        """
        servers = max(self._runtime.server_num, 1)
        if self.position and len(self.position) != servers:
            raise UsageError(
                f"the position {self.position} of evictions is one of {len(self.position)} servers and the "
                f"fleet has {servers}, which count anew; begin without a position"
            )
        evictions = joined(
            self._runtime.evictions(self._table, self.position or (0,) * servers, _PAGE)
        )
        self.position = evictions.position
        return evictions

    def __iter__(self) -> Iterator[EvictedIds]:
        while len(evictions := self.read()) or evictions.missed:
            yield evictions

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the reader, for `fleet.remember`."""
        return {"position": list(self.position)}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was."""
        self.position = tuple(state["position"])
