"""The snapshots that a job keeps, and the one that it takes when it must end soon."""

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

from psfleet.errors import CheckpointError, ConfigError
from psfleet.platform.object_store import is_whole, latest_snapshot, own_snapshots, remove_snapshot
from psfleet.platform.threads import ServiceThread
from psfleet.settings.environment import Environment
from psfleet.settings.kinds import place_or_url, shown_url, url_of

_MANIFEST = "manifest.json"  # a folder has it once everything else is there


def folder_of(logs: Path) -> Path:
    """Return the folder in which a job with these logs keeps its snapshots, unless it has another place."""
    return logs / "snapshots"


def place_of(store: str, name: str, logs: Path) -> str:
    """Return the folder or URL in which a job of this name keeps its snapshots; `store`: as the setting."""
    return f"{place_or_url(store).rstrip('/')}/{name}" if store else str(folder_of(logs).absolute())


def latest(logs: Path) -> str:
    """The last complete one in the folder of these logs; empty: there is none."""
    return latest_snapshot(str(folder_of(logs).absolute()))


def age(place: str) -> float | None:
    """Seconds since the last snapshot was complete; None: there is none on this machine."""
    with contextlib.suppress(OSError):  # it makes room for the next one just now
        if url_of(place) is None and (snapshot := latest_snapshot(place)):
            return max(time.time() - (Path(snapshot) / _MANIFEST).stat().st_mtime, 0.0)
    return None


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


_LAST_SNAPSHOT_TIMEOUT = 600.0  # seconds; whoever wants the end of the job usually kills it earlier
_PAUSES = (0.25, 0.5, 1.0, 2.0)
"""Seconds between attempts: one may fail, as when a worker comes or goes, or rows move to other servers."""


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

        from psfleet.wire.connections.access import Access
        from psfleet.wire.connections.channel import open_channel
        from psfleet.wire.connections.error_status import error_of
        from psfleet.wire.v1.snapshot_pb2 import TakeReply, TakeRequest

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
