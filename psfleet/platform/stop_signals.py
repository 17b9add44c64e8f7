"""Signals: handlers for a while, and processes that they wake or end."""

import contextlib
import os
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from psfleet.platform.threads import ServiceThread

_ENDING = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[..., Any]) -> Iterator[None]:
    """Let a handler have these signals, and then those that had them before."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class Waker:
    """Wakes a selector from other threads and by signals; `fileno` is what it registers."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.theirs.setblocking(False)

    def fileno(self) -> int:
        """Return the file descriptor for the selector."""
        return self._ours.fileno()

    def wake(self) -> None:
        """Wake it. Any thread may call, also when it is closed."""
        with contextlib.suppress(OSError):  # what is full wakes it already
            self.theirs.send(b"\0")

    def drain(self) -> None:
        """Take what has woken it."""
        with contextlib.suppress(BlockingIOError):
            self._ours.recv(1 << 16)

    def close(self) -> None:
        """Close both ends."""
        self._ours.close()
        self.theirs.close()


@contextlib.contextmanager
def wakes_on_signals(
    selector: selectors.BaseSelector, numbers: Iterable[int], note: Callable[[int], None]
) -> Iterator[None]:
    """Have SIGCHLD and these signals wake a selector; `note` takes the numbers of the latter."""
    with contextlib.closing(Waker()) as waker:
        selector.register(waker, selectors.EVENT_READ, waker.drain)
        wakeup = signal.set_wakeup_fd(waker.theirs.fileno(), warn_on_full_buffer=False)
        try:
            with (
                handled([signal.SIGCHLD], lambda *_: None),
                handled(numbers, lambda number, _: note(number)),
            ):
                yield
        finally:
            signal.set_wakeup_fd(wakeup)
            selector.unregister(waker)


@contextlib.contextmanager
def stops_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` for SIGTERM and SIGINT, whatever the main thread is about. Call this from the main thread.

    A thread hears of them through a pipe. A handler in Python would come too late or in the way: it runs
    between two steps of the main thread, which may just then be about to wait without end, or hold the
    very lock that `stop` needs. And the kernel may have another thread take the signal, as it does when
    one that goes on after SIGSTOP gets it; then the main thread goes on waiting.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    hearing = ServiceThread(_hear, "signals", (ours, stop))
    hearing.start()
    wakeup = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    try:
        with handled(_ENDING, lambda *_: None):
            yield
    finally:
        signal.set_wakeup_fd(wakeup)
        os.close(theirs)
        hearing.join()
        os.close(ours)


def _hear(pipe: int, stop: Callable[[], None]) -> None:
    """Each signal with a handler writes its number; the pipe's end says that no reader is left."""
    while numbers := os.read(pipe, 64):
        if any(number in numbers for number in _ENDING):
            stop()
