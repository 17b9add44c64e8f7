"""Signs of life for whoever started this process: a byte on a pipe, a few times per second.

They say that the process runs: that it is not stopped, nor kept from every processor. Nothing of the
server's own is asked, for what takes it long is no reason to give it up.
"""

import os
import threading
import time

__all__ = ["Pulse"]

_EVERY = 0.25  # seconds


class Pulse:
    """Gives signs of life until nobody listens.

    Args:
        pipe: File descriptor to write to; this object's from now on.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def start(self) -> None:
        """Begin; the thread ends with the process."""
        os.set_inheritable(self._pipe, False)
        os.set_blocking(self._pipe, False)
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def _run(self) -> None:
        while self._beat():
            time.sleep(_EVERY)
        os.close(self._pipe)

    def _beat(self) -> bool:
        try:
            os.write(self._pipe, b".")
        except BlockingIOError:  # nobody has looked for hours; there are enough bytes to find
            return True
        except BrokenPipeError:
            return False
        return True
