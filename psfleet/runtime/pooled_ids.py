"""Ids whose rows are pooled where they arrive."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.bags import RowBags, pool_parts
from psfleet.runtime.interface import Read

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PooledIds:
    """Ids of a table whose rows are pooled when they are pulled.

    Attributes:
        ids: int64 [n].
        parts: The bags of each feature, one feature after the other; they have n rows.
    """

    ids: Ids
    parts: tuple[RowBags, ...]

    def __len__(self) -> int:
        """Return the number of bags."""
        return sum(map(len, self.parts))

    def pool(self, rows: Floats) -> Floats:
        """Pool the rows of the ids, [n, dim], to float32 [all bags, dim]."""
        return pool_parts(rows, self.parts)

    def matches(self, other: "PooledIds") -> bool:
        """Return whether both pull the same ids with the same pooling."""
        return (
            len(self.parts) == len(other.parts)
            and (self.ids is other.ids or np.array_equal(self.ids, other.ids))
            and all(one.matches(two) for one, two in zip(self.parts, other.parts, strict=True))
        )

    def copy(self) -> "PooledIds":
        """Return a copy, whatever becomes of the arrays that this was made of."""
        return PooledIds(frozen(self.ids), tuple(part.copy() for part in self.parts))


Asked = Ids | PooledIds
"""Argument of a pull from a sparse table: ids, or ids whose rows are pooled."""


def read_of(table: int, ids: Asked, pools: bool) -> Read:
    """Return the read that the runtime is asked for.

    Args:
        table: The table's key.
        ids: The ids to pull, or the ids to pool.
        pools: True if the runtime pools by itself.
    """
    if isinstance(ids, PooledIds):
        return Read(table, ids.ids, bags=ids.parts if pools else None)
    return Read(table, ids)


def as_asked(ids: Any, read: Read, values: Floats) -> Floats:
    """Return the values in the form of the request: pooled here if the runtime does not pool."""
    return ids.pool(values) if isinstance(ids, PooledIds) and read.bags is None else values


def joined_ids(lookups: Sequence[PooledIds]) -> PooledIds:
    """Return all bags, one after the other. A single one is not copied."""
    if len(lookups) == 1:
        return lookups[0]
    ids = np.concatenate([each.ids for each in lookups])
    return PooledIds(ids, tuple(part for each in lookups for part in each.parts))


def frozen(ids: Ids) -> Ids:
    """Return a copy that is never changed: a runtime need not check whether it is the same."""
    own = ids.copy()
    own.flags.writeable = False
    return own
