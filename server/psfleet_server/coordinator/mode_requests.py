"""Another mode that is wanted from outside: a file beside the job's logs, written by `psfleet mode`."""

import contextlib
import threading
from pathlib import Path

from psfleet.formats.mode_request import WISH, read_request, write_answer
from psfleet.platform.notices import say
from psfleet.strategy import Settings
from psfleet_server.coordinator.barriers import ModeRequest

__all__ = ["ModeRequestFile"]


class ModeRequestFile:
    """Looks for the file, and says when the workers have been told.

    Args:
        folder: The job's folder; None: there are no mode requests.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._seen = 0
        self._wish: ModeRequest | None = None
        self._told = 0
        self._lock = threading.Lock()

    def look(self) -> ModeRequest | None:
        """Return the last mode request; ignore one that cannot be read, with a line in the log."""
        if self._folder is None:
            return None
        with self._lock:
            try:
                changed = (self._folder / WISH).stat().st_mtime_ns
                if changed != self._seen:
                    self._seen, self._wish = changed, None
                    self._wish = _wish(self._folder)
            except FileNotFoundError:
                return None
            except (OSError, ValueError) as error:  # as are all errors of what it says
                say(f"the mode request is ignored: {error}")
            return self._wish

    def told(self, number: int) -> None:
        """Record that workers know the mode request of this number."""
        with self._lock, contextlib.suppress(OSError):  # a full disk is no reason to fail a barrier
            if self._folder is None or self._wish is None or number == self._told:
                return
            if number == self._wish.number:
                write_answer(self._folder, number)
                self._told = number


def _wish(folder: Path) -> ModeRequest:
    number, part = read_request(folder)
    Settings.from_parts({"consistency": part})
    mode = str(part.pop("mode"))
    return ModeRequest(number, mode, tuple((str(name), int(value)) for name, value in part.items()))
