"""Ids whose rows are pooled where they arrive."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.bags import RowBags, pool_parts
from psfleet.runtime.interface import Read

__all__ = ["Asked", "PooledIds", "as_asked", "frozen", "joined_ids", "read_of"]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PooledIds:
    """What is pulled of a table by those who want pooled rows.

    Attributes:
        ids: int64 [n].
        parts: The bags of each feature, one feature after the other; they have n rows.
    """

    ids: Ids
    parts: tuple[RowBags, ...]

    def __len__(self) -> int:
        """The number of bags."""
        return sum(map(len, self.parts))

    def pool(self, rows: Floats) -> Floats:
        """float32 [all bags, dim] from the rows of the ids, [n, dim]."""
        return pool_parts(rows, self.parts)

    def matches(self, other: "PooledIds") -> bool:
        """Whether both ask for the same."""
        return (
            len(self.parts) == len(other.parts)
            and (self.ids is other.ids or np.array_equal(self.ids, other.ids))
            and all(one.matches(two) for one, two in zip(self.parts, other.parts, strict=True))
        )

    def copy(self) -> "PooledIds":
        """The same, whatever becomes of the arrays that this was made of."""
        return PooledIds(frozen(self.ids), tuple(part.copy() for part in self.parts))


Asked = Ids | PooledIds
"""What is pulled of a sparse table: ids, or what is pooled of their rows."""


def read_of(table: int, asked: Asked, pools: bool) -> Read:
    """What a runtime is asked for.

    Args:
        table: The table's key.
        asked: What is wanted.
        pools: Whether the runtime does.
    """
    if isinstance(asked, PooledIds):
        return Read(table, asked.ids, bags=asked.parts if pools else None)
    return Read(table, asked)


def as_asked(asked: Any, read: Read, values: Floats) -> Floats:
    """What was asked for, of the values of its read: those of a runtime that does not pool are pooled now."""
    return asked.pool(values) if isinstance(asked, PooledIds) and read.bags is None else values


def joined_ids(asked: Sequence[PooledIds]) -> PooledIds:
    """All bags, one after the other. A single one is not copied."""
    if len(asked) == 1:
        return asked[0]
    ids = np.concatenate([each.ids for each in asked])
    return PooledIds(ids, tuple(part for each in asked for part in each.parts))


def frozen(ids: Ids) -> Ids:
    """A copy that nobody changes: a runtime need not look whether it is the same."""
    own = ids.copy()
    own.flags.writeable = False
    return own
