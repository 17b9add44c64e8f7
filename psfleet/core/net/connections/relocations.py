"""Channels that follow a server to another endpoint.

A server may move to another machine or port. The launcher writes the new endpoint to a file. One thread per
process watches the file (RelocationWatch) and reconnects the channels (RelocatingChannel). So no call has to
time out at the old endpoint first.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

import grpc

from psfleet.core.base.job_files import read_relocations
from psfleet.core.base.threads import ServiceThread

_LOOK = 0.1  # seconds between checks of the file of moved servers


class MoveObserver(Protocol):
    """Object that wants to know when servers may have moved."""

    def look(self) -> None:
        """Read the file of moved servers again. RelocationWatch calls this in its thread after a change."""


class RelocationWatch:
    """Watches the file that lists the new endpoints of moved servers (psfleet.core.base.job_files).

    A process has one watch, with one thread, for each file. The thread runs while there are observers.
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
        """Call `observer.look` after every change of the file, until `leave` is called."""
        with cls._lock:
            watch = cls._watches.get(moves)
            if watch is None:
                watch = cls._watches[moves] = cls(moves)
                watch._thread.start()
            watch._observers.add(observer)

    @classmethod
    def leave(cls, moves: Path, observer: MoveObserver) -> None:
        """Stop calling the observer that was passed to `follow`."""
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
            # Without the lock, because an observer takes a lock of its own, and may close its channel,
            # which calls `leave`.
            for observer in followers:
                observer.look()

    def _version(self) -> tuple[int, int]:
        """Return two numbers that differ once the file was replaced.

        The file is always replaced as a whole.
        """
        with contextlib.suppress(OSError):
            status = os.stat(self._moves)
            return status.st_ino, status.st_mtime_ns
        return 0, 0


class RelocatingChannel:
    """gRPC channel to a server that may move. Each call goes to the server's latest endpoint.

    When the server moves, calls in progress fail at once with CANCELLED. The old machine may be off, and
    calls to it could otherwise wait forever.

    Args:
        moves: Path of the file that lists the new endpoints of moved servers.

    Attributes:
        on_move: Called after the endpoint has changed, in any thread. Must not block.
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
        """Connect to the server's new endpoint if it has moved."""
        endpoint = self._find()
        with self._lock:
            if endpoint == self.endpoint or self._closed:
                return
            self._channel.close()
            self.endpoint, self._channel = endpoint, self._connect(endpoint)
        self.on_move()

    def unary_unary(self, *method: Any) -> Callable[..., Any]:
        """Return a callable for a unary method, as grpc.Channel does. Each call uses the present channel."""
        return lambda *call, **options: self._channel.unary_unary(*method)(*call, **options)

    def stream_stream(self, *method: Any) -> Callable[..., Any]:
        """Return a callable for a streaming method, as grpc.Channel does.

        Each call uses the present channel.
        """
        return lambda *call, **options: self._channel.stream_stream(*method)(*call, **options)

    def close(self) -> None:
        """Close the channel, as grpc.Channel does."""
        RelocationWatch.leave(self._moves, self)
        with self._lock:
            self._closed = True
            self._channel.close()

    def _find(self) -> str:
        """Return the server's present endpoint, found by following its moves from the first endpoint."""
        moves, endpoint = read_relocations(self._moves), self._first
        for _ in moves:  # at most one step per entry, even if the entries form a cycle
            endpoint = moves.get(endpoint, endpoint)
        return endpoint
