"""The file that says which servers now listen elsewhere, because a process on another machine took over."""

from collections.abc import Mapping
from pathlib import Path

from psfleet.errors import FrameError
from psfleet.formats.document import Format

__all__ = ["MOVED", "read_relocations", "write_relocations"]

MOVED = "moved.json"
"""Its name in the folder of a job's logs."""

_FORMAT = Format("moved servers")


def write_relocations(where: Path, moved: Mapping[str, str]) -> None:
    """Replace the file; `moved` has the new endpoint of each old one."""
    _FORMAT.write(where, moved=dict(moved))


def read_relocations(where: Path) -> dict[str, str]:
    """The new endpoint of each old one; empty: no server has moved, or the file is damaged."""
    try:
        (moved,) = _FORMAT.read(where, moved=dict)
    except (FileNotFoundError, FrameError):
        return {}
    return {str(old): str(new) for old, new in moved.items()}
