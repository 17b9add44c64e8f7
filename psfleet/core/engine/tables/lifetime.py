"""Lifetime of a row of a sparse table, from an id that waits for one to its eviction.

Ids wait for a row; rows last for steps, seconds or shrinks, or by their score; and rows leave a full table in
an order: by the time of their last push, or by the score of its policy.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.evictions import EvictionCause
from psfleet.core.engine.kernels.hash_index import SEGMENT_COUNT
from psfleet.core.engine.kernels.hashing import hash_ids
from psfleet.core.engine.schema.entry import CountFilterEntry, ShowClickEntry, TTLEntry, part_of
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.host_rows import HostRowMemory, HostScores
from psfleet.core.engine.tables.row_data import CandidateData, TableClock
from psfleet.core.engine.tables.row_memory import EVERY, Keys, RowMemory
from psfleet.core.engine.tables.row_scan import RowScan

SETTLED = 1 << 29  # a step that is a multiple of this has stamps brought up to date
_PART = 16  # of a full table, the part that goes at a time


Ids = NDArray[np.int64]
Values = Mapping[str, NDArray[Any]]
_NO_KEY = 2**64 - 1
_SHRINKS = 1024  # that are remembered


def segments_due(step: int, ttl: int) -> tuple[int, int]:
    """The segments to be looked over at this step, so that each has its turn in ttl / 8 steps.

    A segment is chosen by the id's hash, so which step a row goes at depends on nothing else.
    """
    period = max(ttl // 8, 1)
    turn = step % period
    return turn * SEGMENT_COUNT // period, (turn + 1) * SEGMENT_COUNT // period


def rows_to_evict(rows: int, more: int, capacity: int) -> int:
    """Return the number of rows to evict so that `more` new ones fit; 0 if they fit already.

    At least a sixteenth of the capacity goes, so that a full table is not looked over with each push.
    """
    short = rows + more - capacity
    return max(short, capacity // _PART) if short > 0 else 0


class CandidateIds:
    """The candidates of one table on one server, in host memory wherever its rows are. Not thread-safe.

    Args:
        candidate: Values that are remembered of each.
        capacity: Number of candidates that are remembered.

    Attributes:
        index: Index of the remembered values, as rows of 32 bits a value.
        capacity: Number of candidates that are remembered.
    """

    def __init__(self, candidate: Mapping[str, type], capacity: int) -> None:
        self._candidate = candidate
        self.capacity = capacity
        self.index = HostRowMemory(max(len(candidate), 1), self.capacity, marks=False)

    @property
    def room(self) -> int:
        """Number of candidates that fit before any is forgotten."""
        return max(self.capacity - len(self.index), 0)

    def known(self, ids: Ids) -> dict[str, NDArray[Any]]:
        """Return the remembered values of these ids, by name: int64 or float32 [n], 0 for one that is no
        candidate.
        """
        return self._values(self.index.locate(ids)[0])

    def remember(self, ids: Ids, values: Values, step: int) -> None:
        """Store the admission values of ids that have no row yet and are pushed at this step.

        If a push has more new ids than fit, the last ones are dropped.
        """
        mask = self._make_places_for(ids, step)
        slots = self.index.place(ids[mask], np.full(np.count_nonzero(mask), step))
        self._set(slots, {name: column[mask] for name, column in values.items()})

    def forget(self, ids: Ids) -> None:
        """These are no candidates any more."""
        self.index.remove(ids)

    def read(self, step: int) -> CandidateData:
        """All of them."""
        ids, slots = self.index.entries()
        return CandidateData(ids, self._values(slots), self.index.recall(ids, step)[2])

    def write(self, candidates: CandidateData, step: int) -> None:
        """Set what is known of them, leaving other candidates alone; of too many the latest stay."""
        latest = np.argsort(-candidates.touched, kind="stable")[: self.capacity]
        ids, steps = candidates.ids[latest], candidates.touched[latest]
        later = max(step, int(steps.max(initial=0))) + 1
        self._make_places(len(ids), later)
        slots = self.index.place(ids, steps)
        self._set(slots, {name: column[latest] for name, column in candidates.values.items()})

    def _make_places_for(self, ids: Ids, step: int) -> NDArray[np.bool_]:
        """Return a mask of the ids, pushed at this step, that are candidates or have room now to become
        ones.
        """
        slots, unknown = self.index.touch(ids, step)
        self._make_places(unknown, step)
        room = self.capacity - len(self.index)
        mask: NDArray[np.bool_] = (slots != 0) | (np.cumsum(slots == 0) <= room)
        return mask

    def _make_places(self, more: int, step: int) -> None:
        """Forget those that were pushed the longest time ago, none of those pushed at this step."""
        count = rows_to_evict(len(self.index), more, self.capacity)
        if count:
            self.index.remove(self.index.oldest(step, count, least=1))

    def _values(self, slots: Ids) -> dict[str, NDArray[Any]]:
        words = self.index.gather(slots)
        words[slots == 0] = 0
        return {
            name: words[:, place].copy().view(np.uint32).astype(np.int64)
            if kind is int
            else words[:, place].copy()
            for place, (name, kind) in enumerate(self._candidate.items())
        }

    def _set(self, slots: Ids, values: Values) -> None:
        words = np.zeros((len(slots), max(len(self._candidate), 1)), np.uint32)
        for place, (name, kind) in enumerate(self._candidate.items()):
            column = values[name].astype(np.uint32 if kind is int else np.float32)
            words[:, place] = column.view(np.uint32)
        self.index.scatter(slots, words.view(np.float32))


class CandidateCounts(CandidateIds):
    """Candidates of which is known how often they were pushed.

    Args:
        threshold: With which push an id gets its row.
        capacity: Number of candidates that are remembered.
    """

    def __init__(self, threshold: int, capacity: int) -> None:
        super().__init__(CountFilterEntry.candidate, capacity)
        self._needed = threshold

    def passing(self, ids: Ids) -> NDArray[np.bool_]:
        """Return a mask of the ids to which the next push would give a row; changes nothing."""
        enough: NDArray[np.bool_] = self.known(ids)["counts"] + 1 >= self._needed
        return enough

    def count(self, ids: Ids, step: int) -> None:
        """Ids without a row are pushed once more; those that have been pushed often enough are forgotten.

        As for `remember`, those that come last may not be counted.
        """
        if self.index.locate(ids)[1] and self._needed > 1:
            ids = np.ascontiguousarray(ids[self._make_places_for(ids, step)])
        self.index.count(ids, step, self._needed)


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
    assert isinstance(index, HostRowMemory), "no device ranks rows by a score"
    return ScoreRanking(index.scores(spec, place))


class AgeRanking:
    """The rows that were pushed the longest time ago go first. See EvictionRanking."""

    def __init__(self, index: RowMemory) -> None:
        self._index = index

    def first(self, step: int, count: int, least: int) -> Ids:
        return self._index.oldest(step, count, least)

    def use(self, ids: Ids, step: int) -> None:
        self._index.touch(ids, step)


class ScoreRanking:
    """The rows with the lowest score go first, then the oldest, then those with the smallest hash.

    See EvictionRanking. Two looks at all rows find them: one ranks them, one lists those that go.
    It takes 8 bytes a row for as long as that lasts.
    """

    def __init__(self, scores: HostScores) -> None:
        self._scores = scores

    def first(self, step: int, count: int, least: int) -> Ids:
        if count <= 0:
            return np.zeros(0, np.int64)
        keys = self._scores.keys(step, least, _NO_KEY)
        edge = _NO_KEY
        if len(keys) > count:
            keys.partition(count - 1)
            edge = int(keys[count - 1])
        ids, keys = self._listed(step, least, edge, keys)
        if len(ids) <= count:
            return ids
        sooner, level = ids[keys < edge], ids[keys == edge]
        rest = count - len(sooner)
        return np.append(sooner, level[np.argpartition(hash_ids(level), rest - 1)[:rest]])

    def below(self, threshold: float, step: int) -> Ids:
        """Ids of the rows whose score is below the threshold."""
        most = max((_ordered(threshold) << 32) - 1, 0)
        return self._listed(step, 0, most, self._scores.keys(step, 0, most))[0]

    def use(self, ids: Ids, step: int) -> None:
        self._scores.use(ids, step)

    def _listed(self, step: int, least: int, most: int, keys: Keys) -> tuple[Ids, Keys]:
        """Ids and keys of the rows with keys up to `most`; `keys`: keys of these rows at least."""
        count = int(np.count_nonzero(keys <= np.uint64(most)))
        return self._scores.listed(step, least, most, count)


def _ordered(score: float) -> int:
    """Map a float32 to a uint32 of the same order, as the kernels do.

    Flips the sign bit, or all bits if the score is negative.
    """
    bits = int((np.array([score], np.float32) + np.float32(0)).view(np.uint32)[0])
    return bits ^ (0xFFFFFFFF if bits >> 31 else 0x80000000)


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
        return 0.0 if self._ttl is None else self._ttl.seconds / 16

    def tick(self, seconds: float, step: int) -> int:
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
