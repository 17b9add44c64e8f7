"""The batches that probably come next, read in a thread while the script works on the present one."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from psfleet.data.assignment import Range

__all__ = ["ReadAhead", "probable"]

Ranges = tuple[Range, ...]
Prepare = Callable[[Ranges], Callable[[], Any]]


class ReadAhead:
    """Reads batches of a source before they are asked for.

    A wrong guess costs the time of reading, and nothing else: the source counts and reports bad rows when the
    batch is taken.

    Args:
        prepare: Reads the samples at these positions, in one thread at a time; what it returns ends the work
            in the thread that asks.
        size: Samples of an epoch.
        depth: So many batches are read ahead.
    """

    def __init__(self, prepare: Prepare, size: int, depth: int) -> None:
        self._prepare = prepare
        self._size = size
        self._depth = depth
        self._last = -1  # first position of the batch before
        self._thread = ThreadPoolExecutor(1, "psfleet-read-ahead")
        self._ahead: OrderedDict[Ranges, Future[Callable[[], Any]]] = OrderedDict()

    def take(self, ranges: Ranges) -> Any:
        """The samples at these positions."""
        coming = self._coming(ranges)
        for other in [other for other in self._ahead if other not in (ranges, *coming)]:
            self._ahead.pop(other).cancel()
        for each in (ranges, *coming):
            if each not in self._ahead:
                self._ahead[each] = self._thread.submit(self._prepare, each)
        return self._ahead.pop(ranges).result()()

    def _coming(self, ranges: Ranges) -> list[Ranges]:
        before, self._last = self._last, ranges[0][0]
        step = self._last - before
        if before < 0 or len(ranges) > 1:
            return []
        return list(probable(ranges[0], step, self._size, self._depth))

    def close(self) -> None:
        """End the thread; what it is reading is read to its end."""
        self._thread.shutdown(cancel_futures=True)


def probable(present: Range, step: int, size: int, count: int) -> Iterator[Ranges]:
    """The positions of the next steps, up to the end of the epoch, if each is so far from the one before."""
    low, high = present
    end = (low // size + 1) * size
    firsts = range(low + step, end, step) if step > 0 else range(0)
    for first in firsts[:count]:
        yield ((first, min(first + high - low, end)),)
