"""One thread per process that sees when servers have moved, so that no call waits for where one was."""

import contextlib
import os
import threading
import weakref
from pathlib import Path
from typing import ClassVar, Protocol

from psfleet.platform.service_thread import ServiceThread

__all__ = ["Follower", "RelocationWatch"]

_LOOK = 0.1  # seconds


class Follower(Protocol):
    """Who wants to know of moves."""

    def look(self) -> None:
        """The file has changed."""


class RelocationWatch:
    """Looks at a file of psfleet.formats.relocations; its thread lives while somebody follows.

    Args:
        moves: The file.
    """

    _watches: ClassVar[dict[Path, "RelocationWatch"]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, moves: Path) -> None:
        self._moves = moves
        self._seen = self._version()
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._over = threading.Event()
        self._thread = ServiceThread(self._run, "moved servers")

    @classmethod
    def follow(cls, moves: Path, follower: Follower) -> None:
        """Call `follower.look` after every change of the file, until `leave`."""
        with cls._lock:
            watch = cls._watches.get(moves)
            if watch is None:
                watch = cls._watches[moves] = cls(moves)
                watch._thread.start()
            watch._followers.add(follower)

    @classmethod
    def leave(cls, moves: Path, follower: Follower) -> None:
        """Call it no more."""
        with cls._lock:
            watch = cls._watches.get(moves)
            if watch is None:
                return
            watch._followers.discard(follower)
            if not watch._followers:
                del cls._watches[moves]
                watch._over.set()

    def _run(self) -> None:
        while not self._over.wait(_LOOK):
            now = self._version()
            if now == self._seen:
                continue
            self._seen = now
            with self._lock:
                followers = list(self._followers)
            for follower in followers:
                follower.look()

    def _version(self) -> tuple[int, int]:
        """Of the file, which is replaced as a whole."""
        with contextlib.suppress(OSError):
            found = os.stat(self._moves)
            return found.st_ino, found.st_mtime_ns
        return 0, 0
