"""Ends what is left of a job: at its end, and when the launcher itself is killed.

Run as a program it is the guard: a process that waits until the launcher is gone. A launcher that
ends in order says so first; one that was killed cannot, and then the guard clears up in its place.
Standard library only: the guard is started without the packages of the environment.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARKER = "PSFLEET_JOB_ID"
"""Environment variable that every process of a job carries, and its children inherit."""

_EXIT_TIMEOUT = 5.0
_IN_ORDER = b"."


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
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def sweep(token: str, patience: float = _EXIT_TIMEOUT) -> list[int]:
    """SIGKILL every process of the job until none is found; the ids of those that were left.

    Repeated, because a process may have forked between the look and the blow.
    """
    pids: set[int] = set()
    deadline = time.monotonic() + patience
    while (processes := find(token)) and time.monotonic() < deadline:
        for pid in processes:
            _kill(pid, token)
        pids.update(processes)
        time.sleep(0.01)
    return sorted(pids)


def _kill(pid: int, token: str) -> None:
    """Kill the process if the id still means it: a handle first, then a second look."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        handle = os.pidfd_open(pid)
        try:
            if f"{MARKER}={token}".encode() in _environment(pid):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def start(token: str, folder: Path) -> subprocess.Popen[bytes]:
    """The guard of a job, waiting. It runs outside the job: in a session of its own, unmarked."""
    environment = {name: value for name, value in os.environ.items() if name != MARKER}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, token, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
        cwd="/",
        start_new_session=True,
    )


def dismiss(guard: subprocess.Popen[bytes]) -> None:
    """Send the guard word that the launcher has cleared up, and wait for its end."""
    assert guard.stdin is not None
    with contextlib.suppress(BrokenPipeError), guard.stdin:
        guard.stdin.write(_IN_ORDER)
    guard.wait()


def watch(token: str, folder: str) -> None:
    """Wait for the launcher's word or end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.read(0, 1) != _IN_ORDER:
        sweep(token)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(sys.argv[1], sys.argv[2])
