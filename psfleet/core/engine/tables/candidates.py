"""Candidates: ids of a sparse table that were pushed but have no row yet.

An admission rule (admission.py) may need some values for each candidate, such as the number of its pushes.
They are stored here, in a small index of their own. A table stores a limited number of candidates; if there
are too many, those whose last push is the longest ago are dropped.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.schema.entry import CountFilterEntry
from psfleet.core.engine.tables.eviction_choice import rows_to_evict
from psfleet.core.engine.tables.host_rows import HostRowMemory
from psfleet.core.engine.tables.row_data import CandidateData

Ids = NDArray[np.int64]
Values = Mapping[str, NDArray[Any]]


class CandidateIds:
    """Candidates of one table on one server: ids that were pushed but have no row yet.

    Stored in host memory, even if the table is on a GPU or on disk. Not thread-safe.

    Args:
        candidate: Name and type of each value that is stored for a candidate.
        capacity: Largest number of candidates.

    Attributes:
        index: The candidates by id. The row of a candidate has 32 bits for each stored value.
        capacity: Largest number of candidates.
    """

    def __init__(self, candidate: Mapping[str, type], capacity: int) -> None:
        self._candidate = candidate
        self.capacity = capacity
        self.index = HostRowMemory(max(len(candidate), 1), self.capacity, marks=False)

    @property
    def free_places(self) -> int:
        """Number of candidates that can be added before older ones are dropped."""
        return max(self.capacity - len(self.index), 0)

    def remembered(self, ids: Ids) -> dict[str, NDArray[Any]]:
        """Return the stored values of these ids by name: int64 or float32 [n], 0 if not a candidate."""
        return self._values(self.index.locate(ids)[0])

    def remember(self, ids: Ids, values: Values, step: int) -> None:
        """Store values of ids that have no row yet and are pushed at this step. New ids become candidates.

        If a push has more new ids than fit, the last ones are dropped.

        Args:
            ids: Ids without a row.
            values: Values to store for each id, by name.
            step: Step of the push.
        """
        mask = self._make_places_for(ids, step)
        slots = self.index.find_or_add(ids[mask], np.full(np.count_nonzero(mask), step))
        self._set(slots, {name: column[mask] for name, column in values.items()})

    def remove(self, ids: Ids) -> None:
        """Drop candidates, for example because they get a row."""
        self.index.remove(ids)

    def read(self, step: int) -> CandidateData:
        """Return all candidates with their values and the steps of their last pushes."""
        ids, slots = self.index.entries()
        return CandidateData(ids, self._values(slots), self.index.recall(ids, step)[2])

    def write(self, candidates: CandidateData, step: int) -> None:
        """Write these candidates; other candidates stay.

        If there are more candidates than the capacity allows, those with the latest pushes are written.
        """
        latest = np.argsort(-candidates.touched, kind="stable")[: self.capacity]
        ids, steps = candidates.ids[latest], candidates.touched[latest]
        # The age of a row is relative to a step. With a step after every push, any candidate may be dropped.
        later = max(step, int(steps.max(initial=0))) + 1
        self._make_places(len(ids), later)
        slots = self.index.find_or_add(ids, steps)
        self._set(slots, {name: column[latest] for name, column in candidates.values.items()})

    def _make_places_for(self, ids: Ids, step: int) -> NDArray[np.bool_]:
        """Return a mask of the ids that are candidates or can become candidates at this step."""
        slots, unknown = self.index.touch(ids, step)
        self._make_places(unknown, step)
        free = self.capacity - len(self.index)
        mask: NDArray[np.bool_] = (slots != 0) | (np.cumsum(slots == 0) <= free)
        return mask

    def _make_places(self, new_ids: int, step: int) -> None:
        """Drop the candidates that were pushed the longest time ago, but none pushed at this step."""
        count = rows_to_evict(len(self.index) + new_ids - self.capacity, self.capacity)
        if count:
            self.index.remove(self.index.oldest(step, count, least=1))

    def _values(self, slots: Ids) -> dict[str, NDArray[Any]]:
        words = self.index.gather(slots)
        words[slots == 0] = 0
        return {
            name: words[:, position].copy().view(np.uint32).astype(np.int64)
            if kind is int
            else words[:, position].copy()
            for position, (name, kind) in enumerate(self._candidate.items())
        }

    def _set(self, slots: Ids, values: Values) -> None:
        words = np.zeros((len(slots), max(len(self._candidate), 1)), np.uint32)
        for position, (name, kind) in enumerate(self._candidate.items()):
            column = values[name].astype(np.uint32 if kind is int else np.float32)
            words[:, position] = column.view(np.uint32)
        self.index.scatter(slots, words.view(np.float32))


class CandidateCounts(CandidateIds):
    """Candidates of a CountFilterEntry (ids without a row), each with the number of its pushes so far.

    Args:
        threshold: Number of pushes at which an id gets its row.
        capacity: Largest number of candidates.
    """

    def __init__(self, threshold: int, capacity: int) -> None:
        super().__init__(CountFilterEntry.candidate, capacity)
        self._needed = threshold

    def passing(self, ids: Ids) -> NDArray[np.bool_]:
        """Return a mask of the ids that would get a row in the next push. Changes nothing."""
        enough: NDArray[np.bool_] = self.remembered(ids)["counts"] + 1 >= self._needed
        return enough

    def count(self, ids: Ids, step: int) -> None:
        """Count a push of ids without a row, and drop candidates that now get a row.

        If a push has more new ids than fit, the last ones are not counted.
        """
        if self.index.locate(ids)[1] and self._needed > 1:
            ids = np.ascontiguousarray(ids[self._make_places_for(ids, step)])
        self.index.count(ids, step, self._needed)
