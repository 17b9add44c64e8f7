"""Looking ahead in a script's data: iterators that show their next item, and a thread that reads batches
early.

While a step computes, the fleet already pulls the rows for the next step, and for this it must know the
next batch. Peekable and its subclasses show the next item without consuming it. ReadAhead reads and decodes
the next batches of a source in a thread while the script trains.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from psfleet.core.engine.round_plan import Range

T = TypeVar("T")


Ranges = tuple[Range, ...]
Prepare = Callable[[Ranges], Callable[[], Any]]


class Peekable(Generic[T]):
    """Iterator that can show its next item without consuming it.

        batches = Peekable(iter(items), peek)
        batches.peek()   # the next item
        next(batches)    # the same item, now consumed

    Args:
        peek: Function that returns the next item without consuming it and without its side effects. It
            returns None if the next item is unknown or there is none. `next` then returns the same object,
            unless the source has been changed meanwhile.
    """

    def __init__(self, items: Iterator[T], peek: Callable[[], T | None]) -> None:
        self._items = items
        self._peek = peek

    def __iter__(self) -> "Peekable[T]":
        return self

    def __next__(self) -> T:
        return next(self._items)

    def peek(self) -> T | None:
        """Return the next item without consuming it, or None if the next item is unknown or there is none."""
        return self._peek()


class RepeatablePeekable(Peekable[T]):
    """Iterator that can show its next item, over a source that can be read several times.

    Each `for` loop starts from the beginning.
    """

    def __init__(self, begin: Callable[[], Peekable[T]]) -> None:
        self._begin = begin
        self._now: Peekable[T] | None = None

    def __iter__(self) -> Peekable[T]:
        self._now = self._begin()
        return self._now

    def __next__(self) -> T:
        return next(self._now or iter(self))

    def peek(self) -> T | None:
        """Return the next item of the current loop. Before the first loop, return the first item."""
        return (self._now or iter(self)).peek()


class SizedPeekable(RepeatablePeekable[T]):
    """Iterator that can show its next item, over a source that knows its number of items.

    It can be read several times.
    """

    def __init__(self, begin: Callable[[], Peekable[T]], count: Callable[[], int]) -> None:
        super().__init__(begin)
        self._count = count

    def __len__(self) -> int:
        return self._count()

    def __bool__(self) -> bool:
        return True


class BufferedPeekable(Generic[T]):
    """Iterator that can show its next item, over any iterator.

    `peek` reads the next item early, with all side effects of reading.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._seen: list[T] = []

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._seen.pop() if self._seen else next(self._items)

    def peek(self) -> T | None:
        """Return the next item without consuming it, or None if there is none."""
        if not self._seen:
            self._seen.extend(itertools.islice(self._items, 1))
        return self._seen[0] if self._seen else None


def with_next(items: Iterable[T], looks_ahead: Callable[[], bool]) -> Iterator[tuple[T, T | None]]:
    """Yield each item together with the next item, or with None if the next item is not known.

    Args:
        items: Items to yield. If this is no Peekable, one item is read ahead.
        looks_ahead: Function that is called for each item. If it returns False, the next item is not looked
            at and None is yielded for it.
    """
    iterator = iter(items)
    source = iterator if isinstance(iterator, Peekable) else BufferedPeekable(iterator)
    for item in source:
        yield item, source.peek() if looks_ahead() else None


class ReadAhead:
    """Thread that reads the batches of a source before they are needed.

    The fleet assigns positions to each batch, and those of the next batches are not known yet. So they are
    guessed: the distance from batch to batch is taken to be that of the last two batches. A wrong guess costs
    only the time of reading. Bad rows are not reported until a batch is used, and then in the thread that
    takes it.

    Args:
        prepare: Function that reads the samples at given positions. It is called in the reading thread. It
            returns a second function, which reports bad rows and returns the samples; `take` calls this
            function.
        depth: Number of batches to read ahead.
    """

    def __init__(self, prepare: Prepare, size: int, depth: int) -> None:
        self._prepare = prepare
        self._size = size
        self._depth = depth
        self._last = -1  # first position of the previous batch
        self._thread = ThreadPoolExecutor(1, "psfleet-read-ahead")
        self._ahead: OrderedDict[Ranges, Future[Callable[[], Any]]] = OrderedDict()

    def take(self, ranges: Ranges) -> Any:
        """Return the samples at these positions, which were read ahead or are read now. Then start to read
        the next batches.

        Batches that were read ahead because of a wrong guess are dropped.
        """
        next_ranges = self._next_ranges(ranges)
        for old_ranges in [
            old_ranges for old_ranges in self._ahead if old_ranges not in (ranges, *next_ranges)
        ]:
            self._ahead.pop(old_ranges).cancel()
        for needed_ranges in (ranges, *next_ranges):
            if needed_ranges not in self._ahead:
                self._ahead[needed_ranges] = self._thread.submit(self._prepare, needed_ranges)
        return self._ahead.pop(ranges).result()()

    def _next_ranges(self, ranges: Ranges) -> list[Ranges]:
        before, self._last = self._last, ranges[0][0]
        step = self._last - before
        if before < 0 or len(ranges) > 1:
            return []
        return list(probable(ranges[0], step, self._size, self._depth))

    def close(self) -> None:
        """End the thread after the batch that it is reading now."""
        self._thread.shutdown(cancel_futures=True)


def probable(present: Range, step: int, size: int, count: int) -> Iterator[Ranges]:
    """Guess the positions of the next steps in the epoch. The distance from step to step is taken to be
    constant.

    Args:
        step: Distance from the first position of one step to that of the next.
    """
    low, high = present
    end = (low // size + 1) * size
    firsts = range(low + step, end, step) if step > 0 else range(0)
    for first in firsts[:count]:
        yield ((first, min(first + high - low, end)),)
