"""The snapshots that a job keeps: server 0 writes them, the launcher starts a job from one."""

import contextlib
import shutil
import time
from pathlib import Path

from psfleet.errors import ConfigError

__all__ = ["age", "check_snapshot", "clear", "folder_of", "latest"]

_MANIFEST = "manifest.json"  # a folder has it once everything else is there


def folder_of(logs: Path) -> Path:
    """Where a job with these logs keeps its snapshots."""
    return logs / "snapshots"


def latest(logs: Path) -> str:
    """The last complete one; empty: there is none."""
    complete = [path for path in _own(logs) if (path / _MANIFEST).is_file()]
    return str(max(complete).absolute()) if complete else ""


def age(logs: Path) -> float | None:
    """Seconds since the last snapshot was complete; None: there is none on this machine."""
    with contextlib.suppress(OSError):  # it makes room for the next one just now
        if found := latest(logs):
            return max(time.time() - (Path(found) / _MANIFEST).stat().st_mtime, 0.0)
    return None


def check_snapshot(path: str) -> str:
    """The absolute path of a snapshot; of the last one if it is a folder of several.

    Raises:
        ConfigError: There is none.
    """
    if (Path(path) / _MANIFEST).is_file():
        return str(Path(path).absolute())
    found = latest(Path(path)) or latest(Path(path).parent)
    if not found:
        raise ConfigError(f"--resume is {path!r}, which is no complete snapshot and holds none")
    return found


def clear(logs: Path, resume: str) -> None:
    """Remove what an earlier job of this name has left, up to the snapshot that is gone on from."""
    own = [path.absolute() for path in _own(logs)]
    if not resume or Path(resume) not in own:
        shutil.rmtree(folder_of(logs), ignore_errors=True)
        return
    for path in own:
        if path > Path(resume):
            shutil.rmtree(path, ignore_errors=True)


def _own(logs: Path) -> list[Path]:
    return sorted(folder_of(logs).glob("snapshot-[0-9][0-9][0-9][0-9][0-9][0-9]"))
