"""The ids that a sparse table has evicted last, by position."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ShapeError, UsageError
from psfleet.runtime.evicted_ids import EvictedIds, EvictionCause
from psfleet.tables.snapshot_columns import EVICTED

__all__ = ["EvictionStream"]

Ids = NDArray[np.int64]
Column = NDArray[Any]


class EvictionStream:
    """A ring of a fixed number of evictions. Not thread-safe.

    The positions and what they hold are a function of the table's updates: a server that replays its log
    has the same ones.

    Args:
        table: Its name.
        keep: How many evictions are remembered.

    Attributes:
        next: The position of the next eviction.
        bytes: Memory that it takes when it is full.
    """

    def __init__(self, table: str, keep: int) -> None:
        self.next = 0
        self.bytes = 17 * keep
        self._table = table
        self._keep = keep
        self._held = 0
        self._ids, self._steps = np.zeros(keep, np.int64), np.zeros(keep, np.int64)
        self._causes = np.zeros(keep, np.uint8)

    def __len__(self) -> int:
        return self._held

    def add(self, ids: Ids, step: int, cause: EvictionCause) -> None:
        """Remember evictions of one step; their order is that of the ids, whatever it is in memory."""
        ids = np.sort(ids)
        self.next += len(ids)
        ids = ids[-self._keep :]
        self._held = min(self._held + len(ids), self._keep)
        places = self._places(self.next - len(ids), self.next)
        self._ids[places], self._steps[places], self._causes[places] = ids, step, cause

    def read(self, position: int, limit: int) -> EvictedIds:
        """Up to `limit` evictions from a position on.

        Raises:
            UsageError: The table has not come so far.
        """
        if not 0 <= position <= self.next:
            raise UsageError(
                f"table {self._table!r}: evictions are read from position {position} and this server has "
                f"come to {self.next}, perhaps because an earlier snapshot was loaded; begin anew without one"
            )
        first = max(position, self.next - self._held)
        last = min(first + limit, self.next)
        at = self._places(first, last)
        return EvictedIds(
            self._ids[at], self._steps[at], self._causes[at], (last,), first - position
        )

    def columns(self) -> dict[str, Column]:
        """All that is remembered, as columns of a snapshot."""
        kept = self.read(self.next - self._held, self._held)
        values = (kept.ids, kept.steps, kept.causes, np.array([self.next], np.int64))
        return dict(zip(EVICTED, values, strict=True))

    def set(self, columns: Mapping[str, Column]) -> None:
        """Remember what `columns` gave; of too many the latest.

        Raises:
            ShapeError: They are none of a stream.
        """
        *values, following = (columns.get(name, np.zeros(0, np.int64)) for name in EVICTED)
        count = len(values[0])
        if following.shape != (1,) or any(column.shape != (count,) for column in values):
            raise ShapeError(
                f"table {self._table!r}: the columns {sorted(columns)} of its evictions do not fit each other"
            )
        self.next, self._held = int(following[0]), min(count, self._keep)
        places = self._places(self.next - self._held, self.next)
        ids, steps, causes = (column[count - self._held :] for column in values)
        self._ids[places], self._steps[places], self._causes[places] = ids, steps, causes

    def _places(self, first: int, last: int) -> Ids:
        return np.arange(first, last) % self._keep
