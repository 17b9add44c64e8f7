"""The scores of the rows of a sparse table in the memory of a CUDA device."""

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.eviction import device_eviction_kernels
from psfleet.kernels.hashing import ids_of
from psfleet.schema.table import TableSpec
from psfleet.tables.device_rows import DeviceRowMemory
from psfleet.tables.row_memory import Keys

__all__ = ["DeviceScores"]

Ids = NDArray[np.int64]


class DeviceScores:
    """See psfleet.tables.row_memory.StoreScores. The keys are sorted out by the host."""

    def __init__(self, spec: TableSpec, memory: DeviceRowMemory, place: int) -> None:
        self._memory = memory
        self._place = place
        self._kernels = device_eviction_kernels(spec.policy, spec.pushed_scores)

    def keys(self, step: int, least: int, most: int) -> Keys:
        """See StoreScores."""
        _, keys = self._memory.rank(self._kernels, self._place, step, least, most)
        return self._memory.queue.read(keys)

    def listed(self, step: int, least: int, most: int, count: int) -> tuple[Ids, Keys]:
        """See StoreScores."""
        hashes, keys = self._memory.rank(self._kernels, self._place, step, least, most)
        return ids_of(self._memory.queue.read(hashes)), self._memory.queue.read(keys)

    def use(self, ids: Ids, step: int) -> None:
        """See StoreScores."""
        self._memory.use(self._kernels, self._place, ids, step)
