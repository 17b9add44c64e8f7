"""Lines for the log that strangers can cause: one a second, so that they do not fill the disk."""

import threading
import time

from psfleet.platform.logs import log_of

_log = log_of(__name__)

_QUIET = 1.0  # seconds between two lines


class RateLimitedLog:
    """Logs a line as a warning, unless it logged one just now. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said_at = float("-inf")
        self._unsaid = 0

    def say(self, line: str) -> None:
        """Log the line, with the number of lines that were left out since the last one."""
        with self._lock:
            now = time.monotonic()
            if now - self._said_at < _QUIET:
                self._unsaid += 1
                return
            more = f" (and {self._unsaid} more)" if self._unsaid else ""
            self._said_at, self._unsaid = now, 0
        _log.warning(line + more)
