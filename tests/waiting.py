"""Wait for conditions, never for a time."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

_LOOK = 0.01  # seconds between looks
_PATIENCE = 120.0  # seconds; a loaded machine may be slow


def until(
    holds: Callable[[], object], what: Callable[[], object] | str = "", every: float = _LOOK
) -> None:
    """Return once the condition holds.

    Args:
        what: What the error says that was found or awaited.
        every: Seconds between looks at first; they become rarer, so that a long wait costs little.
    """
    began = time.monotonic()
    while not holds():
        waited = time.monotonic() - began
        assert waited < _PATIENCE, what() if callable(what) else f"no {what}"
        time.sleep(max(every, min(waited / 20, 5 * _LOOK)))


def pause(process: "subprocess.Popen[Any]") -> None:
    """Stop a child process and return once all its threads have stopped.

    SIGSTOP alone is not enough: until the kernel has told them, they go on for some milliseconds.
    """
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
