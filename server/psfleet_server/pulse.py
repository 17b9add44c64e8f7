"""Signs of life for whoever started this process: a byte on a pipe, a few times per second.

They say that the process runs: that it is not stopped, nor kept from every processor. Nothing of the
server's own is asked, for what takes it long is no reason to give it up. A process that ends in order
closes the pipe first: Python ends its threads long before the kernel has taken the tables' memory back.
"""

import os
import threading
from typing import Self

__all__ = ["Pulse"]

_EVERY = 0.25  # seconds


class Pulse:
    """Gives signs of life while it is entered, or until nobody listens.

    Args:
        pipe: File descriptor to write to; this object's from now on.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> Self:
        os.set_inheritable(self._pipe, False)
        os.set_blocking(self._pipe, False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while self._beat() and not self._over.wait(_EVERY):
            pass
        os.close(self._pipe)

    def _beat(self) -> bool:
        try:
            os.write(self._pipe, b".")
        except BlockingIOError:  # nobody has looked for hours; there are enough bytes to find
            return True
        except BrokenPipeError:
            return False
        return True
