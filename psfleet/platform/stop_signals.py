"""SIGTERM and SIGINT end a process that serves, whatever its main thread is about."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from psfleet.platform.threads import ServiceThread

_ENDING = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def stops_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` for each of these signals. Python allows that in the main thread only.

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
    before = {number: signal.signal(number, lambda *_: None) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(theirs)
        hearing.join()
        os.close(ours)


def _hear(pipe: int, stop: Callable[[], None]) -> None:
    """Each signal with a handler writes its number; the pipe's end says that no reader is left."""
    while numbers := os.read(pipe, 64):
        if any(number in numbers for number in _ENDING):
            stop()
