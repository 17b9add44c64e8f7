"""Samples in the order of the times at which they happened, where they come almost in that order.

files = ParquetFiles("clicks/", features, ["click"], time="at")
for batch in fleet.dataset(EventTimeSequence(files, window=100_000), batch_size=1024):
    ...  # batch.times never descends
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.base.validation.annotations import PositiveInt, checked
from psfleet.core.engine.round_plan import Range
from psfleet.data.batches import OrderedSource
from psfleet.data.sample_batch import SampleBatch, joined_batches

_KEPT = 2  # pairs of windows, before and after merging
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class _Sorted:
    """Samples of two windows in order of time, and how many the first of the windows has."""

    samples: SampleBatch
    first: int

    @property
    def times(self) -> NDArray[np.int64]:
        assert self.samples.times is not None
        return self.samples.times

    def part(self, second: bool) -> SampleBatch:
        """Return as many samples as the first window has, or the others."""
        return self.samples.chosen(slice(self.first, None) if second else slice(self.first))


def _sorted(first: SampleBatch, second: SampleBatch) -> _Sorted:
    both = joined_batches([first, second])
    assert both.times is not None
    return _Sorted(both.chosen(np.argsort(both.times, kind="stable")), len(first))


@dataclass(frozen=True, slots=True)
class _Place:
    """A number of two windows in an epoch; the order of some sources depends on the batch size."""

    epoch: int
    number: int
    batch_size: int

    def before(self) -> "_Place":
        return replace(self, number=self.number - 1)


class EventTimeSequence:
    """The samples of a source in order of their times: a source of `fleet.dataset`.

    The order is exact if no sample comes `window` or more places behind one that happened later. It is a
    function of positions, like that of every source: any number of workers get the same order, snapshots hold
    positions and nothing else, and a job that resumes reads again what it needs.

    Two windows of the source are sorted together, then the later half of each such pair with the earlier half
    of the next one. A sample is late if it happened before the latest one of the two halves that were sorted
    before its own. A single time far in the future therefore makes two windows late, and not all that follow;
    then, and where two whole windows are late, times descend once.

    A process reads up to three windows ahead and keeps at most eight.

    Args:
        source: `ParquetFiles` with a time, or a `KafkaTopic`.
        window: A number of samples.
        late: "drop" late samples, which makes their batches smaller, or "keep" them: they come late.

    Attributes:
        late: Number of this process's samples that were late.
    """

    @checked
    def __init__(
        self, source: OrderedSource, window: PositiveInt, late: Literal["drop", "keep"] = "drop"
    ) -> None:
        if getattr(source, "finds_partitions", False):
            raise UsageError(
                "the order of time is that of partitions which all have from the start; leave "
                "find_partitions out"
            )
        if getattr(source, "idle", None) is not None:
            raise UsageError(
                f"the source goes on without partitions that are idle for {source.idle} s, so its order is "  # type: ignore[attr-defined]
                "not one of times; leave idle out"
            )
        self.waits = source.waits
        self.late = 0
        self._source = source
        self._window, self._drops = window, late == "drop"
        self._size = len(source)
        self._pairs: OrderedDict[_Place, _Sorted] = OrderedDict()
        self._merges: OrderedDict[_Place, _Sorted] = OrderedDict()

    def __len__(self) -> int:
        """Return the length of the source."""
        return self._size

    def prepare(
        self, ranges: Sequence[Range], batch_size: int, seed: int | None
    ) -> Callable[[], SampleBatch]:
        """See OrderedSource.prepare.

        Raises:
            UsageError: A sample that is read for this cannot be used, or there are no times.
        """
        if seed is not None:
            raise UsageError(
                f"shuffle_seed is {seed}; samples in order of time are not shuffled, leave it out"
            )
        parts = [
            part
            for low, high in ranges
            for part in self._parts(*divmod(low, self._size), high - low, batch_size)
        ]
        batch = joined_batches([samples for samples, _ in parts])
        return functools.partial(self._taken, batch, sum(late for _, late in parts))

    def _taken(self, batch: SampleBatch, late: int) -> SampleBatch:
        self.late += late
        return batch

    def _parts(
        self, epoch: int, low: int, count: int, batch_size: int
    ) -> Iterator[tuple[SampleBatch, int]]:
        """The samples at these positions of an epoch, window by window, and how many of them are late."""
        end = low + count
        while low < end:
            window, skip = divmod(low, self._window)
            count = min(self._window - skip, end - low)
            number, second = divmod(window + 1, 2)
            place = _Place(epoch, number, batch_size)
            yield self._of_window(place, bool(second), skip, skip + count)
            low += count

    def _of_window(
        self, place: _Place, second: bool, low: int, high: int
    ) -> tuple[SampleBatch, int]:
        """Samples number `low` to `high` - 1 of a window, as far as there are so many."""
        late = self._late(place)
        pair = self._merged(place)
        begin, end = (pair.first, len(pair.samples)) if second else (0, pair.first)
        low, high = min(begin + low, end), min(begin + high, end)
        on_time = min(max(low, late), high)
        rows = slice(on_time if self._drops else low, high)
        return pair.samples.chosen(rows), on_time - low

    def _late(self, place: _Place) -> int:
        """Return the number of samples from before the latest one of those that were sorted before."""
        before = self._merged(place.before()).times if place.number else _NONE
        return int(np.searchsorted(self._merged(place).times, before[-1])) if len(before) else 0

    def _merged(self, place: _Place) -> _Sorted:
        """The later half of the pair before, and the earlier half of this pair."""
        if place not in self._merges:
            begins = (
                self._read(place, 0, 0)
                if place.number == 0
                else self._pair(place.before()).part(True)
            )
            self._merges[place] = _sorted(begins, self._pair(place).part(False))
        return _newest(self._merges, place)

    def _pair(self, place: _Place) -> _Sorted:
        """Two windows of the source."""
        if place not in self._pairs:
            low = 2 * self._window * place.number
            middle = low + self._window
            first = self._read(place, low, middle)
            self._pairs[place] = _sorted(first, self._read(place, middle, middle + self._window))
        return _newest(self._pairs, place)

    def _read(self, place: _Place, low: int, high: int) -> SampleBatch:
        """Samples of the source, as far as there are so many."""
        low, high = min(low, self._size), min(high, self._size)
        start = place.epoch * self._size
        ranges = [(start + low, start + high)] if low < high else []
        batch: SampleBatch = self._source.prepare(ranges, place.batch_size, None)()
        if batch.times is None:
            raise UsageError(
                "the samples have no times; name their column with time=... in the source"
            )
        return batch


def _newest(cache: OrderedDict[_Place, _Sorted], place: _Place) -> _Sorted:
    """Return the entry of this place, and drop what was used before the last two."""
    cache.move_to_end(place)
    while len(cache) > _KEPT:
        cache.popitem(last=False)
    return cache[place]
