"""Another mode that is wanted from outside: a file beside the job's logs, written by `psfleet mode`."""

import contextlib
import threading
from pathlib import Path

from psfleet.formats import REQUEST, read_request, write_reply
from psfleet.platform.logs import log_of
from psfleet.strategy import Settings
from psfleet_server.coordinator.barriers import ModeRequest

_log = log_of(__name__)


class ModeRequestFile:
    """Reads the file, and confirms that the workers have received the request.

    Args:
        folder: The job's folder; None: there are no mode requests.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._seen = 0
        self._mode_request: ModeRequest | None = None
        self._told = 0
        self._lock = threading.Lock()

    def look(self) -> ModeRequest | None:
        """Return the last mode request; ignore one that cannot be read, with a line in the log."""
        if self._folder is None:
            return None
        with self._lock:
            try:
                changed = (self._folder / REQUEST).stat().st_mtime_ns
                if changed != self._seen:
                    self._seen, self._mode_request = changed, None
                    self._mode_request = _mode_request(self._folder)
            except FileNotFoundError:
                return None
            except (OSError, ValueError) as error:  # as are all errors of what it says
                _log.warning(f"the mode request is ignored: {error}")
            return self._mode_request

    def told(self, number: int) -> None:
        """Record that workers know the mode request of this number."""
        with self._lock, contextlib.suppress(OSError):  # a full disk is no reason to fail a barrier
            if self._folder is None or self._mode_request is None or number == self._told:
                return
            if number == self._mode_request.number:
                write_reply(self._folder, number)
                self._told = number


def _mode_request(folder: Path) -> ModeRequest:
    number, part = read_request(folder)
    Settings.from_parts({"consistency": part})
    mode = str(part.pop("mode"))
    return ModeRequest(number, mode, tuple((str(name), int(value)) for name, value in part.items()))
