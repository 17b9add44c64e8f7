"""A channel to a server that may move to another machine."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from psfleet.formats.relocations import read_relocations
from psfleet.wire.relocation_watch import RelocationWatch

__all__ = ["RelocatingChannel"]


class RelocatingChannel:
    """Calls go to where the server was found last.

    When the server moves, calls under way end at once with CANCELLED: the machine on which it was may be off,
    and then nobody would end them.

    Args:
        endpoint: Where the server listened at first.
        moves: The file of psfleet.formats.relocations.
        connect: Opens a channel to an endpoint.

    Attributes:
        endpoint: Where calls go.
        on_move: Called in any thread when that has changed; must not block.
    """

    def __init__(self, endpoint: str, moves: Path, connect: Callable[[str], grpc.Channel]) -> None:
        self._first = endpoint
        self._moves = moves
        self._connect = connect
        self._lock = threading.Lock()
        self._closed = False
        self.on_move: Callable[[], None] = lambda: None
        RelocationWatch.follow(moves, self)
        self.endpoint = self._find()
        self._channel = connect(self.endpoint)

    def look(self) -> None:
        """Connect anew if the server has moved."""
        found = self._find()
        with self._lock:
            if found == self.endpoint or self._closed:
                return
            self._channel.close()
            self.endpoint, self._channel = found, self._connect(found)
        self.on_move()

    def unary_unary(self, *method: Any) -> Callable[..., Any]:
        """As of grpc.Channel."""
        return lambda *call, **more: self._channel.unary_unary(*method)(*call, **more)

    def stream_stream(self, *method: Any) -> Callable[..., Any]:
        """As of grpc.Channel."""
        return lambda *call, **more: self._channel.stream_stream(*method)(*call, **more)

    def close(self) -> None:
        """As of grpc.Channel."""
        RelocationWatch.leave(self._moves, self)
        with self._lock:
            self._closed = True
            self._channel.close()

    def _find(self) -> str:
        """Where the server is now."""
        moved, found = read_relocations(self._moves), self._first
        for _ in moved:  # one step for each time that it has moved
            found = moved.get(found, found)
        return found
