"""What a test has left behind: threads and child processes."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from psfleet.fleet.testing.server_thread import ServerThread

_OF_CALLS = (
    "rpc_",
    "http2 connection",
    "http2 sending",
)  # threads that a server starts when it is called
_LOOK = 0.01  # seconds between looks


def children() -> set[str]:
    """Process ids of this process's children, zombies included (Linux)."""
    listed: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            listed.update((task / "children").read_text().split())
    return listed


def _started(since: float) -> set[str]:
    """Children that have started since this second after boot.

    A list of children may lack one whose starting thread ends meanwhile, so the one of before is not enough.
    """
    processes = set()
    for child in children():
        with contextlib.suppress(FileNotFoundError):  # it has been awaited
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            if int(fields[19]) / os.sysconf("SC_CLK_TCK") >= since:
                processes.add(child)
    return processes


def _threads() -> set[threading.Thread]:
    """The threads of this process, without the one that pyzmq keeps from its first large message on."""
    return {
        each for each in threading.enumerate() if type(each).__name__ != "GarbageCollectorThread"
    }


def _left(before: set[threading.Thread]) -> set[threading.Thread]:
    """The new threads, without those of calls to a fleet that tests share, which checks its end itself."""
    left = _threads() - before
    if any(isinstance(each, ServerThread) for each in before):
        left = {each for each in left if not each.name.startswith(_OF_CALLS)}
    return left


@contextlib.contextmanager
def nothing_left(within: float = 60.0) -> Iterator[None]:
    """Check that what was started inside has ended, or ends `within` seconds.

    Raises:
        AssertionError: A thread or a child process is left; the text says which.
    """
    threads, processes = _threads(), children()
    began = time.clock_gettime(time.CLOCK_BOOTTIME) - 0.02  # the kernel counts by hundredths
    yield
    deadline = time.monotonic() + within
    while True:
        left = [*_left(threads), *(_started(began) - processes)]
        if not left:
            return
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(_LOOK)
