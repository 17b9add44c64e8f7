"""The folders of a job: that of its logs, which one job at a time has, a private one, and its snapshots."""

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


_MANIFEST = "manifest.json"  # a folder has it once everything else is there
_LAST_SNAPSHOT_TIMEOUT = 600.0  # seconds; whoever wants the end of the job usually kills it earlier
_PAUSES = (0.25, 0.5, 1.0, 2.0)
"""Seconds between attempts: one may fail, as when a worker comes or goes, or rows move to other servers."""


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
            descriptor = open_own_folder(folder)
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


def folder_of(logs: Path) -> Path:
    """Return the folder in which a job with these logs keeps its snapshots, unless it has another place."""
    return logs / "snapshots"


def place_of(store: str, name: str, logs: Path) -> str:
    """Return the folder or URL in which a job of this name keeps its snapshots; `store`: as the setting."""
    return f"{place_or_url(store).rstrip('/')}/{name}" if store else str(folder_of(logs).absolute())


def latest(logs: Path) -> str:
    """The last complete one in the folder of these logs; empty: there is none."""
    return latest_snapshot(str(folder_of(logs).absolute()))


def check_snapshot(path: str) -> str:
    """The absolute path of a snapshot; of the last one if it is a folder of several.

    Raises:
        ConfigError: There is none.
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
    """Remove what an earlier job of this name has left, up to the snapshot that is gone on from."""
    own = own_snapshots(place)
    is_own = resume in own
    for each in own:
        if not is_own or each > resume:
            remove_snapshot(each)
    if not is_own and url_of(place) is None:
        shutil.rmtree(place, ignore_errors=True)


class FinalSnapshot:
    """Asks server 0 for a snapshot, in a thread of its own.

    Args:
        environment: With what the launcher proves itself to the server.

    Attributes:
        outcome: Outcome of the snapshot, for people; empty: it is not complete yet.
    """

    def __init__(self, endpoint: str, environment: Environment) -> None:
        self.outcome = ""
        self._endpoint = endpoint
        self._environment = environment
        ServiceThread(self._take, "final snapshot").start()

    def _take(self) -> None:
        import grpc  # here: few jobs need it

        from psfleet.core.net.connections.access import Access
        from psfleet.core.net.connections.channel import error_of, open_channel
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
