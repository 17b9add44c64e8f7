"""What of a pull goes to which server, and back."""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.dedup import UniqueIds, dedup
from psfleet.kernels.initial_values import address_of
from psfleet.kernels.streaming import copy_over
from psfleet.runtime.interface import Read
from psfleet.runtime.validation import check_ids
from psfleet.schema.table import TableSpec
from psfleet.shard.dense_partition import dense_ranges
from psfleet.wire.compression import CompressedValues
from psfleet_worker.connection.request import ServerRequest, Values
from psfleet_worker.connection.tensor_memory import LEND_FROM, LentArray

__all__ = ["DenseRead", "RoutingPlans", "SparseRead", "deal_read"]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_KEPT = 2  # batches of a table: the one that is trained and the one that is read ahead


_SAMPLE = 997  # a look at every so many ids tells most batches apart
_SHORT = 512  # ids of a batch that is compared faster as bytes


class RoutingPlans:
    """How tables and batches of ids are dealt. A push mostly brings the ids of the pull before."""

    def __init__(self, servers: int) -> None:
        self.servers = servers
        self._made: dict[int, deque[tuple[Ids, UniqueIds]]] = {}
        self._recent: deque[tuple[Ids, UniqueIds]] = deque(maxlen=_KEPT)  # of any table
        self._ranges: dict[int, list[tuple[int, int]]] = {}

    def ranges(self, spec: TableSpec) -> list[tuple[int, int]]:
        """Which part of a dense table each server holds."""
        known = self._ranges.get(spec.key)
        if known is None:
            known = self._ranges[spec.key] = dense_ranges(spec, self.servers)
        return known

    def of(self, table: int, ids: Ids) -> UniqueIds:
        """The distinct ids [n] of a batch, dealt to the servers."""
        own = self._made.setdefault(table, deque(maxlen=_KEPT))  # the last one first
        found = _among(own, ids)
        if found is None:
            # Tables of one model are often looked up with the same ids, one after the other.
            found = _among(self._recent, ids)
            if found is None:
                found = ids.copy(), dedup(ids, self.servers)  # the caller may change its array
                self._recent.appendleft(found)
            own.appendleft(found)
        return found[1]

    def newest(self) -> dict[int, Ids]:
        """The newest batch of each table, by key. Another thread may ask, for displays."""
        return {table: made[0][0] for table, made in [*self._made.items()] if made}


def _among(made: Iterable[tuple[Ids, UniqueIds]], ids: Ids) -> tuple[Ids, UniqueIds] | None:
    """The plan that was made for these very ids."""
    alike = (one for one in made if len(one[0]) == len(ids))
    if len(ids) <= _SHORT:
        wanted = ids.tobytes()
        return next((one for one in alike if one[0].tobytes() == wanted), None)
    for known, plan in alike:
        if (known[::_SAMPLE] == ids[::_SAMPLE]).all() and (known == ids).all():
            return known, plan
    return None


class DenseRead:
    """A pull of a whole array: each server gives its range, if it can where the array will be."""

    def __init__(self, spec: TableSpec, plans: RoutingPlans) -> None:
        self._spec = spec
        self._ranges = plans.ranges(spec)
        self._lent: LentArray | None = None

    def ask(self, parcels: Sequence[ServerRequest]) -> list[bool]:
        """Add the read to the parcel of each server that has a part; which ones have."""
        if 4 * self._spec.size >= LEND_FROM and not parcels[0].packs:
            self._lent = self._borrow(parcels)
        for parcel, (low, high) in zip(parcels, self._ranges, strict=True):
            if high > low:
                parcel.read_values(self._spec, low, high, self._lent)
        return [high > low for low, high in self._ranges]

    def _borrow(self, parcels: Sequence[ServerRequest]) -> LentArray | None:
        """The whole array, if all servers that have a part share the memory that it is in."""
        parts = [
            parcel for parcel, (low, high) in zip(parcels, self._ranges, strict=True) if high > low
        ]
        held = parts[0].held
        if held is None or any(parcel.held is not held for parcel in parts):
            return None
        return held.lend(self._spec.size)

    def join(self, values: Sequence[Values | None]) -> Floats:
        """The array, from what each server gave."""
        lent, self._lent = self._lent, None
        # In memory that is lost, a server that was asked twice may still be writing.
        out = (
            np.empty(self._spec.size, np.float32) if lent is None or lent.held.lost else lent.array
        )
        for (low, high), value in zip(self._ranges, values, strict=True):
            if isinstance(value, CompressedValues):
                value.unpack(out[low:high])
            elif value is not None and address_of(value) != address_of(out[low:high]):
                copy_over(out[low:high], value)
        return out.reshape(self._spec.shape)


class SparseRead:
    """A pull of rows: each server gives the distinct rows that it owns."""

    def __init__(self, spec: TableSpec, read: Read, plans: RoutingPlans) -> None:
        ids = check_ids(spec, read.ids)
        self._spec = spec
        self._shape = ids.shape
        self._plan = plans.of(spec.key, ids.reshape(-1))

    def ask(self, parcels: Sequence[ServerRequest]) -> list[bool]:
        """Add the read to the parcel of each server that has a part; which ones have."""
        for parcel, mine in zip(parcels, self._plan.unique, strict=True):
            if len(mine):
                parcel.read_rows(self._spec, mine)
        return [len(mine) > 0 for mine in self._plan.unique]

    def join(self, values: Sequence[Values | None]) -> Floats:
        """One row per id that was asked for, from what each server gave."""
        nothing = np.empty((0, self._spec.dim), np.float32)
        rows = self._plan.expand(
            [
                nothing
                if value is None
                else value.unpack()
                if isinstance(value, CompressedValues)
                else value
                for value in values
            ]
        )
        return rows.reshape(*self._shape, self._spec.dim)


def deal_read(spec: TableSpec, read: Read, plans: RoutingPlans) -> DenseRead | SparseRead:
    """A read, dealt to the servers."""
    if spec.kind == "dense":
        return DenseRead(spec, plans)
    return SparseRead(spec, read, plans)
