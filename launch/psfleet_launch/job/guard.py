"""Kills the remaining processes of a job, at its end and when the launcher itself is killed.

Every process of a job has the variable PSFLEET_JOB_ID in its environment, also children that it starts.
`sweep` finds and kills all these processes.

Run as a program, this module is the *guard*: a process that waits for the end of the launcher. A launcher
that ends regularly notifies the guard before. If the launcher was killed instead, the guard kills the job's
processes and removes its private folder.

The guard runs without site packages, so this module uses the standard library only. It imports few modules,
because the start of every job waits for it.
"""

import os
import select
import signal
import sys
import time

MARKER = "PSFLEET_JOB_ID"
"""Environment variable of every process of a job. Children inherit it."""

_EXIT_TIMEOUT = 5.0  # seconds
IN_ORDER = b"."
"""Byte that a launcher sends its guard after it has cleaned up."""


def find(token: str) -> list[int]:
    """Return the ids of all processes of a job, found by the job's token in their environment."""
    marker = f"{MARKER}={token}".encode()
    return [
        pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if marker in _environment(pid)
    ]


def _environment(pid: int) -> list[bytes]:
    """Return the environment of a process, or [] if it has ended, is a zombie or belongs to another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def sweep(token: str) -> list[int]:
    """Kill every process of the job with SIGKILL, and return the ids of the killed processes.

    The search is repeated until it finds nothing, because a process may fork after it was found and before
    it is dead. A search is slow: it reads the environment of every process of the machine. So the next
    search waits until the killed processes have ended.
    """
    pids: set[int] = set()
    deadline = time.monotonic() + _EXIT_TIMEOUT
    while (processes := find(token)) and time.monotonic() < deadline:
        for handle in [_killed(pid, token) for pid in processes]:
            _await_end(handle, deadline)
        pids.update(processes)
    return sorted(pids)


def _killed(pid: int, token: str) -> int | None:
    """Kill a process of the job, and return a handle (pidfd) for it, or None if it has ended.

    The id may belong to another process by now. So this function first opens a handle, which always refers
    to the same process, and then checks the environment of the process again.
    """
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
    """Wait until the process has ended, which makes its handle readable, and close the handle."""
    if handle is None:
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll(max(0, deadline - time.monotonic()) * 1000)
    os.close(handle)


def watch(token: str, folder: str) -> None:
    """Wait until the launcher has cleaned up or died. If it died, clean up in its place.

    Args:
        folder: Private folder of the job.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.read(0, 1) != IN_ORDER:
        import shutil

        sweep(token)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(sys.argv[1], sys.argv[2])
