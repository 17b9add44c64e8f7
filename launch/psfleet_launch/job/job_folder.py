"""Folders of a job: the folder of its logs, a private folder for sockets, and the folder of its snapshots.

Logs and snapshots stay after the job; the private folder is removed. Only one job at a time can use a
folder of logs: the launcher locks the folder, and the kernel releases the lock even if the launcher is
killed. This module also finds the snapshot that `--resume` means, and takes the last snapshot of a job that
is ended by SIGUSR1.
"""

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from psfleet.core.base.errors import CheckpointError, ConfigError
from psfleet.core.base.files import make_private_folder, open_own_folder
from psfleet.core.base.job_files import DONE, MOVED, REQUEST, SERVERS
from psfleet.core.base.object_store import is_whole, latest_snapshot, own_snapshots, remove_snapshot
from psfleet.core.base.scaling_files import SCALE, SCALE_PROMISED, SCALE_READY, SCALED
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.kinds import place_or_url, shown_url, url_of
from psfleet.core.base.threads import ServiceThread

HISTORY = "history.jsonl"
"""File with the history of the job (psfleet_launch.observability.job_history)."""

REPORT = "report.html"
"""File with the report of the job, an HTML page made from the history."""

_OWN = (
    *("serverlog.*", "workerlog.*", "server.*.log", "standby.*/server.*.log", "watch-ca.pem"),
    *(HISTORY, f".{HISTORY}.*", REPORT, SERVERS, MOVED),
    *(REQUEST, DONE, SCALE, SCALE_READY, SCALE_PROMISED, SCALED),
)
"""Patterns of the files that a job writes to its folder of logs. The next job in the folder removes them."""

_PRIVATE = 0o700  # mode of the folder while a job runs; afterwards the user may open it to others


_MANIFEST = "manifest.json"  # written last, so that a folder with it is a complete snapshot
_LAST_SNAPSHOT_TIMEOUT = (
    600.0  # seconds; a batch queue that has sent SIGUSR1 usually kills the job earlier
)
_PAUSES = (0.25, 0.5, 1.0, 2.0)
"""Seconds between attempts. A snapshot may be impossible for a short time, for example while a worker joins
or leaves or while rows move to other servers."""


@contextlib.contextmanager
def claimed(parent: Path, name: str) -> Iterator[Path]:
    """Context in which a job alone may use the folder of its logs. Yields the folder, without old files.

    Raises:
        ConfigError: The name is no name of a folder, the folder cannot be made, or another job is using it.
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ConfigError(
            f"--job is {name!r}; it names a folder: use letters, digits, '.', '_', '-'"
        )
    folder = parent / name
    with contextlib.ExitStack() as stack:
        try:
            descriptor = open_own_folder(folder)
            stack.callback(os.close, descriptor)
            if not _lock(descriptor):
                raise ConfigError(
                    f"a job is running in log folder {str(folder)!r}; choose another --job or "
                    "--log-dir, or wait for its end"
                )
            os.fchmod(
                descriptor, _PRIVATE
            )  # the user may have opened the folder of an earlier job to others
            _clear(folder)
        except OSError as error:
            raise ConfigError(
                f"log folder {str(folder)!r} cannot be used ({error.strerror}); choose "
                "another with --log-dir"
            ) from None
        yield folder


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Context with a private folder (mode 0700), which is removed at the end."""
    folder = make_private_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_claimed(folder: Path) -> bool:
    """Return whether a job is using the folder. False on file systems without locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return not _lock(descriptor, unknown=False)
    finally:
        os.close(descriptor)


def claimed_by(folder: Path) -> int | None:
    """Return the id of the process on this machine that has locked the folder, or None if there is none."""
    inode = str(folder.stat().st_ino)
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        # A line is "1: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF", where 1234 is the process id, 08:01 the
        # device and 5678 the inode. Lines with "->" are of processes that wait for the lock.
        if "FLOCK" in words and inode in (words[-3].rpartition(":")[2],) and "->" not in words:
            return int(words[-4])
    return None


def _lock(descriptor: int, unknown: bool = True) -> bool:
    """Lock an open folder until the descriptor is closed, at the latest when this process ends.

    Args:
        unknown: Result if the file system has no locks.

    Returns:
        False if another process has locked the folder.
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


def folder_of(logs: Path) -> Path:
    """Return the folder of a job's snapshots without --snapshot-store, given the folder of its logs."""
    return logs / "snapshots"


def place_of(store: str, name: str, logs: Path) -> str:
    """Return the folder or URL of a job's snapshots.

    Args:
        store: Value of --snapshot-store, or "" for the folder of the logs.
    """
    return f"{place_or_url(store).rstrip('/')}/{name}" if store else str(folder_of(logs).absolute())


def latest(logs: Path) -> str:
    """Return the path of the last complete snapshot of a job, given the folder of its logs, or "" if none."""
    return latest_snapshot(str(folder_of(logs).absolute()))


def check_snapshot(path: str) -> str:
    """Return the absolute path or the URL of the snapshot that `--resume` names.

    Args:
        path: Path or URL of a snapshot, of a folder of snapshots, or of a job's folder of logs. A folder
            means its last complete snapshot.

    Raises:
        ConfigError: There is no complete snapshot.
    """
    if (url := url_of(path)) is not None:
        try:
            snapshot = url if is_whole(url) else latest_snapshot(url)
        except CheckpointError as error:
            raise ConfigError(f"--resume is no complete snapshot: {error}") from None
        if not snapshot:
            raise ConfigError(
                f"--resume is no complete snapshot and holds none: {shown_url(url)!r}; name another one"
            )
        return snapshot
    if (Path(path) / _MANIFEST).is_file():
        return str(Path(path).absolute())
    snapshot = latest(Path(path)) or latest(Path(path).parent)
    if not snapshot:
        raise ConfigError(f"--resume is {path!r}, which is no complete snapshot and holds none")
    return snapshot


def clear(place: str, resume: str) -> None:
    """Remove snapshots of an earlier job with the same name, so that the folder has only this job's
    snapshots.

    If the job resumes from a snapshot in the folder, this snapshot and all older ones stay.

    Args:
        resume: Snapshot that this job starts from, or "".
    """
    snapshots = own_snapshots(place)
    resumes_own = resume in snapshots
    for snapshot in snapshots:
        if not resumes_own or snapshot > resume:
            remove_snapshot(snapshot)
    if not resumes_own and url_of(place) is None:
        shutil.rmtree(place, ignore_errors=True)


class FinalSnapshot:
    """Takes the last snapshot of a job that is about to end. A thread requests it from server 0, up to 5
    times.

    Args:
        endpoint: Endpoint of server 0.
        environment: Environment with the launcher's credentials for calls to servers.

    Attributes:
        outcome: Result in words for the user, or "" until the thread knows it.
    """

    def __init__(self, endpoint: str, environment: Environment) -> None:
        self.outcome = ""
        self._endpoint = endpoint
        self._environment = environment
        ServiceThread(self._take, "final snapshot").start()

    def _take(self) -> None:
        import grpc  # imported here, because few jobs need it

        from psfleet.core.net.connections.access import Access
        from psfleet.core.net.connections.channel import open_channel
        from psfleet.core.net.connections.error_statuses import error_of
        from psfleet.core.net.v1.snapshot_pb2 import TakeReply, TakeRequest

        access = Access.of(self._environment)
        request = TakeRequest(kind="full").SerializeToString()
        channel: Any
        with open_channel(self._endpoint, access) as channel:
            take = channel.unary_unary("/psfleet.v1.SnapshotCoordinator/Take")
            for pause in (*_PAUSES, None):
                try:
                    reply = take(request, timeout=_LAST_SNAPSHOT_TIMEOUT, metadata=access.metadata)
                except grpc.RpcError as error:
                    if pause is None:
                        self.outcome = f"no snapshot was taken: {error_of(error, 'server 0')}"
                    else:
                        time.sleep(pause)
                else:
                    path = TakeReply.FromString(reply).path
                    self.outcome = f"the snapshot is complete; continue with --resume {path}"
                    return
