"""Lifetime of a sparse table's rows: in steps, in seconds, in shrinks, or by their score."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.hashing import hash_ids
from psfleet.runtime.evictions import EvictionCause
from psfleet.schema.entry import ShowClickEntry, TTLEntry, part_of
from psfleet.schema.table import TableSpec
from psfleet.tables.candidates import SETTLED, CandidateIds, segments_due
from psfleet.tables.row_data import TableClock
from psfleet.tables.row_memory import EVERY, Keys, RowMemory, StoreScores
from psfleet.tables.row_scan import RowScan

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


_SHRINKS = 1024  # that are remembered


class RowLifetime:
    """Not thread-safe. A step is everywhere that of the table's last update.

    Args:
        spec: Definition of the table.
        index: Index of its rows.
        scan: Removes those that have to go.
        waiting: The ids that wait for a row, which go too.
        scores: Offset of the scores within a stored row.
        ranking: In which rows go when the table is full.
    """

    def __init__(
        self,
        spec: TableSpec,
        index: RowMemory,
        scan: RowScan,
        waiting: CandidateIds | None,
        scores: int,
        ranking: EvictionRanking,
    ) -> None:
        self._ranking = ranking
        self._index = index
        self._scan = scan
        self._waiting = waiting
        self._ttl = part_of(spec.entry, TTLEntry)
        self._worth = part_of(spec.entry, ShowClickEntry)
        self._scores = scores
        self._shrinks: tuple[int, ...] = ()
        self._ticks: tuple[tuple[float, int], ...] = ()

    @property
    def tick_every(self) -> float:
        """See SparseTable.tick_every."""
        return 0.0 if self._ttl is None else self._ttl.seconds / 16

    def tick(self, seconds: float, step: int) -> int:
        """See SparseTable.tick."""
        ttl = 0.0 if self._ttl is None else self._ttl.seconds
        if not ttl:
            return 0
        now = (self._ticks[-1][0] if self._ticks else 0.0) + seconds
        ticks = (*self._ticks, (now, step))
        over = [step for time, step in ticks if time <= now - ttl]
        self._ticks = ticks[max(len(over) - 1, 0) :]
        if not over:
            return 0
        return self._sweep(EVERY, step, step - over[-1], EvictionCause.EXPIRED)

    def shrink(self, threshold: float | None, unseen: int | None, step: int) -> int:
        """See SparseTable.shrink."""
        count = 0
        if self._worth is not None:
            count = self._decay(self._worth, threshold, step)
            unseen = self._worth.delete_after_unseen if unseen is None else unseen
        elif isinstance(self._ranking, ScoreRanking) and threshold is not None:
            below = self._ranking.below(threshold, step)
            count = self._scan.drop(below, step, EvictionCause.SHRUNK)
        elif unseen is None and threshold is not None:
            unseen = int(threshold)
        if unseen is not None and 0 < unseen <= len(self._shrinks):
            count += self._sweep(EVERY, step, step - self._shrinks[-unseen], EvictionCause.SHRUNK)
        self._shrinks = (*self._shrinks, step)[-_SHRINKS:]
        return count

    def age(self, step: int) -> None:
        """After an update: let rows go whose time has come, and keep stamps in range."""
        if self._ttl is not None and self._ttl.steps:
            first, last = segments_due(step, self._ttl.steps)
            if first < last:
                self._sweep((first, last), step, self._ttl.steps, EvictionCause.EXPIRED)
        if step % SETTLED == 0:
            self._restamp(step, step)

    def clock(self, step: int) -> TableClock:
        """See SparseTable.clock."""
        return TableClock(step, self._shrinks, self._ticks)

    def set_clock(self, clock: TableClock, step: int) -> None:
        """Set it to what it was; `step`: what the table's is until now."""
        if clock.step != step:
            self._restamp(step, clock.step)
            self._scan.restamped()
        self._shrinks, self._ticks = clock.shrinks, clock.ticks

    def _decay(self, worth: ShowClickEntry, threshold: float | None, step: int) -> int:
        least = worth.delete_threshold if threshold is None else threshold
        factors = (worth.decay_rate, worth.nonclk_coeff, worth.click_coeff)
        ids = self._index.decay(self._scores, factors, least)
        return self._scan.drop(ids, step, EvictionCause.SHRUNK)

    def _sweep(self, segments: tuple[int, int], step: int, least: int, cause: EvictionCause) -> int:
        """Forget rows and waiting ids of these segments that are at least so many steps old."""
        if self._waiting is not None:
            waiting = self._waiting.index
            waiting.remove(waiting.aged(step, least, segments)[0])
        return self._scan.drop(self._index.aged(step, least, segments)[0], step, cause)

    def _restamp(self, old: int, new: int) -> None:
        self._index.restamp(old, new)
        if self._waiting is not None:
            self._waiting.index.restamp(old, new)
