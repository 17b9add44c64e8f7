"""The folders of a job: that of its logs, which one job at a time has, and a private one."""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from psfleet.errors import ConfigError
from psfleet.formats import (
    DONE,
    MOVED,
    REQUEST,
    SCALE,
    SCALE_PROMISED,
    SCALE_READY,
    SCALED,
    SERVERS,
)
from psfleet.platform.sockets import make_private_folder

HISTORY = "history.jsonl"
"""History of the job, see psfleet_launch.observability.job_history."""

REPORT = "report.html"
"""The same for people."""

_OWN = (
    *("serverlog.*", "workerlog.*", "server.*.log", "standby.*/server.*.log", "watch-ca.pem"),
    *(HISTORY, f".{HISTORY}.*", REPORT, SERVERS, MOVED),
    *(REQUEST, DONE, SCALE, SCALE_READY, SCALE_PROMISED, SCALED),
)
"""Files of a job in the folder of its logs."""

_PRIVATE = 0o700  # the user may open logs and snapshots to others when the job is over


@contextlib.contextmanager
def claimed(parent: Path, name: str) -> Iterator[Path]:
    """A job's folder, without the logs of an earlier job of this name, for this job alone.

    Raises:
        ConfigError: The name is none for a folder, it cannot be made, or a job is running in it.
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ConfigError(
            f"--job is {name!r}; it names a folder: use letters, digits, '.', '_', '-'"
        )
    folder = parent / name
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            if not _lock(descriptor):
                raise ConfigError(
                    f"a job is running in log folder {str(folder)!r}; choose another --job or "
                    "--log-dir, or wait for its end"
                )
            os.fchmod(descriptor, _PRIVATE)  # that of an earlier job may have been open to others
            _clear(folder)
        except OSError as error:
            raise ConfigError(
                f"log folder {str(folder)!r} cannot be used ({error.strerror}); choose "
                "another with --log-dir"
            ) from None
        yield folder


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Make a private folder as make_private_folder does, and remove it at the end."""
    folder = make_private_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_claimed(folder: Path) -> bool:
    """Return whether a job runs in the folder, as far as its file system shows."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return not _lock(descriptor, unknown=False)
    finally:
        os.close(descriptor)


def claimed_by(folder: Path) -> int | None:
    """The process on this machine that holds the folder; None: there is none."""
    inode = str(folder.stat().st_ino)
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if "FLOCK" in words and inode in (words[-3].rpartition(":")[2],) and "->" not in words:
            return int(words[-4])
    return None


def _lock(descriptor: int, unknown: bool = True) -> bool:
    """Lock what is open until it is closed, as by the death of this process; False: it is locked.

    `unknown` is the answer where the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return unknown
    return True


def _clear(folder: Path) -> None:
    for pattern in _OWN:
        for old in folder.glob(pattern):
            old.unlink()
