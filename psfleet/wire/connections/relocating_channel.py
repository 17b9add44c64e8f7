"""One thread per process that sees when servers have moved, so that no call waits for where one was."""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

import grpc

from psfleet.formats import read_relocations
from psfleet.platform.threads import ServiceThread

_LOOK = 0.1  # seconds


class MoveObserver(Protocol):
    """Observer of moves."""

    def look(self) -> None:
        """Take note that the file has changed."""


class RelocationWatch:
    """Looks at a file of psfleet.formats; its thread runs while there are observers.

    Args:
        moves: The file.
    """

    _watches: ClassVar[dict[Path, "RelocationWatch"]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, moves: Path) -> None:
        self._moves = moves
        self._seen = self._version()
        self._observers: weakref.WeakSet[MoveObserver] = weakref.WeakSet()
        self._over = threading.Event()
        self._thread = ServiceThread(self._run, "moved servers")

    @classmethod
    def follow(cls, moves: Path, observer: MoveObserver) -> None:
        """Call `observer.look` after every change of the file, until `leave`."""
        with cls._lock:
            watch = cls._watches.get(moves)
            if watch is None:
                watch = cls._watches[moves] = cls(moves)
                watch._thread.start()
            watch._observers.add(observer)

    @classmethod
    def leave(cls, moves: Path, observer: MoveObserver) -> None:
        """Call it no more."""
        with cls._lock:
            watch = cls._watches.get(moves)
            if watch is None:
                return
            watch._observers.discard(observer)
            if not watch._observers:
                del cls._watches[moves]
                watch._over.set()

    def _run(self) -> None:
        while not self._over.wait(_LOOK):
            now = self._version()
            if now == self._seen:
                continue
            self._seen = now
            with self._lock:
                followers = list(self._observers)
            for observer in followers:
                observer.look()

    def _version(self) -> tuple[int, int]:
        """Return the version of the file, which is replaced as a whole."""
        with contextlib.suppress(OSError):
            status = os.stat(self._moves)
            return status.st_ino, status.st_mtime_ns
        return 0, 0


class RelocatingChannel:
    """Calls go to where the server was found last.

    When the server moves, calls under way end at once with CANCELLED: the machine on which it was may be off,
    and then they would never end.

    Args:
        endpoint: Endpoint at which the server listened at first.
        moves: The file of psfleet.formats.
        connect: Opens a channel to an endpoint.

    Attributes:
        endpoint: Endpoint to which calls go.
        on_move: Called in any thread when that has changed; must not block.
    """

    def __init__(self, endpoint: str, moves: Path, connect: Callable[[str], grpc.Channel]) -> None:
        self._first = endpoint
        self._moves = moves
        self._connect = connect
        self._lock = threading.Lock()
        self._closed = False
        self.on_move: Callable[[], None] = lambda: None
        self.endpoint = self._find()
        self._channel = connect(self.endpoint)
        RelocationWatch.follow(moves, self)
        self.look()  # the server may have moved before the watch began

    def look(self) -> None:
        """Connect anew if the server has moved."""
        endpoint = self._find()
        with self._lock:
            if endpoint == self.endpoint or self._closed:
                return
            self._channel.close()
            self.endpoint, self._channel = endpoint, self._connect(endpoint)
        self.on_move()

    def unary_unary(self, *method: Any) -> Callable[..., Any]:
        """Return a method, as grpc.Channel does."""
        return lambda *call, **more: self._channel.unary_unary(*method)(*call, **more)

    def stream_stream(self, *method: Any) -> Callable[..., Any]:
        """Return a method, as grpc.Channel does."""
        return lambda *call, **more: self._channel.stream_stream(*method)(*call, **more)

    def close(self) -> None:
        """Close the channel, as grpc.Channel does."""
        RelocationWatch.leave(self._moves, self)
        with self._lock:
            self._closed = True
            self._channel.close()

    def _find(self) -> str:
        """Return the present endpoint of the server."""
        moves, endpoint = read_relocations(self._moves), self._first
        for _ in moves:  # one step for each time that it has moved
            endpoint = moves.get(endpoint, endpoint)
        return endpoint
