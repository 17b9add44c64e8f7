"""Choice of the rows that a full table evicts: how many, and in which order.

`rows_to_evict` says how many. A ranking orders the rows by age (longest time since the last push) or by
lowest score. admission.py uses both before a push adds rows to a table with a CapacityEntry. `shrink` uses
the ranking by score to find the rows below a threshold.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.hashing import hash_ids
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.host_rows import HostRowMemory, HostScores
from psfleet.core.engine.tables.row_memory import Keys, RowMemory

Ids = NDArray[np.int64]
_PART = 16  # a full table evicts at least 1/16 of its capacity at a time
_NO_KEY = 2**64 - 1


def rows_to_evict(missing: int, capacity: int) -> int:
    """Return the number of rows to evict if `missing` new rows do not fit, or 0 if all fit.

    If rows have to be evicted, the number is at least 1/16 of the capacity: each eviction scans the whole
    table, so it is worth evicting many rows at a time.

    Args:
        missing: Number of new rows for which there is no place or no memory. 0 or less if all fit.
        capacity: Number of rows of a full table: its row limit, or its present rows if memory is short.
    """
    return max(missing, capacity // _PART) if missing > 0 else 0


class EvictionRanking(Protocol):
    """Order in which rows of one table are evicted. Not thread-safe.

    In each method, `step` is the number of the table's last update, or of the update in progress.
    """

    def first(self, step: int, count: int, least: int) -> Ids:
        """Return the ids of the `count` rows to evict first.

        Args:
            step: Present step of the table.
            count: Number of rows. Fewer are returned if fewer are old enough.
            least: Smallest age of a row that may be evicted: the number of updates since its last push.
        """

    def count_update(self, ids: Ids, step: int) -> None:
        """Record that update number `step` includes these ids. Ids without a row are ignored."""


def eviction_ranking(spec: TableSpec, index: RowMemory, place: int) -> EvictionRanking:
    """Return the ranking that the table's eviction policy needs.

    Args:
        spec: Definition of the table.
        index: Storage of the table's rows.
        place: Position of the row's score values (frequency, or shows and clicks) within a stored row.

    Raises:
        RuleError: The policy's score function cannot be compiled.
    """
    if spec.policy.score() is None:
        return AgeRanking(index)
    assert isinstance(index, HostRowMemory), "no device ranks rows by a score"
    return ScoreRanking(index.scores(spec, place))


class AgeRanking:
    """Ranking by age: rows that were pushed the longest time ago go first."""

    def __init__(self, index: RowMemory) -> None:
        self._index = index

    def first(self, step: int, count: int, least: int) -> Ids:
        return self._index.oldest(step, count, least)

    def count_update(self, ids: Ids, step: int) -> None:
        self._index.touch(ids, step)


class ScoreRanking:
    """Ranking by score: rows with the lowest score are evicted first; of equal scores, older rows first.

    Rows with the same score and age are ordered by a hash of their id. `first` scans all rows twice. The
    first scan computes a sort key for each row (8 bytes per row) and finds the key of the last row to evict;
    the second scan lists the ids of the rows up to that key.
    """

    def __init__(self, scores: HostScores) -> None:
        self._scores = scores

    def first(self, step: int, count: int, least: int) -> Ids:
        if count <= 0:
            return np.zeros(0, np.int64)
        keys = self._scores.keys(step, least, _NO_KEY)
        edge = _NO_KEY
        if len(keys) > count:  # else all of them are evicted
            keys.partition(count - 1)
            edge = int(keys[count - 1])
        ids, keys = self._listed(step, least, edge, keys)
        if len(ids) <= count:
            return ids
        sooner, level = ids[keys < edge], ids[keys == edge]
        remaining = count - len(sooner)
        return np.append(sooner, level[np.argpartition(hash_ids(level), remaining - 1)[:remaining]])

    def below(self, threshold: float, step: int) -> Ids:
        """Return the ids of all rows whose score is below the threshold."""
        max_key = max((_ordered(threshold) << 32) - 1, 0)
        return self._listed(step, 0, max_key, self._scores.keys(step, 0, max_key))[0]

    def count_update(self, ids: Ids, step: int) -> None:
        self._scores.use(ids, step)

    def _listed(self, step: int, min_age: int, max_key: int, keys: Keys) -> tuple[Ids, Keys]:
        """Return ids and eviction keys of the rows whose key is at most `max_key`.

        The key of a row orders rows by score, then age; rows with low keys are evicted first.

        Args:
            step: Present step of the table.
            min_age: Smallest age of a row, in updates since its last push.
            max_key: Largest key.
            keys: Keys of all rows, used only to count how many rows the result has.
        """
        count = int(np.count_nonzero(keys <= np.uint64(max_key)))
        return self._scores.listed(step, min_age, max_key, count)


def _ordered(score: float) -> int:
    """Map a score, as float32, to a uint32. Of two scores, the smaller has the smaller uint32.

    Flips the sign bit, or all bits if the score is negative. The kernels do the same.
    """
    bits = int((np.array([score], np.float32) + np.float32(0)).view(np.uint32)[0])
    return bits ^ (0xFFFFFFFF if bits >> 31 else 0x80000000)
