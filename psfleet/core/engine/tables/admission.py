"""Admission to a sparse table: which new ids of a push get a row, and how many rows are evicted for them.

Two things decide. The table's entry may admit an id only by chance, or only after some pushes
(AdmissionRule); until then the id is a candidate (candidates.py). And there must be memory and a free place:
a table with a CapacityEntry evicts other rows (eviction_choice.py), any other table refuses the push before
anything changes.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.eviction_records import EvictionCause
from psfleet.core.engine.kernels.dedup import ascending
from psfleet.core.engine.kernels.hashing import drawn
from psfleet.core.engine.kernels.initial_values import initializer_arguments
from psfleet.core.engine.schema.entry import CountFilterEntry, Entry, ProbabilityEntry
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.budget import MemoryAccount
from psfleet.core.engine.tables.candidates import CandidateCounts, CandidateIds
from psfleet.core.engine.tables.eviction_choice import EvictionRanking, rows_to_evict
from psfleet.core.engine.tables.row_memory import RowMemory
from psfleet.core.engine.tables.row_scan import RowScan
from psfleet.core.engine.tables.row_update import RowValues

Ids = NDArray[np.int64]

M = TypeVar("M", bound="Make")
_NONE = np.zeros(0, np.int64)


class AdmissionRule:
    """Decides for one table on one server which new ids get a row.

    Attributes:
        candidates: Ids that were pushed but have no row yet, or None if the rule does not need to remember
            such ids. Candidates are part of snapshots, and expire as rows do.
    """

    candidates: CandidateIds | None = None

    def passing(self, ids: Ids, step: int) -> NDArray[np.bool_]:
        """Return a mask of the ids that get a row in the push of this step. Changes nothing.

        Args:
            ids: Ids without a row.
            step: Step of the push.
        """
        raise NotImplementedError

    def pushed(self, ids: Ids, step: int) -> None:
        """Record a push of these ids without a row, if the rule counts the pushes of such ids."""


Make = Callable[[Any, TableSpec, int], AdmissionRule]
_RULES: dict[type[Entry], Make] = {}


def admits(entry: type[Entry]) -> Callable[[M], M]:
    """Return a class decorator that registers an AdmissionRule for an entry class such as CountFilterEntry.

    The class is later called with the entry, the table's definition and the number of servers.
    """

    def make_known(rule: M) -> M:
        _RULES[entry] = rule
        return rule

    return make_known


def admission_rule(spec: TableSpec, servers: int) -> AdmissionRule | None:
    """Return the rule that decides which new ids get a row of the table, or None if every id gets one."""
    parts = () if spec.entry is None else spec.entry.parts
    entry = next((part for part in parts if part.admits), None)
    return None if entry is None else _RULES[type(entry)](entry, spec, servers)


@admits(ProbabilityEntry)
class _ChanceRule(AdmissionRule):
    def __init__(self, entry: ProbabilityEntry, spec: TableSpec, servers: int) -> None:
        self._probability = entry.probability
        self._stream = int(initializer_arguments(spec.initializer, spec.seed, spec.name)[3])

    def passing(self, ids: Ids, step: int) -> NDArray[np.bool_]:
        return drawn(ids, self._probability, self._stream, step)


@admits(CountFilterEntry)
class _CountRule(AdmissionRule):
    candidates: CandidateCounts

    def __init__(self, entry: CountFilterEntry, spec: TableSpec, servers: int) -> None:
        self.candidates = CandidateCounts(entry.count_filter, -(-entry.candidates // servers))

    def passing(self, ids: Ids, step: int) -> NDArray[np.bool_]:
        return self.candidates.passing(ids)

    def pushed(self, ids: Ids, step: int) -> None:
        self.candidates.count(ids, step)


class AdmissionFilter:
    """Decides which rows a push may add, by the table's admission rule, its row limit and its memory.

    Not thread-safe. In each method, `step` is the number of the table's last update.

    Args:
        index: Storage of the table's rows.
        scan: Object that removes the rows to evict.
        account: Row limit and memory of the table.
        rule: Rule for new ids, or None if every id gets a row.
        ranking: Order of evictions.
    """

    def __init__(
        self,
        index: RowMemory,
        scan: RowScan,
        account: MemoryAccount,
        rule: AdmissionRule | None,
        ranking: EvictionRanking,
    ) -> None:
        self._ranking = ranking
        self._index = index
        self._scan = scan
        self._account = account
        self._rule = rule

    @property
    def admits_all(self) -> bool:
        """True if every id gets a row, as far as memory and the row limit allow."""
        return self._rule is None

    def check(
        self,
        parts: Sequence[Ids],
        step: int,
        written: bool = False,
        evicted: int = 0,
        admits_all: bool = False,
    ) -> None:
        """Raise UsageError if the table cannot take all these ids.

        The arguments are those of SparseTable.check_room.
        """
        if self._account.can_surely_add(sum(map(len, parts))):
            return
        ids = ascending(parts)
        slots, unknown = self._index.locate(ids)
        mask = self._rowed(ids, slots, step, written or admits_all)
        new = ids[mask & (slots == 0)]
        self._account.check_update(int(np.count_nonzero(mask)), new, unknown, written, evicted)

    def surplus(self, parts: Sequence[Ids], step: int, admits_all: bool) -> Ids:
        """Return the ids to evict, so that an update of `parts` has memory (see SparseTable.surplus)."""
        ids = ascending(parts)
        slots, _ = self._index.locate(ids)
        mask = self._rowed(ids, slots, step, admits_all)
        new = int(np.count_nonzero(mask & (slots == 0)))
        missing = new - self._account.most_affordable(new)
        if not 0 < missing <= len(self._index) - int(np.count_nonzero(slots)):
            return _NONE
        count = rows_to_evict(missing, len(self._index))
        # Rank more rows than needed, because the rows of the update are left out afterwards.
        first = self._ranking.first(step, count + len(ids), 0)
        return first[~np.isin(first, ids)][:count]

    def admit(self, ids: Ids, gradients: RowValues, step: int) -> tuple[Ids, RowValues]:
        """Drop from a push the ids that get no row, and evict other rows if the new rows do not fit.

        Returns the remaining ids and their gradients.
        """
        if self._rule is None and self._account.can_surely_add(len(ids)):
            return ids, gradients
        slots, unknown = self._index.locate(ids)
        mask = self._rowed(ids, slots, step) if unknown else np.ones(len(ids), np.bool_)
        new = ids[mask & (slots == 0)]
        self._account.check_update(int(np.count_nonzero(mask)), new, unknown)
        if unknown and self._rule is not None and self._rule.candidates is not None:
            self._rule.pushed(np.ascontiguousarray(ids[slots == 0]), step + 1)
        if not mask.all():
            ids, gradients = ids[mask], gradients[mask]
        if self._account.evicts and len(new) > self._account.free_places:
            # Record this push for its rows first, so that no row of the push is evicted.
            self._ranking.count_update(ids, step + 1)
            self.make_places(len(new), step + 1, self._account.limit)
        return ids, gradients

    def make_places(self, more: int, step: int, most: int) -> None:
        """Evict rows so that `more` new rows fit into a limit of `most` rows.

        Rows pushed at `step` are not evicted.
        """
        count = rows_to_evict(len(self._index) + more - most, most)
        if self._account.evicts and count:
            ids = self._ranking.first(step, count, least=1)
            self._scan.drop(ids, step, EvictionCause.CAPACITY)

    def _rowed(
        self, ids: Ids, slots: Ids, step: int, admits_all: bool = False
    ) -> NDArray[np.bool_]:
        """Return a mask of the ids that would have a row after an update of all these ids."""
        if self._rule is None or admits_all:
            return np.ones(len(ids), np.bool_)
        mask: NDArray[np.bool_] = slots != 0
        unknown = np.flatnonzero(~mask)
        mask[unknown] = self._rule.passing(np.ascontiguousarray(ids[unknown]), step + 1)
        return mask
