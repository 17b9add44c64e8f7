"""The scores of the rows of a sparse table in host memory."""

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.eviction import eviction_kernels
from psfleet.kernels.initial_values import address_of
from psfleet.schema.table import TableSpec
from psfleet.tables.host_rows import HostRowMemory
from psfleet.tables.row_memory import Keys

__all__ = ["HostScores"]

Ids = NDArray[np.int64]


class HostScores:
    """Of rows in host memory. See StoreScores."""

    def __init__(self, spec: TableSpec, index: HostRowMemory, place: int) -> None:
        self._index = index
        self._place = place
        self._kernels = eviction_kernels(spec.policy, spec.pushed_scores)
        self._scratch = np.zeros(1, np.int64)

    def keys(self, step: int, least: int, most: int) -> Keys:
        """See StoreScores."""
        keys = np.empty(len(self._index), np.uint64)
        return keys[: self._rank(step, least, most, keys)]

    def listed(self, step: int, least: int, most: int, count: int) -> tuple[Ids, Keys]:
        """See StoreScores."""
        ids, keys = np.empty(count, np.int64), np.empty(count, np.uint64)
        if count:
            self._rank(step, least, most, keys, ids)
        return ids, keys

    def use(self, ids: Ids, step: int) -> None:
        """See StoreScores."""
        self._index.keep(ids)
        slots, ages = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        self._kernels.use(
            self._index.address,
            address_of(ids),
            len(ids),
            step,
            self._place,
            address_of(slots),
            address_of(ages),
        )

    def _rank(self, step: int, least: int, most: int, keys: Keys, ids: Ids | None = None) -> int:
        """Write the keys of these rows to `keys`, and their ids to `ids`; returns how many there are."""
        count: int = self._kernels.rank(
            self._index.address,
            self._place,
            step,
            least,
            most,
            address_of(self._scratch),
            0 if ids is None else address_of(ids),
            address_of(keys),
        )
        return count
