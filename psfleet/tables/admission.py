"""Who gets a row of a sparse table: decided by its entry, and by the room that there is."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.hashing import drawn
from psfleet.kernels.initial_values import initializer_arguments
from psfleet.runtime.evicted_ids import EvictionCause
from psfleet.schema.entry import ProbabilityEntry, part_of
from psfleet.schema.table import TableSpec
from psfleet.tables import expiry
from psfleet.tables.candidates import CandidateIds
from psfleet.tables.eviction_ranking import EvictionRanking
from psfleet.tables.memory_accounting import MemoryAccount
from psfleet.tables.row_memory import RowMemory
from psfleet.tables.row_scan import RowScan
from psfleet.tables.row_update import RowValues

__all__ = ["AdmissionFilter"]

Ids = NDArray[np.int64]

_NONE = np.zeros(0, np.int64)


class AdmissionFilter:
    """Not thread-safe. A step is everywhere that of the table's last update.

    Args:
        spec: Of the table.
        index: Of its rows.
        scan: Removes those that have to go.
        room: Memory for more.
        waiting: The ids that wait for a row, if the entry lets them.
        ranking: In which rows go.
    """

    def __init__(
        self,
        spec: TableSpec,
        index: RowMemory,
        scan: RowScan,
        room: MemoryAccount,
        waiting: CandidateIds | None,
        ranking: EvictionRanking,
    ) -> None:
        self._ranking = ranking
        self._index = index
        self._scan = scan
        self._room = room
        self._waiting = waiting
        self._chance = part_of(spec.entry, ProbabilityEntry)
        self._stream = int(initializer_arguments(spec.initializer, spec.seed, spec.name)[3])

    def check(self, parts: Sequence[Ids], step: int, written: bool = False) -> None:
        """See SparseTable.check_room."""
        if self._room.surely_fit(sum(map(len, parts))):
            return
        ids = np.unique(np.concatenate(parts))
        slots, unknown = self._index.locate(ids)
        kept = np.ones(len(ids), np.bool_) if written else self._rowed(ids, slots, step)
        new = ids[kept & (slots == 0)]
        self._room.check(int(np.count_nonzero(kept)), new, unknown, written)

    def surplus(self, parts: Sequence[Ids], step: int) -> Ids:
        """See SparseTable.surplus; the table lets rows go."""
        ids = np.unique(np.concatenate(parts))
        slots, _ = self._index.locate(ids)
        kept = self._rowed(ids, slots, step)
        new = int(np.count_nonzero(kept & (slots == 0)))
        short = new - self._room.affordable(new)
        if not 0 < short <= len(self._index) - int(np.count_nonzero(slots)):
            return _NONE
        count = max(short, len(self._index) // 16)
        first = self._ranking.first(step, count + len(ids), 0)
        return first[~np.isin(first, ids)][:count]

    def admit(self, ids: Ids, gradients: RowValues, step: int) -> tuple[Ids, RowValues]:
        """What is left of a push without the unknown ids that get no row; there is room for the rest."""
        admits_all = self._chance is None and self._waiting is None
        if admits_all and self._room.surely_fit(len(ids)):
            return ids, gradients
        slots, unknown = self._index.locate(ids)
        kept = self._rowed(ids, slots, step) if unknown else np.ones(len(ids), np.bool_)
        new = ids[kept & (slots == 0)]
        self._room.check(int(np.count_nonzero(kept)), new, unknown)
        if self._waiting is not None and unknown:
            self._waiting.count(np.ascontiguousarray(ids[slots == 0]), step + 1)
        if not kept.all():
            ids, gradients = ids[kept], gradients[kept]
        if self._room.evicts and len(new) > self._room.places:
            self._ranking.use(ids, step + 1)
            self.make_places(len(new), step + 1, self._room.limit)
        return ids, gradients

    def make_places(self, wanted: int, step: int, most: int) -> None:
        """Let rows go so that with `wanted` more there are `most`, none of those pushed at `step`."""
        leaving = expiry.leaving(len(self._index), wanted, most)
        if self._room.evicts and leaving:
            gone = self._ranking.first(step, leaving, least=1)
            self._scan.drop(gone, step, EvictionCause.CAPACITY)

    def _rowed(self, ids: Ids, slots: Ids, step: int) -> NDArray[np.bool_]:
        """Which ids have a row after the next update, if that names them."""
        kept: NDArray[np.bool_] = slots != 0
        if self._chance is not None:
            return kept | drawn(ids, self._chance.probability, self._stream, step + 1)
        if self._waiting is None:
            return np.ones(len(ids), np.bool_)
        unknown = np.flatnonzero(~kept)
        kept[unknown] = self._waiting.passing(np.ascontiguousarray(ids[unknown]))
        return kept
