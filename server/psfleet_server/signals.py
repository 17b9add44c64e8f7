"""Liveness signals of a server to the process that started it, on a pipe.

The bytes say that the process runs: that it is not stopped, nor kept from every processor. Nothing of the
server's own is asked, for what takes it long is no reason to give it up. A process that ends in order
closes the pipe first: Python ends its threads long before the kernel has taken the tables' memory back.
"""

import contextlib
import os
import threading
from typing import Self

from psfleet.platform.logs import log_of
from psfleet.platform.threads import ServiceThread

_log = log_of(__name__)

_EVERY = 0.25  # seconds
_SIGNAL = b"\0"
_LONGEST = 1000  # bytes of a line: a pipe takes so many whole or not at all


class LivenessPipe:
    """Send liveness signals inside the `with` block, until the reader closes the pipe.

    Args:
        pipe: File descriptor to write to; this object's from now on. 0: no launcher reads it.
    """

    def __init__(self, pipe: int = 0) -> None:
        self._pipe = pipe
        self._over = threading.Event()
        self._thread = ServiceThread(self._run, "liveness")

    def __enter__(self) -> Self:
        if not self._pipe:
            return self
        os.set_inheritable(self._pipe, False)
        os.set_blocking(self._pipe, False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._pipe:
            self._thread.join()
            os.close(self._pipe)

    def tell(self, text: str) -> None:
        """Send one line to the console, and write it to this process's log."""
        _log.info(text)
        if self._pipe and self._thread.is_alive():
            line = text.replace("\n", " ").encode()[:_LONGEST] + b"\n"
            with contextlib.suppress(OSError):  # who has not looked for hours finds it in the log
                os.write(self._pipe, line)

    def _run(self) -> None:
        while self.signal() and not self._over.wait(_EVERY):
            pass

    def signal(self) -> bool:
        """Write one signal, which wakes the reader; return whether there is one."""
        if not self._pipe:
            return False
        try:
            os.write(self._pipe, _SIGNAL)
        except (
            BlockingIOError
        ):  # the launcher has not read for hours; there are enough bytes to find
            return True
        except BrokenPipeError:
            return False
        return True
