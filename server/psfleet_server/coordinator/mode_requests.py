"""Another mode that is wanted from outside: a file beside the job's logs, written by `psfleet mode`."""

import contextlib
import json
import threading
from pathlib import Path

from psfleet.errors import ConfigError
from psfleet.settings.mode_request import DONE, WISH
from psfleet.strategy import Settings
from psfleet_server.coordinator.barriers import ModeWish

__all__ = ["Wishes"]


class Wishes:
    """Looks for the file, and says when the workers have been told.

    Args:
        folder: Of the job's logs; None: nobody can wish for anything.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._seen = 0
        self._wish: ModeWish | None = None
        self._told = 0
        self._lock = threading.Lock()

    def look(self) -> ModeWish | None:
        """The last wish; one that cannot be read is none."""
        if self._folder is None:
            return None
        with self._lock:
            try:
                changed = (self._folder / WISH).stat().st_mtime_ns
                if changed != self._seen:
                    self._seen, self._wish = changed, _wish((self._folder / WISH).read_text())
            except (OSError, ValueError, KeyError, TypeError, ConfigError):
                return None
            return self._wish

    def told(self, number: int) -> None:
        """The workers have been told of the wish of this number."""
        with self._lock, contextlib.suppress(OSError):  # a full disk is no reason to fail a barrier
            if self._folder is None or self._wish is None or number == self._told:
                return
            if number == self._wish.number:
                draft = self._folder / f".{DONE}"
                draft.write_text(str(number))
                draft.replace(self._folder / DONE)
                self._told = number


def _wish(text: str) -> ModeWish:
    said = json.loads(text)
    number, part = int(said["number"]), dict(said["consistency"])
    Settings.from_parts({"consistency": part})
    mode = str(part.pop("mode"))
    return ModeWish(number, mode, tuple((str(name), int(value)) for name, value in part.items()))
