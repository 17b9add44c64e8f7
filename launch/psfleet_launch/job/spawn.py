"""Start of a job's process and of its guard, and the files of what they write."""

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
    """The file, empty and unbuffered; for its owner only, since scripts print what they like.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        path.unlink(missing_ok=True)  # an earlier one may have been open to others
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
    """Start a process in a session of its own; call from the main thread.

    Args:
        log: Takes its standard output and errors.
        piped: Leave both to the caller, as `process.stdout` and `process.stderr`.
        ordered: It takes orders on its standard input, `process.stdin`.
        kept: File descriptors that it gets, with the same numbers.
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
    """In the new process: have the kernel kill it when the thread that started it is gone."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # gone before the kernel knew
        os._exit(1)


def start_guard(token: str, folder: Path) -> subprocess.Popen[bytes]:
    """The guard of a job, waiting. It runs outside the job: in a session of its own, unmarked."""
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
    """Send the guard word that the launcher has cleared up, and wait for its end."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(guard.IN_ORDER)
    process.wait()


def send(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the process and to all of its group, unless it has ended."""
    if process.returncode is None:  # not reaped, so the id is still this group's
        os.killpg(process.pid, number)


def children_without_grpc() -> None:
    """Keep gRPC out of forks of this process; call from the main thread, before gRPC is imported.

    It starts its threads again in a fork, also between `fork` and `exec`, where their files are closed
    already: now and then the new process aborts (grpc/grpc#43055). The launcher's children get
    `os.environ`, which `putenv` leaves alone.
    """
    if _FORKS not in os.environ:
        os.putenv(_FORKS, "0")


class MemberLogs:
    """One file per member, opened when it is first used."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._files: dict[Member, IO[bytes]] = {}
        self._loses_output = False

    def open_all(self) -> None:
        """Open those of all seats.

        Raises:
            ConfigError: One cannot be written.
        """
        for member in (*self._job.servers, *self._job.workers):
            self.file(member)

    def file(self, member: Member) -> IO[bytes]:
        """The member's log, open for writing."""
        if member not in self._files:
            self._files[member] = open_log(self._job.log(member))
        return self._files[member]

    def write(self, member: Member, data: bytes) -> str:
        """Write output of a member; if its log takes no more, as on a full disk, the job goes on.

        Returns:
            What to say of that, the first time; else nothing.
        """
        log, rest = self.file(member), memoryview(data)
        try:
            # A log that becomes full takes the first bytes and refuses those after them.
            while rest:
                rest = rest[log.write(rest) :]
        except OSError as error:
            if not self._loses_output:
                self._loses_output = True
                return f"log {log.name!r} cannot be written ({error.strerror}); the job goes on"
        return ""

    def close(self) -> None:
        """Close all files."""
        for log in self._files.values():
            log.close()
