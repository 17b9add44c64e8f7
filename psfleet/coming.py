"""Iterators whose next item can be seen before it is taken."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["Coming", "Peeked", "with_next"]

T = TypeVar("T")


class Coming(Generic[T]):
    """Items of a source that knows what comes next.

    Args:
        items: The items.
        peek: The next one, the very object that taking it will give, without anything that taking it does;
            None: it is not known, or there is none. Only a source that goes another way gives another one.
    """

    def __init__(self, items: Iterator[T], peek: Callable[[], T | None]) -> None:
        self._items = items
        self._peek = peek

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return next(self._items)

    def peek(self) -> T | None:
        """The next item; None: it is not known, or there is none."""
        return self._peek()


class Peeked(Generic[T]):
    """The same for any iterator: seeing the next item takes it from there."""

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
    source = items if isinstance(items, Coming) else Peeked(iter(items))
    for item in source:
        yield item, source.peek() if wanted() else None
