"""The last changes of a shard's tables, for followers: which rows, and not what has become of them."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.dedup import dedup
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.row_data import TableChanges
from psfleet.core.engine.tables.row_memory import EVERY
from psfleet.core.engine.tables.sparse import SparseTable

Ids = NDArray[np.int64]

_MOST = 4 << 20  # ids
_SILENCE = 16  # times as many may change without a question
_SWEEP = 2  # stamps of rows are looked at while one id is deduplicated
_QUESTIONS = 1 << 14  # between which changes are told apart


@dataclass(slots=True)
class _Changes:
    """Changes of one table between two questions.

    Attributes:
        first: Step of the first update; 0: there was none.
        named: Ids that updates have named.
        updated: These ids; None: the stamps of the table's index say which.
        others: Ids of rows that were set otherwise, or have gone.
        whole: All of it may have changed.
    """

    first: int = 0
    named: int = 0
    updated: list[Ids] | None = field(default_factory=list)
    others: list[Ids] = field(default_factory=list)
    whole: bool = False

    @property
    def kept(self) -> int:
        """Ids in memory."""
        return sum(map(len, chain(self.updated or (), self.others)))


class ChangeLog:
    """Ids of changed rows, of which a limited number is kept, however many followers there are.

    They are kept from the first question on. When 16 times as many as it may hold have changed without
    another one, nobody follows, and nothing is kept any more. Where updates name many beside the rows that
    their table has, none are kept: the index has the step of each row's last update. Not thread-safe:
    whoever changes tables holds the shard's lock.

    Args:
        limit: Number of ids.

    Attributes:
        is_kept: Somebody follows.
    """

    def __init__(self, limit: int = _MOST) -> None:
        self.is_kept = False
        self._limit = limit
        self._floor = 1  # later changes are known
        self._count = 0  # ids in memory
        self._silence = 0  # ids that have changed since the last question
        # By table the changes between two questions; those since the last one come last.
        self._intervals: deque[dict[int, _Changes]] = deque()

    @property
    def version(self) -> int:
        """Rises with each question before which something has changed."""
        return self._floor + max(len(self._intervals) - 1, 0)

    def begin_after(self, before: "ChangeLog") -> None:
        """No version of the log of other tables is one of this."""
        self._floor = before.version + 1

    def add(self, key: int, ids: Ids | None) -> None:
        """Rows of a table have been set or have gone; None: all of it may have changed."""
        if not self.is_kept:
            return
        changes = self._now(key)
        if ids is None:
            changes.whole = True
        else:
            changes.others.append(ids.copy())
            self._limit_to(len(ids), len(ids))

    def update(self, key: int, ids: Ids, step: int, rows: int) -> None:
        """An update of a table, its `step`-th, has named these ids; the table has so many rows now."""
        if not self.is_kept or not len(ids):
            return
        changes = self._now(key)
        changes.first = changes.first or step
        changes.named += len(ids)
        kept = 0
        if changes.updated is not None:
            if _SWEEP * changes.named > min(rows, self._limit):
                kept -= sum(map(len, changes.updated))
                changes.updated = None
            else:
                kept += len(ids)
                changes.updated.append(ids.copy())
        self._limit_to(len(ids), kept)

    def _now(self, key: int) -> _Changes:
        """The changes of a table since the last question."""
        interval = self._intervals[-1]
        changes = interval.get(key)
        if changes is None:
            changes = interval[key] = _Changes()
        return changes

    def _limit_to(self, changed: int, kept: int) -> None:
        """So many ids have changed, and so many more are kept: forget the oldest of too many."""
        self._silence += changed
        self._count += kept
        too_long = self._silence > _SILENCE * self._limit
        while self._intervals and (self._count > self._limit or too_long):
            self._forget_first()
        self.is_kept = not too_long
        if self.is_kept and not self._intervals:
            self._intervals.append({})

    def _forget_first(self) -> None:
        self._count -= sum(changes.kept for changes in self._intervals.popleft().values())
        self._floor += 1

    def since(
        self, version: int, tables: Mapping[int, SparseTable | DenseTable]
    ) -> dict[int, TableChanges | None] | None:
        """By table what changed after a version; None: all may have. None in place of it: not known.

        Whatever is known, later changes are.
        """
        if not self._intervals or self._intervals[-1]:
            self._intervals.append({})
        if len(self._intervals) > _QUESTIONS:
            self._forget_first()
        self.is_kept, self._silence = True, 0
        if not self._floor <= version <= self.version:
            return None
        by_table: dict[int, list[_Changes]] = {}
        for interval in islice(reversed(self._intervals), 1, 1 + self.version - version):
            for key, changes in interval.items():
                by_table.setdefault(key, []).append(changes)
        return {key: _united(tables[key], several) for key, several in by_table.items()}


def _united(table: SparseTable | DenseTable, several: Sequence[_Changes]) -> TableChanges | None:
    """Return what has changed with all of these; None: all may have."""
    if isinstance(table, DenseTable) or any(changes.whole for changes in several):
        return None
    updates = [changes for changes in several if changes.named]
    parts = [ids for changes in updates for ids in changes.updated or ()]
    swept = any(changes.updated is None for changes in updates)
    if swept or _SWEEP * sum(changes.named for changes in updates) > len(table):
        first = table.scan.before(min(changes.first for changes in updates))
        parts = [table.segment_ids(*EVERY, first)]
    others = [ids for changes in several for ids in changes.others]
    if len(parts) == 1 and not others:
        return TableChanges(parts[0])
    ids = dedup(np.concatenate([*parts, *others]), 1).unique[0]
    if not others:
        return TableChanges(ids)
    there = table.scan.has(ids)  # what was only updated is
    return TableChanges(ids[there], ids[~there])
