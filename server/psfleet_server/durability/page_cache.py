"""Evict written log pages from the OS page cache (posix_fadvise), because they are not read again.

Memory that the system must find for each record is dear, the more so in a virtual machine whose host takes
free memory back: there a megabyte costs 1.4 to 1.9 ms of the writer's time, and 0.2 in memory that was just
let go. So the file is followed at a distance by a thread that has it written to the disk and dropped. Nobody
waits for it: what it does changes nothing about how durable a record is.
"""

import contextlib
import os
import threading

from psfleet.platform.service_thread import ServiceThread

__all__ = ["PageCacheEvictor"]

_STRIDE = 8 << 20  # bytes written between two turns


class PageCacheEvictor:
    """Follows one writer. The thread begins with the first long way, and ends with `close`."""

    def __init__(self, stride: int = _STRIDE) -> None:
        self._stride = stride
        self._way = 0  # bytes since the last turn
        self._more = threading.Condition()
        self._next: tuple[int, int] | None = None  # a descriptor of its own, and where to stop
        self._over = False
        self._thread: threading.Thread | None = None

    def follow(self, file: int, end: int, written: int) -> None:
        """So many bytes were written to the file, up to `end`. Returns at once."""
        self._way += written
        if self._way < self._stride:
            return
        self._way = 0
        if self._thread is None:
            self._thread = ServiceThread(self._run, "trail")
            self._thread.start()
        with self._more:
            if self._next is not None:  # the disk is slow; this turn covers that one
                os.close(self._next[0])
            self._next = os.dup(file), end
            self._more.notify()

    def close(self) -> None:
        """Return when the last turn is done."""
        with self._more:
            self._over = True
            self._more.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._more:
                self._more.wait_for(lambda: self._next is not None or self._over)
                if self._next is None:
                    return
                (file, end), self._next = self._next, None
            # Starts to write what the disk lacks, and drops what it has. It is advice: nothing depends on it.
            with contextlib.suppress(OSError):
                os.posix_fadvise(file, 0, end, os.POSIX_FADV_DONTNEED)
            os.close(file)
