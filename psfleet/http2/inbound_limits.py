"""Calls that wait for their message: few of each connection, and few of all connections together."""

import threading
import time
from collections.abc import Hashable
from typing import Any

from psfleet.errors import LimitExceeded

_IN_ALL = 256


class InboundMessages:
    """Counts the calls of a server whose message is on its way. Any thread may call.

    Args:
        each: Messages that may be on their way over one connection.
        in_all: Over all connections. When there are so many, a call of a connection with fewer takes the
            place of the oldest of the connection with most, which is cancelled (`call.cancel()`).
    """

    def __init__(self, each: int, in_all: int = _IN_ALL) -> None:
        self._each = each
        self._in_all = in_all
        self._lock = threading.Lock()
        self._count = 0
        self._calls: dict[Hashable, dict[Any, float]] = {}  # by connection, since when

    def enter(self, connection: Hashable, call: Any) -> None:
        """Count a call whose message is on its way.

        Raises:
            LimitExceeded: There are too many, and no other connection has more.
        """
        with self._lock:
            own = len(self._calls.get(connection, ()))
            if own >= self._each:
                raise LimitExceeded(
                    f"{own} messages are on their way over this connection, the limit is {self._each}; "
                    "send fewer at a time, or raise incoming in PSFLEET_LIMITS"
                )
            oldest = None if self._count < self._in_all else self._oldest_of_most(own)
            self._calls.setdefault(connection, {})[call] = time.monotonic()
            self._count += 1
        if oldest is not None:
            oldest.cancel()

    def leave(self, connection: Hashable, call: Any) -> bool:
        """Count it no more: its message is here or will not come. False: it was cancelled for another one."""
        with self._lock:
            return self._forget(connection, call)

    def _oldest_of_most(self, own: int) -> Any:
        """Make room for a call whose connection has `own` others; the call that has to go."""
        most = max(map(len, self._calls.values()))
        if own >= most:
            raise LimitExceeded(
                f"{self._in_all} messages are on their way to this server, which is the most; "
                "send fewer at a time"
            )
        _, connection, call = min(
            (
                (began, connection, call)
                for connection, calls in self._calls.items()
                if len(calls) == most
                for call, began in calls.items()
            ),
            key=lambda entry: entry[0],
        )
        self._forget(connection, call)
        return call

    def _forget(self, connection: Hashable, call: Any) -> bool:
        calls = self._calls.get(connection, {})
        was_counted = calls.pop(call, None) is not None
        self._count -= was_counted
        if not calls:
            self._calls.pop(connection, None)
        return was_counted


_BURST = 64.0
_EACH_SECOND = 32.0
_DECODED = 64  # bytes of one unit; they take long to decode
_BYTES = 64 << 10


class RateLimit:
    """A token bucket: 64 units at once, then 32 a second.

    A frame is one unit, and one more for each 64 KiB in it, or for each 64 bytes of headers or settings. The
    headers of a call have about 300 bytes.

    Args:
        now: The time in seconds.
    """

    def __init__(self, now: float) -> None:
        self._units = _BURST
        self._since = now

    def take(self, length: int, is_decoded: bool, now: float) -> float:
        """Take what a frame costs; how many seconds to wait before it is read.

        Args:
            length: Length of the frame.
            is_decoded: True if it carries headers or settings.
            now: The time in seconds.
        """
        self._units = min(_BURST, self._units + (now - self._since) * _EACH_SECOND)
        self._since = now
        self._units -= 1 + length / (_DECODED if is_decoded else _BYTES)
        return max(0.0, -self._units / _EACH_SECOND)
