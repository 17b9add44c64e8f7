"""Files that are on the disk when a function returns, whatever becomes of the machine then."""

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["reason", "replace", "sync", "write_durably"]


def replace(where: Path, write: Callable[[Path], object]) -> None:
    """Make a file appear whole: whoever looks sees the old one, or all of the new one.

    Args:
        where: The file.
        write: Writes to the path that it is given, in the same folder.
    """
    temporary = where.with_name(f".{where.name}.{os.getpid()}")
    try:
        write(temporary)
        sync(temporary)
        temporary.replace(where)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(where.absolute().parent)


def write_durably(where: Path, content: bytes) -> None:
    """Write a file in place."""
    where.write_bytes(content)
    sync(where)


def sync(where: Path) -> None:
    """See that a file or a folder is on the disk."""
    handle = os.open(where, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def reason(error: Exception) -> str:
    """Why a file cannot be had, for a sentence. A ValueError says that the path is no name of a file."""
    return str(getattr(error, "strerror", None) or error)
