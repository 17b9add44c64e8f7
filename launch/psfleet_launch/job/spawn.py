"""Starts processes that cannot outlive the launcher, and writes their log files.

Every process has its own session. So Ctrl-C in the terminal is sent to the launcher only, and the launcher
can send a signal to a process and its children together. The kernel kills the process when the launcher
dies, and the guard, a separate process, then kills its children.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from psfleet.core.base.errors import ConfigError
from psfleet_launch.job import guard
from psfleet_launch.job.job_plan import Job, Member

_FORKS = "GRPC_ENABLE_FORK_SUPPORT"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def open_log(path: Path) -> IO[bytes]:
    """Open a new, unbuffered log file that only its owner can read, since scripts may print secrets.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.unlink(missing_ok=True)  # a file of an earlier job may be readable by others
        return open(path, "wb", buffering=0, opener=_private)  # the caller closes it
    except OSError as error:
        raise ConfigError(
            f"log file {str(path)!r} cannot be written ({error.strerror}); "
            "choose another folder with --log-dir"
        ) from None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes] | None,
    piped: bool,
    ordered: bool = False,
    kept: tuple[int, ...] = (),
) -> subprocess.Popen[bytes]:
    """Start a process in a new session. The kernel kills the process when the launcher dies.

    Call it from the main thread, because the kernel kills the process when the thread that started it ends.

    Args:
        log: File for standard output and standard error, or None with `piped`.
        piped: True if the caller reads the output from `process.stdout` and `process.stderr`.
        ordered: True if the caller writes commands to `process.stdin`.
        kept: File descriptors that the process inherits, with the same numbers.
    """
    launcher = os.getpid()
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE if ordered else subprocess.DEVNULL,
        bufsize=0,
        stdout=subprocess.PIPE if piped else log,
        stderr=subprocess.PIPE if piped else log,
        pass_fds=kept,
        start_new_session=True,
        preexec_fn=lambda: _die_with(launcher),
    )


def _die_with(launcher: int) -> None:
    """Make the kernel kill this new process when the thread that started it ends. Runs before exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the launcher died before the call above, the kernel will send no signal.
    if os.getppid() != launcher:
        os._exit(1)


def start_guard(token: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the guard of a job, which cleans up if the launcher is killed.

    The guard has its own session, and not the job's token in its environment, so that `sweep` does not kill
    it.
    """
    environment = {name: value for name, value in os.environ.items() if name != guard.MARKER}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, token, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
        cwd="/",
        start_new_session=True,
    )


def dismiss_guard(process: subprocess.Popen[bytes]) -> None:
    """Notify the guard that the launcher has cleaned up, and wait until the guard has ended."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(guard.IN_ORDER)
    process.wait()


def send(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the process and its process group, unless the process has ended."""
    # Until the launcher has waited for the process, the kernel gives its id to no other process.
    if process.returncode is None:
        os.killpg(process.pid, number)


def children_without_grpc() -> None:
    """Turn off gRPC's support for forks in this process. Call it in the main thread, before importing gRPC.

    gRPC restarts its threads in a forked process, also between `fork` and `exec`. Their files are already
    closed then, and sometimes the new process aborts (grpc/grpc#43055). The variable is set with `putenv`,
    so that only gRPC in this process sees it: children get a copy of `os.environ`, which `putenv` does not
    change.
    """
    if _FORKS not in os.environ:
        os.putenv(_FORKS, "0")


class MemberLogs:
    """Log files of the members. Each is opened when it is first used."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._files: dict[Member, IO[bytes]] = {}
        self._loses_output = False

    def open_all(self) -> None:
        """Open the logs of all servers and workers, so that an error is found before the job starts.

        Raises:
            ConfigError: A log cannot be written.
        """
        for member in (*self._job.servers, *self._job.workers):
            self.file(member)

    def file(self, member: Member) -> IO[bytes]:
        """Return the member's log, open for writing."""
        if member not in self._files:
            self._files[member] = open_log(self._job.log(member))
        return self._files[member]

    def write(self, member: Member, data: bytes) -> str:
        """Write output of a member to its log. If this fails, for example on a full disk, the job continues.

        Returns:
            Warning at the first failure of any log, else "".
        """
        log, remaining = self.file(member), memoryview(data)
        try:
            # A write may store only some of the bytes, for example when the disk becomes full. The next one
            # fails.
            while remaining:
                remaining = remaining[log.write(remaining) :]
        except OSError as error:
            if not self._loses_output:
                self._loses_output = True
                return f"log {log.name!r} cannot be written ({error.strerror}); the job goes on"
        return ""

    def close(self) -> None:
        """Close all files."""
        for log in self._files.values():
            log.close()
