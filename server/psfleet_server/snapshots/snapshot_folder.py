"""The folder in which a job keeps its own snapshots, by number."""

import shutil
from pathlib import Path

from psfleet.checkpoint import own_name, read_manifest

__all__ = ["SnapshotFolder"]


class SnapshotFolder:
    """A job's own snapshots.

    Args:
        path: Of the folder, which may not exist yet.
        keep: How many snapshots stay in it.
    """

    def __init__(self, path: Path, keep: int = 3) -> None:
        self._path = path
        self._keep = keep

    def last(self) -> int:
        """The highest number of a snapshot; 0: there is none."""
        return max((int(path.name[-6:]) for path in self._snapshots()), default=0)

    def place(self, number: int) -> Path:
        """Make room for a snapshot; its path."""
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)  # for nobody but the job's user
        for left in self._path.glob(".snapshot-*.partial"):  # of a process that died
            shutil.rmtree(left, ignore_errors=True)
        return self._path / own_name(number)

    def prune(self) -> None:
        """Remove all but the last few snapshots and what they build on."""
        snapshots = self._snapshots()
        needed = {folder for path in snapshots[-self._keep :] for folder in _chain(path)}
        for path in snapshots:
            if path.absolute() not in needed:
                shutil.rmtree(path, ignore_errors=True)

    def _snapshots(self) -> list[Path]:
        return sorted(path for path in self._path.glob("snapshot-" + 6 * "[0-9]") if path.is_dir())


def _chain(path: Path) -> list[Path]:
    """A snapshot and those that it builds on."""
    folder = path.absolute()
    found = [folder]
    while (base := read_manifest(folder).base) is not None:
        folder = (folder / base.path).resolve()
        found.append(folder)
    return found
