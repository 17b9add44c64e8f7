"""Routing of a pull's reads to servers, and of the values back."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.dedup import RecentBatches, UniqueIds
from psfleet.kernels.initial_values import address_of, copy_over
from psfleet.runtime.interface import Read
from psfleet.runtime.validation import check_ids
from psfleet.schema.table import TableSpec
from psfleet.shard.table_placement import dense_range, servers_of
from psfleet.wire.value_formats import CompressedValues
from psfleet_worker.connection.request import ServerRequest, Values
from psfleet_worker.connection.tensor_memory import LEND_FROM, LentArray

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class RoutingPlans:
    """Routing of tables and batches of ids to servers."""

    def __init__(self, servers: int) -> None:
        self.servers = servers
        self._batches = RecentBatches()
        self._groups: dict[int, list[int]] = {}
        self._ranges: dict[int, list[tuple[int, int, int]]] = {}

    def group(self, spec: TableSpec) -> list[int]:
        """Return the servers that hold a table."""
        servers = self._groups.get(spec.key)
        if servers is None:
            servers = self._groups[spec.key] = servers_of(spec, self.servers)
        return servers

    def ranges(self, spec: TableSpec) -> list[tuple[int, int, int]]:
        """Return number, first and end for each server that holds a dense table."""
        ranges = self._ranges.get(spec.key)
        if ranges is None:
            ranges = self._ranges[spec.key] = [
                (server, *dense_range(spec, server, self.servers)) for server in self.group(spec)
            ]
        return ranges

    def of(self, spec: TableSpec, ids: Ids) -> UniqueIds:
        """Return the distinct ids [n] of a batch, split by server of the table's group."""
        return self._batches.of(spec.key, ids, len(self.group(spec)))

    def newest(self) -> dict[int, Ids]:
        """See RecentBatches."""
        return self._batches.newest()


class DenseRead:
    """A pull of a whole array: each server gives its range, if it can where the array will be."""

    def __init__(self, spec: TableSpec, read: Read, plans: RoutingPlans) -> None:
        self._spec = spec
        self._ranges = plans.ranges(spec)
        self._lent: LentArray | None = None

    def ask(self, requests: Sequence[ServerRequest]) -> list[bool]:
        """Add the read to the request of each server that has a part; which ones have."""
        if 4 * self._spec.size >= LEND_FROM and not requests[0].packs:
            self._lent = self._borrow(requests)
        mask = [False] * len(requests)
        for server, low, high in self._ranges:
            if high > low:
                requests[server].read_values(self._spec, low, high, self._lent)
                mask[server] = True
        return mask

    def _borrow(self, requests: Sequence[ServerRequest]) -> LentArray | None:
        """Return the whole array, if all servers that have a part share the memory that it is in."""
        parts = [requests[server] for server, low, high in self._ranges if high > low]
        memory = parts[0].held
        if memory is None or any(request.held is not memory for request in parts):
            return None
        return memory.lend(self._spec.size)

    def join(self, values: Sequence[Values | None]) -> Floats:
        """Return the array, from what each server gave."""
        lent, self._lent = self._lent, None
        # In memory that is lost, a server that was asked twice may still be writing.
        out = (
            np.empty(self._spec.size, np.float32) if lent is None or lent.held.lost else lent.array
        )
        for server, low, high in self._ranges:
            value, part = values[server], out[low:high]
            if isinstance(value, CompressedValues):
                value.unpack(part)
            elif value is not None and (lent is None or address_of(value) != address_of(part)):
                copy_over(part, value)
        return out.reshape(self._spec.shape)


class SparseRead:
    """A pull of rows: each server gives the distinct rows that it owns."""

    def __init__(self, spec: TableSpec, read: Read, plans: RoutingPlans) -> None:
        ids = check_ids(spec, read.ids)
        self._spec = spec
        self._shape = ids.shape
        self._bags = read.bags
        self._plan = plans.of(spec, ids if ids.ndim == 1 else ids.reshape(-1))
        self._group = plans.group(spec)

    def ask(self, requests: Sequence[ServerRequest]) -> list[bool]:
        """Add the read to the request of each server that has a part; which ones have."""
        mask = [False] * len(requests)
        for server, mine in zip(self._group, self._plan.unique, strict=True):
            if len(mine):
                requests[server].read_rows(self._spec, mine)
                mask[server] = True
        return mask

    def join(self, values: Sequence[Values | None]) -> Floats:
        """Return one row per id or bag that was asked for, from what each server gave."""
        parts = []
        for server in self._group:
            value = values[server]
            if value is None:  # it has no part
                value = np.empty((0, self._spec.dim), np.float32)
            parts.append(value.unpack() if isinstance(value, CompressedValues) else value)
        if self._bags is not None:
            return self._plan.pool(parts, self._bags)
        return self._plan.expand(parts).reshape(*self._shape, self._spec.dim)


SPLIT_READS: dict[str, type[DenseRead] | type[SparseRead]] = {
    "dense": DenseRead,
    "sparse": SparseRead,
}
"""Kind of read for each kind of table."""
