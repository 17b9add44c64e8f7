"""A worker's copies of tables in geo mode, and what it owes the servers. See psfleet.mode_runtimes.geo."""

import dataclasses
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.kernels.dedup import dedup
from psfleet.rules import make_rule
from psfleet.schema.table import DecaySpec, TableSpec
from psfleet.tables.assigned_weights import set_rows, set_values, values_of, weights_of
from psfleet.tables.dense import DenseTable
from psfleet.tables.sparse import SparseTable

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class LocalTable(Protocol):
    """A copy of one table."""

    @property
    def owes(self) -> bool:
        """True if the copies hold updates that the servers do not have."""

    def __len__(self) -> int:
        """Return rows that are copied; 0 of a dense table."""

    def touch(self, ids: Ids) -> None:
        """Note ids that a push has named."""

    def take(self, share: float) -> tuple[Floats, Ids | None]:
        """Return this share of the unsent updates, and the ids of their rows."""

    def expire(self) -> None:
        """Read it anew: the servers may hold something else."""

    def settle(self) -> None:
        """Owe nothing: the copy is what the servers hold."""

    def forget(self) -> None:
        """Drop the copies, of which nothing is owed."""


class LocalDenseTable:
    """A dense table and the base of what it has learned."""

    def __init__(self, table: DenseTable) -> None:
        self._table = table
        self._base = values_of(table)

    @property
    def owes(self) -> bool:
        """See LocalTable."""
        return bool((values_of(self._table) != self._base).any())

    def __len__(self) -> int:
        return 0

    def touch(self, ids: Ids) -> None:
        """See LocalTable."""

    def take(self, share: float) -> tuple[Floats, Ids | None]:
        """See LocalTable."""
        delta = (values_of(self._table) - self._base) * np.float32(share)
        self._base = values_of(self._table) if share == 1.0 else self._base + delta
        return delta.reshape(self._table.spec.shape), None

    def refresh(self, value: Floats) -> None:
        """Take the value that the servers hold, float32 [m]."""
        set_values(self._table, value + (values_of(self._table) - self._base))
        self._base = value.copy()

    def expire(self) -> None:
        """See LocalTable."""

    def settle(self) -> None:
        """See LocalTable."""
        self._base = values_of(self._table)

    def forget(self) -> None:
        """See LocalTable."""


class LocalSparseTable:
    """Rows of a sparse table, the base of what they have learned, and which of them are up to date."""

    def __init__(self, local: EmbeddedRuntime, spec: TableSpec) -> None:
        self._local = local
        self._spec = spec
        self._bases = dataclasses.replace(
            spec, rule=make_rule("sgd", {}), decay=DecaySpec(), every_row=False
        )
        self._base = SparseTable(self._bases)
        self._fresh = _NONE  # ascending
        self._touched: list[Ids] = []
        self._owing = _NONE  # of earlier exchanges

    @property
    def _table(self) -> SparseTable:
        table = self._local.table(self._spec.key)
        assert isinstance(table, SparseTable)
        return table

    @property
    def owes(self) -> bool:
        """See LocalTable."""
        return bool(self._touched) or len(self._owing) > 0

    def __len__(self) -> int:
        return max(len(self._base), len(self._table))

    def touch(self, ids: Ids) -> None:
        """See LocalTable."""
        self._touched.append(_distinct(ids))

    def stale(self, ids: Ids) -> Ids:
        """Return those of the ids, each once, that have not been read since the last exchange."""
        ids = _distinct(ids)
        if not len(self._fresh):
            return ids
        at = np.minimum(np.searchsorted(self._fresh, ids), len(self._fresh) - 1)
        unread: Ids = ids[self._fresh[at] != ids]
        return unread

    def refresh(self, ids: Ids, rows: Floats) -> None:
        """Take the rows [n, dim] that the servers hold, of the ids [n], each once."""
        base, mine = weights_of(self._base, ids), weights_of(self._table, ids)
        differs = (rows != base).any(axis=1)
        if differs.any():
            set_rows(self._table, ids[differs], rows[differs] + (mine[differs] - base[differs]))
            set_rows(self._base, ids[differs], rows[differs])
        # Two ascending runs, which a stable sort merges.
        self._fresh = np.sort(np.concatenate([self._fresh, np.sort(ids)]), kind="stable")

    def take(self, share: float) -> tuple[Floats, Ids | None]:
        """See LocalTable. A part of it of rows pushed since the last exchange, all of it of any rows."""
        batches = [*self._touched, *([self._owing] if share == 1.0 else [])]
        if self._spec.every_row and batches:
            batches = [self._table.ids()]
        ids = _distinct(np.concatenate(batches)) if batches else _NONE
        base, mine = weights_of(self._base, ids), weights_of(self._table, ids)
        delta = (mine - base) * np.float32(share)
        differs = (delta != 0).any(axis=1)
        ids, delta, base, mine = ids[differs], delta[differs], base[differs], mine[differs]
        if len(ids):
            set_rows(self._base, ids, mine if share == 1.0 else base + delta)
        self._owing = _NONE if share == 1.0 else _distinct(np.concatenate([self._owing, ids]))
        self._touched.clear()
        self._fresh = _NONE
        return delta, ids

    def expire(self) -> None:
        """See LocalTable."""
        self._fresh = _NONE

    def settle(self) -> None:
        """See LocalTable."""
        self._base = SparseTable(self._bases)
        ids = self._table.ids()
        set_rows(self._base, ids, weights_of(self._table, ids))
        self._fresh, self._owing = _NONE, _NONE
        self._touched.clear()

    def forget(self) -> None:
        """See LocalTable."""
        self._table.remove(self._table.ids())
        self._base = SparseTable(self._bases)
        self._fresh, self._owing = _NONE, _NONE


_NONE = np.zeros(0, np.int64)


def _distinct(ids: Ids) -> Ids:
    """Return each id once."""
    unique: Ids = dedup(np.ascontiguousarray(ids, np.int64), 1).unique[0]
    return unique
