"""What a test has left behind: threads and child processes."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["children", "nothing_left"]

_LOOK = 0.01  # seconds between looks


def children() -> set[str]:
    """Process ids of this process's children, zombies included (Linux)."""
    listed: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            listed.update((task / "children").read_text().split())
    return listed


def _threads() -> set[threading.Thread]:
    """The threads of this process, without the one that pyzmq keeps from its first large message on."""
    return {
        each for each in threading.enumerate() if type(each).__name__ != "GarbageCollectorThread"
    }


@contextlib.contextmanager
def nothing_left(within: float = 60.0) -> Iterator[None]:
    """Check that what was started inside has ended, or ends `within` seconds.

    Raises:
        AssertionError: A thread or a child process is left; the text says which.
    """
    threads, processes = _threads(), children()
    yield
    deadline = time.monotonic() + within
    while True:
        left = [*(_threads() - threads), *(children() - processes)]
        if not left:
            return
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(_LOOK)
