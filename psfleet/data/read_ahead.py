"""The next items of an iterator: shown without consuming them, or read in a thread."""

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
    """An iterator over a source that can show its next item.

    Args:
        peek: Return the next item without consuming it or running its side effects; None if unknown or
            exhausted. `next` then returns the same object, unless the source changes its course.
    """

    def __init__(self, items: Iterator[T], peek: Callable[[], T | None]) -> None:
        self._items = items
        self._peek = peek

    def __iter__(self) -> "Peekable[T]":
        return self

    def __next__(self) -> T:
        return next(self._items)

    def peek(self) -> T | None:
        """Return the next item without consuming it; None if unknown or exhausted."""
        return self._peek()


class RepeatablePeekable(Peekable[T]):
    """A peekable iterable over a source that can be read again: each `for` loop begins anew."""

    def __init__(self, begin: Callable[[], Peekable[T]]) -> None:
        self._begin = begin
        self._now: Peekable[T] | None = None

    def __iter__(self) -> Peekable[T]:
        self._now = self._begin()
        return self._now

    def __next__(self) -> T:
        return next(self._now or iter(self))

    def peek(self) -> T | None:
        """Return the next item without consuming it; None if unknown or exhausted."""
        return (self._now or iter(self)).peek()


class SizedPeekable(RepeatablePeekable[T]):
    """A repeatable peekable that knows its number of items."""

    def __init__(self, begin: Callable[[], Peekable[T]], count: Callable[[], int]) -> None:
        super().__init__(begin)
        self._count = count

    def __len__(self) -> int:
        return self._count()

    def __bool__(self) -> bool:
        return True


class BufferedPeekable(Generic[T]):
    """A peekable over any iterator; showing the next item takes it from the iterator."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._seen: list[T] = []

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._seen.pop() if self._seen else next(self._items)

    def peek(self) -> T | None:
        """The next item; None: there is none."""
        if not self._seen:
            self._seen.extend(itertools.islice(self._items, 1))
        return self._seen[0] if self._seen else None


def with_next(items: Iterable[T], looks_ahead: Callable[[], bool]) -> Iterator[tuple[T, T | None]]:
    """Each item with the one after it.

    Args:
        items: Source of the items. If it can show the next one it is asked; else an item is taken
            ahead.
        looks_ahead: Function that tells whether to look ahead now; if not, None stands for the next
            item.
    """
    iterator = iter(items)
    source = iterator if isinstance(iterator, Peekable) else BufferedPeekable(iterator)
    for item in source:
        yield item, source.peek() if looks_ahead() else None


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
        next_ranges = self._next_ranges(ranges)
        for other in [other for other in self._ahead if other not in (ranges, *next_ranges)]:
            self._ahead.pop(other).cancel()
        for each in (ranges, *next_ranges):
            if each not in self._ahead:
                self._ahead[each] = self._thread.submit(self._prepare, each)
        return self._ahead.pop(ranges).result()()

    def _next_ranges(self, ranges: Ranges) -> list[Ranges]:
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
