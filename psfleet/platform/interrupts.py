"""Interrupts (Ctrl-C, the stop button of a notebook) come between two changes of state, not within one.

Python raises KeyboardInterrupt wherever the main thread is. Within a push that could leave a number
that was given out and never sent, or a table that is updated beside one that is not. What must happen
whole is done within `deferred`; where it waits for somebody else it asks `check`.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

__all__ = ["check", "deferred", "wait_for"]

_LOOK = 0.1  # seconds between two looks for an interrupt in a wait

_heard = False
_deferring = False  # a block of the main thread is under way
_handler: Callable[[int, FrameType | None], Any] = signal.default_int_handler


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Within, an interrupt of the main thread waits for the end of the block, or for `check`."""
    global _deferring, _handler
    if _deferring or not _in_main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # it is ignored, ends the process, or is not Python's
        yield
        return
    _handler = before
    signal.signal(signal.SIGINT, _note)
    try:
        _deferring = True
        yield
    finally:
        _deferring = False
        signal.signal(signal.SIGINT, before)
        check()


def check() -> None:
    """Let an interrupt that has waited come now: nothing is half done."""
    global _heard
    if _heard and _in_main_thread():
        _heard = False
        _handler(signal.SIGINT, None)


def wait_for(
    changed: threading.Condition, until: Callable[[], bool], timeout: float | None = None
) -> bool:
    """As `changed.wait_for(until, timeout)`; within `deferred` an interrupt ends the wait."""
    if not _in_main_thread():
        return changed.wait_for(until, timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = _LOOK if deadline is None else min(_LOOK, deadline - time.monotonic())
        if changed.wait_for(until, max(left, 0.0)):
            return True
        check()
        if left < _LOOK:
            return False


def _note(number: int, frame: FrameType | None) -> None:
    global _heard
    _heard = True


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
