"""A snapshot while it is written: a folder beside its place, which it takes in one step when it is whole."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from psfleet.checkpoint.leftovers import beside, clear, place_of
from psfleet.checkpoint.loading import Snapshot
from psfleet.checkpoint.manifest import MANIFEST, Manifest, write_manifest
from psfleet.errors import CheckpointError
from psfleet.faults.crash_points import CrashFaults
from psfleet.platform.atomic_files import exchange, reason, sync
from psfleet.shard.shard import Shard

__all__ = ["SnapshotDraft"]


class SnapshotDraft:
    """A snapshot on its way to `path`; leaving the `with` block before `finish` removes it.

    Whoever looks at `path` finds the earlier snapshot or the whole new one, also when the process is killed
    at any moment: the two folders are exchanged in one step (renameat2). Where the system cannot
    do that, there is nothing at the path for a moment between two renames; the next save or load puts the
    earlier one back if the process died there. A path that is a symbolic link stays one: the folder
    that it leads to is replaced.

    Args:
        path: Where it is to lie.
        crashes: For tests.

    Attributes:
        folder: That its files are written into.

    Raises:
        CheckpointError: There is something else at `path`, or the folder cannot be made.
    """

    def __init__(self, path: str | Path, crashes: CrashFaults | None = None) -> None:
        self._path = str(path)
        self._crashes = crashes
        try:
            self._place = place_of(path)
            self._place.parent.mkdir(parents=True, exist_ok=True)
            clear(self._place)
            self._check_place()
            folder = beside(self._place, "partial")
            folder.mkdir()
            self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except (OSError, ValueError) as error:  # ValueError: no name of a file
            raise CheckpointError(
                f"a snapshot cannot be written to {self._path!r}: {reason(error)}; "
                "choose another folder"
            ) from None
        # Where folders have no locks, nobody takes it for left over.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.folder = str(folder)
        self._reach("began")

    def __enter__(self) -> "SnapshotDraft":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._lock)
        shutil.rmtree(self.folder, ignore_errors=True)  # what it has replaced, if it was finished

    def finish(self, manifest: Manifest, check: Callable[[Snapshot], None] | None = None) -> None:
        """Write the manifest, open the snapshot as a load or a restart will, and give it its place.

        Args:
            manifest: Of the files in the folder, each of which has been read back for its checksum.
            check: Raises what else speaks against it.

        Raises:
            CheckpointError: It cannot be opened. What was at its place is still there.
        """
        folder = Path(self.folder)
        write_manifest(folder, manifest)
        sync(folder)
        snapshot = Snapshot(folder, read_back=False)
        for index in range(len(manifest.files)):
            Shard().become(snapshot.server(index).shard)
        if check is not None:
            check(snapshot)
        self._reach("unnamed")
        self._check_place()
        self._take_place(folder)
        self._reach("named")
        sync(self._place.parent)

    def _take_place(self, folder: Path) -> None:
        place = self._place
        if not place.exists():
            folder.rename(place)
            return
        if exchange(folder, place):
            return
        old = beside(place, "old")
        place.rename(old)
        self._reach("away")
        folder.rename(place)
        old.rename(folder)

    def _check_place(self) -> None:
        place = self._place
        if place.exists() and not (place / MANIFEST).exists() and any(place.iterdir()):
            raise CheckpointError(
                f"{self._path!r} exists and is not a checkpoint; choose another folder"
            )

    def _reach(self, point: str) -> None:
        if self._crashes is not None:
            self._crashes.reach(point)
