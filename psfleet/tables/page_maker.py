"""The thread of a process that makes pages of memory in advance."""

import _thread
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["make_pages"]

Order = tuple[Callable[[int, int], object], int, int]
_orders: deque[Order] = deque()
_changing = threading.Lock()
_runs = False


def make_pages(populate: Callable[[int, int], object], start: int, end: int) -> None:
    """Have `populate(start, end)` called by a thread, after what was ordered before.

    One thread serves all tables, and ends when there is nothing to do: pages of two tables at once would
    leave no core to pushes where there are two. Does not wait until the thread runs, as
    `threading.Thread.start` does: on a busy machine for milliseconds, and a push may come here thousands
    of times in a second.
    """
    global _runs
    with _changing:
        _orders.append((populate, start, end))
        if _runs:
            return
        _runs = True
    try:
        _thread.start_new_thread(_make, ())
    except RuntimeError:  # there may be no more threads; pages are then made at first use
        with _changing:
            _orders.clear()  # else they would grow, and keep memory of tables that are gone
            _runs = False


def _next() -> Order | None:
    """The next order; None ends the thread."""
    global _runs
    with _changing:
        if _orders:
            return _orders.popleft()
        _runs = False
        return None


def _make() -> None:
    while order := _next():
        populate, start, end = order
        populate(start, end)
