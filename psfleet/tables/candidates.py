"""Ids that wait for a row: how often each has been pushed."""

import numpy as np
from numpy.typing import NDArray

from psfleet.tables import expiry
from psfleet.tables.host_rows import HostRowMemory
from psfleet.tables.row_data import CandidateData

__all__ = ["CandidateIds"]

Ids = NDArray[np.int64]


class CandidateIds:
    """The candidates of one table on one server, in host memory wherever its rows are. Not thread-safe.

    Args:
        needed: With which push an id gets its row.
        capacity: How many are remembered.

    Attributes:
        index: Their counts, as rows of one uint32.
        capacity: How many are remembered.
    """

    def __init__(self, needed: int, capacity: int) -> None:
        self._needed = needed
        self.capacity = capacity
        self.index = HostRowMemory(1, self.capacity, marks=False)

    @property
    def room(self) -> int:
        """How many more are remembered before any is forgotten."""
        return max(self.capacity - len(self.index), 0)

    def passing(self, ids: Ids) -> NDArray[np.bool_]:
        """Which ids the next push would give a row; changes nothing."""
        return self._counts(self.index.locate(ids)[0]) + 1 >= self._needed

    def count(self, ids: Ids, step: int) -> None:
        """Ids without a row are pushed once more; those that have been pushed often enough are forgotten.

        A push with more new ids than are remembered: those that come last are not counted.
        """
        slots, unknown = self.index.locate(ids)
        if unknown and self._needed > 1:
            self.index.touch(ids, step)
            self._make_places(unknown, step)
            room = self.capacity - len(self.index)
            ids = np.ascontiguousarray(ids[(slots != 0) | (np.cumsum(slots == 0) <= room)])
        self.index.count(ids, step, self._needed)

    def read(self, step: int) -> CandidateData:
        """All of them."""
        ids, slots = self.index.entries()
        return CandidateData(ids, self._counts(slots), self.index.recall(ids, step)[2])

    def write(self, candidates: CandidateData, step: int) -> None:
        """Set counts, leaving other candidates alone; of too many the latest stay."""
        latest = np.argsort(-candidates.touched, kind="stable")[: self.capacity]
        ids, touched = candidates.ids[latest], candidates.touched[latest]
        later = max(step, int(touched.max(initial=0))) + 1
        self._make_places(len(ids), later)
        slots = self.index.place(ids, touched)
        counts = candidates.counts[latest].astype(np.uint32).view(np.float32).reshape(-1, 1)
        self.index.scatter(slots, np.ascontiguousarray(counts))

    def _make_places(self, wanted: int, step: int) -> None:
        """Forget those that were pushed the longest time ago, none of those pushed at this step."""
        leaving = expiry.leaving(len(self.index), wanted, self.capacity)
        if leaving:
            self.index.remove(self.index.oldest(step, leaving, least=1))

    def _counts(self, slots: Ids) -> Ids:
        counts = self.index.gather(slots).view(np.uint32).reshape(-1).astype(np.int64)
        counts[slots == 0] = 0
        return counts
