"""The ready file: a server says in it that it serves, and where."""

from pathlib import Path

from psfleet.formats.document import Format

__all__ = ["read_ready", "write_ready"]

_FORMAT = Format("ready server")


def write_ready(where: Path, index: int, endpoint: str, pid: int) -> None:
    """Let the file appear, whole."""
    _FORMAT.write(where, index=index, endpoint=endpoint, pid=pid)


def read_ready(where: Path) -> tuple[str, int]:
    """Endpoint and process id of the server.

    Raises:
        FileNotFoundError: The server is not ready.
        FrameError: The file is damaged or of another version.
    """
    _, endpoint, pid = _FORMAT.read(where, index=int, endpoint=str, pid=int)
    return endpoint, pid
