"""Change log for followers: which rows of a shard's tables have changed since a follower last asked.

A follower is a process that keeps a copy of the weights up to date. The log stores ids only; values are read
when a follower asks. It is a queue of intervals between requests, each with the changed ids of every table.
Intervals are numbered, and the number is the follower's version. A follower names its version and gets the
ids of all later intervals. Memory is limited: the oldest intervals are dropped, and a follower with an older
version has to copy everything again.
"""

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

_MOST = 4 << 20  # largest number of stored ids
_SILENCE = 16  # after 16 times as many changed ids without a request, there is no follower
_SWEEP = 2  # reading the last steps of 2 rows takes as long as deduplicating one id
_QUESTIONS = 1 << 14  # largest number of stored intervals


@dataclass(slots=True)
class _Changes:
    """Changes of one table between two requests.

    Attributes:
        first: Number of the table's first update in this time, or 0 if there was none.
        named: Number of ids in all these updates, repeats included.
        updated: Ids of all updates, or None if they are too many: it is then cheaper to find the rows by the
            step of their last push, which the table's index has.
        others: Ids of rows that were written other than by an update, or removed.
        whole: True if any row may have changed.
    """

    first: int = 0
    named: int = 0
    updated: list[Ids] | None = field(default_factory=list)
    others: list[Ids] = field(default_factory=list)
    whole: bool = False

    @property
    def remembered_ids(self) -> int:
        """Number of ids stored in memory."""
        return sum(map(len, chain(self.updated or (), self.others)))


class ChangeLog:
    """Limited log of changed ids, for any number of followers. Not thread-safe: hold the shard's lock.

    Recording starts with the first request. It stops when 16 * `limit` ids have changed without another
    request, because no follower is left then. If updates include many ids compared with the rows of their
    table, no ids are recorded; a request then finds the changed rows by the step of each row's last push.

    Args:
        limit: Largest number of ids that are stored.

    Attributes:
        is_kept: True while changes are recorded for followers.
    """

    def __init__(self, limit: int = _MOST) -> None:
        self.is_kept = False
        self._limit = limit
        self._floor = 1  # oldest version since which all changes are known
        self._count = 0  # ids in memory
        self._silence = 0  # ids that have changed since the last request
        # For each interval between two requests, the changes of each table. The last interval is still open.
        self._intervals: deque[dict[int, _Changes]] = deque()

    @property
    def version(self) -> int:
        """Present version of the tables. A request of a follower raises it if tables have changed."""
        return self._floor + max(len(self._intervals) - 1, 0)

    def number_after(self, before: "ChangeLog") -> None:
        """Continue with versions above those of another log, which are then not valid here (rule S24)."""
        self._floor = before.version + 1

    def add(self, key: int, ids: Ids | None) -> None:
        """Record that rows of a table were written or removed. None means that any row may have changed."""
        if not self.is_kept:
            return
        changes = self._now(key)
        if ids is None:
            changes.whole = True
        else:
            changes.others.append(ids.copy())
            self._limit_to(len(ids), len(ids))

    def update(self, key: int, ids: Ids, step: int, rows: int) -> None:
        """Record an update of a table.

        Args:
            key: Key of the table.
            ids: Updated ids.
            step: Number of the update.
            rows: Number of rows that the table now has.
        """
        if not self.is_kept or not len(ids):
            return
        changes = self._now(key)
        changes.first = changes.first or step
        changes.named += len(ids)
        recorded_change = 0
        if changes.updated is not None:
            if _SWEEP * changes.named > min(rows, self._limit):
                recorded_change -= sum(map(len, changes.updated))
                changes.updated = None
            else:
                recorded_change += len(ids)
                changes.updated.append(ids.copy())
        self._limit_to(len(ids), recorded_change)

    def _now(self, key: int) -> _Changes:
        """Return the changes of a table since the last request, for adding to them."""
        interval = self._intervals[-1]
        changes = interval.get(key)
        if changes is None:
            changes = interval[key] = _Changes()
        return changes

    def _limit_to(self, changed: int, recorded: int) -> None:
        """Count changed and recorded ids, and drop the oldest intervals if the log is above its limit."""
        self._silence += changed
        self._count += recorded
        too_long = self._silence > _SILENCE * self._limit
        while self._intervals and (self._count > self._limit or too_long):
            self._drop_oldest()
        self.is_kept = not too_long
        if self.is_kept and not self._intervals:
            self._intervals.append({})

    def _drop_oldest(self) -> None:
        self._count -= sum(changes.remembered_ids for changes in self._intervals.popleft().values())
        self._floor += 1

    def since(
        self, version: int, tables: Mapping[int, SparseTable | DenseTable]
    ) -> dict[int, TableChanges | None] | None:
        """Return the changes of each changed table since a version, and begin a new interval.

        A table maps to None if all of it must be copied. Returns None instead of a mapping if the version is
        no longer known. In either case, changes are recorded from now on.
        """
        if not self._intervals or self._intervals[-1]:
            self._intervals.append({})
        if len(self._intervals) > _QUESTIONS:
            self._drop_oldest()
        self.is_kept, self._silence = True, 0
        if not self._floor <= version <= self.version:
            return None
        by_table: dict[int, list[_Changes]] = {}
        for interval in islice(reversed(self._intervals), 1, 1 + self.version - version):
            for key, changes in interval.items():
                by_table.setdefault(key, []).append(changes)
        return {key: _united(tables[key], several) for key, several in by_table.items()}


def _united(table: SparseTable | DenseTable, several: Sequence[_Changes]) -> TableChanges | None:
    """Merge the changes between several successive cuts, or return None if the whole table must be copied."""
    if isinstance(table, DenseTable) or any(changes.whole for changes in several):
        return None
    updates = [changes for changes in several if changes.named]
    parts = [ids for changes in updates for ids in changes.updated or ()]
    swept = any(changes.updated is None for changes in updates)
    if swept or _SWEEP * sum(changes.named for changes in updates) > len(table):
        first = table.scan.before(min(changes.first for changes in updates))
        parts = [table.segment_ids(*EVERY, first)]
    other_ids = [ids for changes in several for ids in changes.others]
    if len(parts) == 1 and not other_ids:
        return TableChanges(parts[0])
    ids = dedup(np.concatenate([*parts, *other_ids]), 1).unique[0]
    if not other_ids:
        return TableChanges(ids)
    has_row = table.scan.has(ids)  # without other changes, every updated row exists
    return TableChanges(ids[has_row], ids[~has_row])
