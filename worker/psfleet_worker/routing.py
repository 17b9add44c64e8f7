"""What of a pull or push goes to which server, and back."""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.dedup import Dedup, dedup
from psfleet.routing import check_ids
from psfleet.runtime import Read
from psfleet.shard.layout import dense_ranges
from psfleet.tables.spec import TableSpec
from psfleet_worker.parcel import Parcel

__all__ = ["DenseRead", "Plans", "SparseRead", "add_gradient", "deal_read"]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_KEPT = 2  # batches of a table: the one that is trained and the one that is read ahead


_SAMPLE = 997  # a look at every so many ids tells most batches apart


class Plans:
    """How batches of ids were dealt. A push mostly brings the ids of the pull before it."""

    def __init__(self, servers: int) -> None:
        self.servers = servers
        self._made: dict[int, deque[tuple[Ids, Dedup]]] = {}

    def of(self, table: int, ids: Ids) -> Dedup:
        """The distinct ids [n] of a batch, dealt to the servers."""
        made = self._made.setdefault(table, deque(maxlen=_KEPT))  # the last one first
        for known, plan in made:
            if len(known) == len(ids) and (known[::_SAMPLE] == ids[::_SAMPLE]).all() and (
                    known == ids).all():
                return plan
        plan = dedup(ids, self.servers)
        made.appendleft((ids.copy(), plan))  # the caller may change its array
        return plan


class DenseRead:
    """A pull of a whole array: each server gives its range."""

    def __init__(self, spec: TableSpec, servers: int) -> None:
        self._spec = spec
        self._ranges = dense_ranges(spec, servers)

    def ask(self, parcels: Sequence[Parcel]) -> list[bool]:
        """Add the read to the parcel of each server that has a part; which ones have."""
        for parcel, (low, high) in zip(parcels, self._ranges, strict=True):
            if high > low:
                parcel.read_values(self._spec, high - low)
        return [high > low for low, high in self._ranges]

    def join(self, values: Sequence[Floats | None]) -> Floats:
        """The array, from what each server gave."""
        out = np.empty(self._spec.size, np.float32)
        for (low, high), value in zip(self._ranges, values, strict=True):
            if value is not None:
                out[low:high] = value
        return out.reshape(self._spec.shape)


class SparseRead:
    """A pull of rows: each server gives the distinct rows that it owns."""

    def __init__(self, spec: TableSpec, read: Read, plans: Plans) -> None:
        ids = check_ids(spec, read.ids)
        self._spec = spec
        self._shape = ids.shape
        self._plan = plans.of(spec.key, ids.reshape(-1))

    def ask(self, parcels: Sequence[Parcel]) -> list[bool]:
        """Add the read to the parcel of each server that has a part; which ones have."""
        for parcel, mine in zip(parcels, self._plan.unique, strict=True):
            if len(mine):
                parcel.read_rows(self._spec, mine)
        return [len(mine) > 0 for mine in self._plan.unique]

    def join(self, values: Sequence[Floats | None]) -> Floats:
        """One row per id that was asked for, from what each server gave."""
        nothing = np.empty((0, self._spec.dim), np.float32)
        rows = self._plan.expand([nothing if value is None else value for value in values])
        return rows.reshape(*self._shape, self._spec.dim)


def deal_read(spec: TableSpec, read: Read, plans: Plans) -> DenseRead | SparseRead:
    """A read, dealt to the servers."""
    if spec.kind == "dense":
        return DenseRead(spec, plans.servers)
    return SparseRead(spec, read, plans)


def add_gradient(parcels: Sequence[Parcel], spec: TableSpec, values: Floats, ids: Ids | None,
                 learning_rate: float, plans: Plans) -> None:
    """Add a gradient's part for every server, empty ones too: all servers count the same steps.

    Args:
        values, ids: As psfleet.routing.check_gradient gives them.
    """
    if ids is None:
        ranges = dense_ranges(spec, plans.servers)
        for parcel, (low, high) in zip(parcels, ranges, strict=True):
            parcel.values(spec, values[low:high], learning_rate)
        return
    plan = plans.of(spec.key, ids)
    plan.merge_into(values, [parcel.rows(spec, mine, learning_rate)
                             for parcel, mine in zip(parcels, plan.unique, strict=True)])
