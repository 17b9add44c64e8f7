"""Order of evictions from a full table: rows pushed the longest time ago first, or rows of the lowest score.

A table with a CapacityEntry asks its ranking before a push adds rows (admission.py). `shrink` asks the
ranking by score for the rows below a threshold.
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


def rows_to_evict(rows: int, more: int, capacity: int) -> int:
    """Return the number of rows to evict so that `more` new rows fit, or 0 if they fit already.

    It is at least 1/16 of the capacity, because each eviction scans the whole table.
    """
    short = rows + more - capacity
    return max(short, capacity // _PART) if short > 0 else 0


class EvictionRanking(Protocol):
    """Order in which rows of one table are evicted. Not thread-safe.

    The `step` of each method is that of the table's last update, or of the update in progress.
    """

    def first(self, step: int, count: int, least: int) -> Ids:
        """Return the `count` ids to evict first, among rows at least `least` updates old."""

    def count_update(self, ids: Ids, step: int) -> None:
        """Record that the update of this step names these ids; ids without a row are ignored."""


def eviction_ranking(spec: TableSpec, index: RowMemory, place: int) -> EvictionRanking:
    """Return the ranking that the table's eviction policy asks for.

    Args:
        spec: Definition of the table.
        index: Index of the rows.
        place: Offset of the scores within a stored row.

    Raises:
        RuleError: The compiler does not take the policy's score function.
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
    """Ranking by score: rows with the lowest score go first, then older rows, then smaller hashes of the id.

    `first` scans all rows twice. The first scan finds the key of the last row to evict, the second lists the
    rows up to that key. The keys of the first scan take 8 bytes per row.
    """

    def __init__(self, scores: HostScores) -> None:
        self._scores = scores

    def first(self, step: int, count: int, least: int) -> Ids:
        if count <= 0:
            return np.zeros(0, np.int64)
        keys = self._scores.keys(step, least, _NO_KEY)
        edge = _NO_KEY
        if len(keys) > count:  # only now is the key of the last row to evict needed
            keys.partition(count - 1)
            edge = int(keys[count - 1])
        ids, keys = self._listed(step, least, edge, keys)
        if len(ids) <= count:
            return ids
        sooner, level = ids[keys < edge], ids[keys == edge]
        remaining = count - len(sooner)
        return np.append(sooner, level[np.argpartition(hash_ids(level), remaining - 1)[:remaining]])

    def below(self, threshold: float, step: int) -> Ids:
        """Return the ids of the rows whose score is below the threshold."""
        max_key = max((_ordered(threshold) << 32) - 1, 0)
        return self._listed(step, 0, max_key, self._scores.keys(step, 0, max_key))[0]

    def count_update(self, ids: Ids, step: int) -> None:
        self._scores.use(ids, step)

    def _listed(self, step: int, min_age: int, max_key: int, keys: Keys) -> tuple[Ids, Keys]:
        """Return ids and keys of the rows with keys up to `max_key`; `keys` contains these keys."""
        count = int(np.count_nonzero(keys <= np.uint64(max_key)))
        return self._scores.listed(step, min_age, max_key, count)


def _ordered(score: float) -> int:
    """Map a float32 to a uint32 of the same order, as the kernels do.

    Flips the sign bit, or all bits if the score is negative.
    """
    bits = int((np.array([score], np.float32) + np.float32(0)).view(np.uint32)[0])
    return bits ^ (0xFFFFFFFF if bits >> 31 else 0x80000000)
