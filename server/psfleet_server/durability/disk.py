"""Whether the disk of a log takes what is written, and word of it when that changes."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from psfleet.errors import LogError, NoRoom

__all__ = ["PACE", "LogDisk"]

PACE = 0.5
"""Seconds between two tries of a server that is starting on a disk without room."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LogDisk:
    """The disk under a log. One thread at a time.

    Args:
        tell: Shows a line on the console: once when there is no room, once when there is.
        clock: Seconds that only go up.
    """

    def __init__(
        self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._full_since: float | None = None
        self._wanted = 0  # bytes for which there was no room

    def failed(self, what: str, error: OSError, size: int) -> LogError:
        """The error to raise: something was not written, and whatever was is taken back.

        Args:
            what: "log 'x' cannot be written".
            error: Why.
            size: Of it in bytes.
        """
        said = f"{what}: {error.strerror}; make room for it"
        if error.errno not in _FULL:
            return LogError(f"{what}: {error.strerror}; start the job anew on another disk")
        if self._full_since is None:
            self._full_since = self._clock()
            self._tell(f"{said}. Pushes wait until there is some")
        self._wanted = max(self._wanted, size)
        return NoRoom(said)

    def took(self, what: str, file: Path) -> None:
        """Something was written to the file. A little may fit where more does not: that is not the end."""
        if self._full_since is None:
            return
        free = os.statvfs(file)
        if free.f_bavail * free.f_frsize > self._wanted:
            self._wanted = 0
            seconds, self._full_since = self._clock() - self._full_since, None
            self._tell(f"{what} can be written again, after {seconds:.1f} seconds without room")
