"""Ends what is left of a job: at its end, and when the launcher itself is killed.

Run as a program it is the guard: a process that waits until the launcher is gone. A launcher that
ends in order says so first; one that was killed cannot, and then the guard clears up in its place.
Standard library only: the guard is started without the packages of the environment. It imports little, for
each job waits until it has started.
"""

import os
import select
import signal
import sys
import time

MARKER = "PSFLEET_JOB_ID"
"""Environment variable that every process of a job carries, and its children inherit."""

_EXIT_TIMEOUT = 5.0
IN_ORDER = b"."
"""What a launcher writes to its guard that has cleared up."""


def find(token: str) -> list[int]:
    """Process ids of all living processes whose environment carries the marker with `token`."""
    marker = f"{MARKER}={token}".encode()
    return [
        pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if marker in _environment(pid)
    ]


def _environment(pid: int) -> list[bytes]:
    """A process that has ended, a zombie or another user's: empty."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def sweep(token: str, patience: float = _EXIT_TIMEOUT) -> list[int]:
    """SIGKILL every process of the job until none is found; the ids of those that were left.

    Repeated, because a process may have forked between the look and the blow. A look reads the environment of
    every process of the machine, so the next one waits until those that were killed have ended.
    """
    pids: set[int] = set()
    deadline = time.monotonic() + patience
    while (processes := find(token)) and time.monotonic() < deadline:
        for handle in [_killed(pid, token) for pid in processes]:
            _await_end(handle, deadline)
        pids.update(processes)
    return sorted(pids)


def _killed(pid: int, token: str) -> int | None:
    """Kill the process if the id still means it: a handle first, then a second look. Its handle, or None."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if f"{MARKER}={token}".encode() in _environment(pid):
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        else:
            return handle
    os.close(handle)
    return None


def _await_end(handle: int | None, deadline: float) -> None:
    """Wait until the process has ended, which makes its handle readable, and close that."""
    if handle is None:
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll(max(0, deadline - time.monotonic()) * 1000)
    os.close(handle)


def watch(token: str, folder: str) -> None:
    """Wait for the launcher's word or end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.read(0, 1) != IN_ORDER:
        import shutil

        sweep(token)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(sys.argv[1], sys.argv[2])
