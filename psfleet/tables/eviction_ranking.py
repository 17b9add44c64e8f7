"""Order in which rows leave a full table: by the time of their last push, or by the score of its policy."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.hashing import hash_ids
from psfleet.schema.table import TableSpec
from psfleet.tables.row_memory import Keys, RowMemory, StoreScores

Ids = NDArray[np.int64]

_NO_KEY = 2**64 - 1


class EvictionRanking(Protocol):
    """Not thread-safe. A step is that of the table's last update, or of the one that is being made."""

    def first(self, step: int, count: int, least: int) -> Ids:
        """Ids of the `count` rows that go first, fewer if fewer are `least` updates old."""

    def use(self, ids: Ids, step: int) -> None:
        """The update of this step names these ids; those that have a row count as pushed at it."""


def eviction_ranking(spec: TableSpec, index: RowMemory, place: int) -> EvictionRanking:
    """The ranking by the policy of the table.

    Args:
        spec: Definition of the table.
        index: Index of its rows.
        place: Offset of the scores within a stored row.

    Raises:
        RuleError: The compiler does not take the policy's score function.
    """
    if spec.policy.score() is None:
        return AgeRanking(index)
    return ScoreRanking([store.scores(spec, place) for store in index.stores])


class AgeRanking:
    """The rows that were pushed the longest time ago go first. See EvictionRanking."""

    def __init__(self, index: RowMemory) -> None:
        self._index = index

    def first(self, step: int, count: int, least: int) -> Ids:
        """See EvictionRanking."""
        return self._index.oldest(step, count, least)

    def use(self, ids: Ids, step: int) -> None:
        """See EvictionRanking."""
        self._index.touch(ids, step)


class ScoreRanking:
    """The rows with the lowest score go first, then the oldest, then those with the smallest hash.

    See EvictionRanking. Two looks at all rows find them: one ranks them, one lists those that go.
    It takes 8 bytes a row for as long as that lasts.

    Args:
        scores: Scores in each of the memories that hold the rows.
    """

    def __init__(self, scores: Sequence[StoreScores]) -> None:
        self._scores = scores

    def first(self, step: int, count: int, least: int) -> Ids:
        """See EvictionRanking."""
        if count <= 0:
            return np.zeros(0, np.int64)
        parts = [scores.keys(step, least, _NO_KEY) for scores in self._scores]
        keys = _joined(parts)
        edge = _NO_KEY
        if len(keys) > count:
            keys.partition(count - 1)
            edge = int(keys[count - 1])
        ids, keys = self._listed(step, least, edge, parts)
        if len(ids) <= count:
            return ids
        sooner, level = ids[keys < edge], ids[keys == edge]
        rest = count - len(sooner)
        return np.append(sooner, level[np.argpartition(hash_ids(level), rest - 1)[:rest]])

    def below(self, threshold: float, step: int) -> Ids:
        """Ids of the rows whose score is below the threshold."""
        most = max((_ordered(threshold) << 32) - 1, 0)
        keys = [scores.keys(step, 0, most) for scores in self._scores]
        return self._listed(step, 0, most, keys)[0]

    def use(self, ids: Ids, step: int) -> None:
        """See EvictionRanking."""
        for scores in self._scores:
            scores.use(ids, step)

    def _listed(self, step: int, least: int, most: int, parts: Sequence[Keys]) -> tuple[Ids, Keys]:
        """Ids and keys of the rows with keys up to `most`; `parts`: keys of these rows at least."""
        pairs = [
            scores.listed(step, least, most, int(np.count_nonzero(keys <= np.uint64(most))))
            for scores, keys in zip(self._scores, parts, strict=True)
        ]
        return _joined([ids for ids, _ in pairs]), _joined([keys for _, keys in pairs])


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _ordered(score: float) -> int:
    """The score as 32 bits in the order of scores, as in the kernels."""
    bits = int((np.array([score], np.float32) + np.float32(0)).view(np.uint32)[0])
    return bits ^ (0xFFFFFFFF if bits >> 31 else 0x80000000)
