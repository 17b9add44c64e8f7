"""Whether the disk of a log takes what is written, and word of it when that changes."""

import errno
import time
from collections.abc import Callable

from psfleet.errors import LogError, NoRoom

__all__ = ["PACE", "Disk"]

PACE = 0.5
"""Seconds between two tries of a server that is starting on a disk without room."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Disk:
    """The disk under a log. One thread at a time.

    Args:
        tell: Has a line said to whoever watches the job: once when there is no room, once when there is.
        clock: Seconds that only go up.
    """

    def __init__(
        self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._full_since: float | None = None

    def failed(self, what: str, error: OSError) -> LogError:
        """The error to raise: something was not written, and whatever was is taken back.

        Args:
            what: "log 'x' cannot be written".
            error: Why.
        """
        said = f"{what}: {error.strerror}; make room for it"
        if error.errno not in _FULL:
            return LogError(f"{what}: {error.strerror}; start the job anew on another disk")
        if self._full_since is None:
            self._full_since = self._clock()
            self._tell(f"{said}. Pushes wait until there is some")
        return NoRoom(said)

    def took(self, what: str) -> None:
        """Something was written."""
        if self._full_since is not None:
            seconds, self._full_since = self._clock() - self._full_since, None
            self._tell(f"{what} is written again, after {seconds:.1f} seconds without room")
