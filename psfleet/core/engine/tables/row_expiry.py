"""Removal of rows of a sparse table: after some steps or seconds without a push, or when `shrink` is called.

A table calls `age` after each update, `tick` as time passes, and `shrink` when a script requests it.
Candidates, the ids that wait for a row (candidates.py), are removed in the same way. eviction_choice.py
decides which rows a full table removes.
"""

from psfleet.core.engine.eviction_records import EvictionCause
from psfleet.core.engine.kernels.hash_index import SEGMENT_COUNT
from psfleet.core.engine.schema.entry import ShowClickEntry, TTLEntry, part_of
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.candidates import CandidateIds
from psfleet.core.engine.tables.eviction_choice import EvictionRanking, ScoreRanking
from psfleet.core.engine.tables.row_data import TableClock
from psfleet.core.engine.tables.row_memory import EVERY, RowMemory
from psfleet.core.engine.tables.row_scan import RowScan

# At each multiple of this step all stamps are rewritten. A stamp is the low 32 bits of a step, and ages above
# 2**31 would become ambiguous.
SETTLED = 1 << 29
_SHRINKS = 1024  # number of shrinks whose steps are stored


def segments_due(step: int, ttl: int) -> tuple[int, int]:
    """Return the range of segments to check for expired rows at this step.

    A segment is a class of ids, chosen by their hash. Each segment is checked once in ttl / 8 steps. So the
    step at which a row expires depends only on its id and its last push.
    """
    period = max(ttl // 8, 1)
    phase = step % period
    return phase * SEGMENT_COUNT // period, (phase + 1) * SEGMENT_COUNT // period


class RowLifetime:
    """Expiry and shrinking of one table's rows and candidates (ids without a row yet). Not thread-safe.

    In each method, `step` is the number of the table's last update. SparseTable has methods of the same
    names, which explain the arguments.

    Args:
        spec: Definition of the table.
        index: Storage of the rows.
        scan: Removes rows, and records removals for snapshots and followers.
        waiting: The candidates, or None if every id gets a row.
        scores: Position of the score values within a stored row.
        ranking: Order of evictions; `shrink` uses its scores.
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
        """Remove expired rows after an update, and rewrite stored steps before they become ambiguous."""
        if self._ttl is not None and self._ttl.steps:
            first, last = segments_due(step, self._ttl.steps)
            if first < last:
                self._sweep((first, last), step, self._ttl.steps, EvictionCause.EXPIRED)
        if step % SETTLED == 0:
            self._restamp(step, step)

    def clock(self, step: int) -> TableClock:
        return TableClock(step, self._shrinks, self._ticks)

    def set_clock(self, clock: TableClock, step: int) -> None:
        """Set the clock (number of updates, times of shrinks) to a value of a snapshot.

        Args:
            clock: New clock.
            step: The table's step until now.
        """
        if clock.step != step:
            self._restamp(step, clock.step)
            self._scan.restamped()
        self._shrinks, self._ticks = clock.shrinks, clock.ticks

    def _decay(self, worth: ShowClickEntry, threshold: float | None, step: int) -> int:
        min_worth = worth.delete_threshold if threshold is None else threshold
        factors = (worth.decay_rate, worth.nonclk_coeff, worth.click_coeff)
        ids = self._index.decay(self._scores, factors, min_worth)
        self._scan.rescored()
        return self._scan.drop(ids, step, EvictionCause.SHRUNK)

    def _sweep(
        self, segments: tuple[int, int], step: int, min_age: int, cause: EvictionCause
    ) -> int:
        """Remove rows and candidates that were not pushed for `min_age` steps, within a range of segments.

        A segment is a class of ids, chosen by their hash.
        """
        if self._waiting is not None:
            waiting = self._waiting.index
            waiting.remove(waiting.aged(step, min_age, segments)[0])
        return self._scan.drop(self._index.aged(step, min_age, segments)[0], step, cause)

    def _restamp(self, old: int, new: int) -> None:
        self._index.restamp(old, new)
        if self._waiting is not None:
            self._waiting.index.restamp(old, new)
