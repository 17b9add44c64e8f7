"""Iterators that show their next item without consuming it."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["BufferedPeekable", "Peekable", "RepeatablePeekable", "SizedPeekable", "with_next"]

T = TypeVar("T")


class Peekable(Generic[T]):
    """An iterator over a source that can show its next item.

    Args:
        items: The items.
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
    """A peekable iterable over a source that can be read again: each `for` loop begins anew.

    Args:
        begin: Begins to read the source.
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
        """Return the next item without consuming it; None if unknown or exhausted."""
        return (self._now or iter(self)).peek()


class SizedPeekable(RepeatablePeekable[T]):
    """A repeatable peekable that knows its number of items.

    Args:
        begin: Begins to read the source.
        count: How many items a loop has.
    """

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


def with_next(items: Iterable[T], wanted: Callable[[], bool]) -> Iterator[tuple[T, T | None]]:
    """Each item with the one after it.

    Args:
        items: What knows what comes next is asked; of anything else an item is taken ahead.
        wanted: Whether to look ahead now; if not, None stands for the next item.
    """
    found = iter(items)
    source = found if isinstance(found, Peekable) else BufferedPeekable(found)
    for item in source:
        yield item, source.peek() if wanted() else None
