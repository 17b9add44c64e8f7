"""Which rows of a sparse table go first when others need their places: by its eviction policy."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.eviction import eviction_kernels
from psfleet.kernels.hashing import hash_ids
from psfleet.kernels.initial_values import address_of
from psfleet.schema.table import TableSpec
from psfleet.tables.index import RowIndex
from psfleet.tables.row_memory import RowMemory

__all__ = ["AgeRanking", "EvictionRanking", "ScoreRanking", "eviction_ranking"]

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
        spec: Of the table.
        index: Of its rows.
        place: Where within a stored row its scores begin.

    Raises:
        RuleError: The compiler does not take the policy's score function.
    """
    if spec.policy.score() is None:
        return AgeRanking(index)
    assert isinstance(index, RowIndex)  # psfleet.tables.devices keeps such tables in host memory
    return ScoreRanking(spec, index, place)


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
    """

    def __init__(self, spec: TableSpec, index: RowIndex, place: int) -> None:
        self._index = index
        self._place = place
        self._kernels = eviction_kernels(spec.policy, spec.pushed_scores)
        self._scratch = np.zeros(1, np.int64)

    def first(self, step: int, count: int, least: int) -> Ids:
        """See EvictionRanking."""
        if count <= 0:
            return np.zeros(0, np.int64)
        keys = self._rank(step, least, _NO_KEY, np.empty(len(self._index), np.uint64))
        if len(keys) <= count:
            return self._listed(step, least, _NO_KEY, len(keys))[0]
        keys.partition(count - 1)
        edge = int(keys[count - 1])
        ids, found = self._listed(step, least, edge, int(np.count_nonzero(keys <= edge)))
        sooner, level = ids[found < edge], ids[found == edge]
        left = count - len(sooner)
        return np.append(sooner, level[np.argpartition(hash_ids(level), left - 1)[:left]])

    def below(self, threshold: float, step: int) -> Ids:
        """Ids of the rows whose score is below the threshold."""
        most = max((_ordered(threshold) << 32) - 1, 0)
        count = len(self._rank(step, 0, most, np.empty(len(self._index), np.uint64)))
        return self._listed(step, 0, most, count)[0]

    def use(self, ids: Ids, step: int) -> None:
        """See EvictionRanking."""
        self._index.keep(ids)
        slots, ages = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        self._kernels.use(
            self._index.address,
            address_of(ids),
            len(ids),
            step,
            self._place,
            address_of(slots),
            address_of(ages),
        )

    def _listed(
        self, step: int, least: int, most: int, count: int
    ) -> tuple[Ids, NDArray[np.uint64]]:
        """Ids and keys of the `count` rows with keys up to `most`."""
        ids, keys = np.empty(count, np.int64), np.empty(count, np.uint64)
        self._rank(step, least, most, keys, ids)
        return ids, keys

    def _rank(
        self, step: int, least: int, most: int, keys: NDArray[np.uint64], ids: Ids | None = None
    ) -> NDArray[np.uint64]:
        """The keys up to `most` of rows at least `least` old, written to `keys`, and their ids to `ids`."""
        count = self._kernels.rank(
            self._index.address,
            self._place,
            step,
            least,
            most,
            address_of(self._scratch),
            0 if ids is None else address_of(ids),
            address_of(keys),
        )
        return keys[:count]


def _ordered(score: float) -> int:
    """The score as 32 bits in the order of scores, as in the kernels."""
    bits = int((np.array([score], np.float32) + np.float32(0)).view(np.uint32)[0])
    return bits ^ (0xFFFFFFFF if bits >> 31 else 0x80000000)
