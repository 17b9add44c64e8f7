"""What a save leaves beside its place when its process is killed, and what becomes of that.

    .model.<process>.<random>.partial    written, and not at its place: removed by the next save
    .model.<process>.<random>.old        moved away, only where two folders cannot be exchanged: removed, or
                                         put back by the next save or load if nothing has taken its place

A folder is left over when nobody holds a lock on it: the kernel takes that back from a process that dies.
"""

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from psfleet.platform.atomic_files import sync

__all__ = ["beside", "clear", "place_of", "put_back"]


def place_of(path: str | Path) -> Path:
    """Where the folder at `path` lies: behind all symbolic links, of which the last may lead nowhere yet.

    Raises:
        OSError: The links lead round in a circle.
    """
    place = Path(os.path.realpath(path))
    place.is_symlink() and os.stat(place)  # says that there is a circle
    return place


def beside(place: Path, kind: str) -> Path:
    """A name that nothing has, for a folder that is to come to `place` or was there."""
    return place.with_name(f".{place.name}.{os.getpid()}.{secrets.token_hex(4)}.{kind}")


def put_back(place: Path) -> bool:
    """Put back what was moved away from a place where nothing is; whether there was something."""
    for old in [] if place.exists() else _found(place, "old"):
        with contextlib.suppress(OSError):  # another process is faster, or may not write here
            old.rename(place)
            sync(place.parent)
            return True
    return False


def clear(place: Path) -> None:
    """Remove what dead processes have left beside a place."""
    put_back(place)
    for folder in (*_found(place, "partial"), *_found(place, "old")):
        with contextlib.suppress(OSError), _locked(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _found(place: Path, kind: str) -> list[Path]:
    pattern = f".{glob.escape(place.name)}.*.{kind}"
    return sorted(path for path in place.parent.glob(pattern) if path.is_dir())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Within, this process has the folder; an OSError says that another one has."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
