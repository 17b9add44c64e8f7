"""Calls of a connection: the message that comes in, how many may wait for theirs, and a server's answer."""

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from psfleet.core.base.errors import LimitExceeded
from psfleet.core.base.memory import unwritten_bytes
from psfleet.core.net.http2.frames import ConnectionBroken, DamagedMessage
from psfleet.core.net.http2.header_blocks import OK_HEADERS, OK_TRAILERS

if TYPE_CHECKING:
    from psfleet.core.net.http2.server_connection import ServerConnection

_PREFIX = 5  # bytes before a message: not compressed, and its length
_INVALID, _EXHAUSTED, _UNIMPLEMENTED = 3, 8, 12  # statuses of gRPC
_SHORT = 1 << 10  # bytes of a message that is read at once


_IN_ALL = 256
_BURST = 64.0
_EACH_SECOND = 32.0
_DECODED = 64  # bytes of one unit; they take long to decode
_BYTES = 64 << 10
_LONG = 86_400.0  # seconds that a call without a timeout may take


class ByteSource(Protocol):
    """Source of a message's bytes."""

    def read_bytes(self, size: int) -> bytes:
        """Return the next bytes, as many as a small frame has at most."""

    def read_into(self, target: memoryview) -> None:
        """Return the next bytes, as many as the target holds."""


class StreamState:
    """One call: where it stands, and the message that comes in.

    Args:
        number: Number of the stream.
        window: Bytes that the other end takes now.
        most: Bytes that the message may have.

    Attributes:
        received: Bytes of the frames of the message, since its window was opened last.
        remaining: Bytes that its headers have promised and that are not here; None: they say nothing of it.
        ended: The other end has sent all of it.
        unwanted: True if the bytes that come in are no message, and are skipped.
        closed: Nothing is sent on it any more.
        content: The bytes of the message, once it `is_whole`.
        length: Length in the message's prefix; -1: not yet known.
    """

    received = 0
    remaining: int | None = None
    ended = unwanted = closed = False
    content = b""
    length = -1
    _prefix = b""
    _place: memoryview | None = None
    _filled = 0

    def __init__(self, number: int, window: int, most: int) -> None:
        self.number = number
        self.window = window
        self._most = most

    @property
    def is_whole(self) -> bool:
        """True if all bytes are here."""
        return self.length >= 0 and self._filled == self.length

    @property
    def missing(self) -> int:
        """Bytes up to the end of the message, or of what says its length; at least 1 if it is not whole."""
        return _PREFIX - len(self._prefix) or self.length - self._filled

    def begin_next(self) -> None:
        """Take another message."""
        self.content, self.length, self._prefix, self._place, self._filled = b"", -1, b"", None, 0

    def take(self, size: int, source: ByteSource) -> None:
        """Take so many bytes, the next ones of the source.

        Raises:
            DamagedMessage: They are more than the message, or it is compressed or too long.
        """
        missing = _PREFIX - len(self._prefix)
        if missing == _PREFIX <= size <= _SHORT:  # mostly all of a small message
            part = source.read_bytes(size)
            self._prefix = part[:_PREFIX]
            self._begin(0)
            if size == _PREFIX + self.length:
                self.content, self._filled = part[_PREFIX:], self.length
            elif size > _PREFIX:
                self._next(size - _PREFIX, 0)[:] = part[_PREFIX:]
            return
        if missing and size:
            first = min(missing, size)
            self._prefix += source.read_bytes(first)
            size -= first
            if len(self._prefix) == _PREFIX:
                self._begin(size)
        if size:
            source.read_into(self._next(size, size))

    def _next(self, size: int, unread: int) -> memoryview:
        """Return the place of the next bytes, which are taken; `unread`: those that are not read yet."""
        start, self._filled = self._filled, self._filled + size
        if self._filled > self.length:
            raise DamagedMessage(_INVALID, f"a message of {self.length} bytes has more", unread)
        if self._place is None:
            self.content, place = unwritten_bytes(self.length)
            self._place = memoryview(place).cast("B")
        return self._place[start : self._filled]

    def _begin(self, unread: int) -> None:
        length = int.from_bytes(self._prefix[1:], "big")
        if self._prefix[0]:
            raise DamagedMessage(
                _UNIMPLEMENTED, "the message is compressed, or is none of gRPC", unread
            )
        if length > self._most:
            raise DamagedMessage(
                _EXHAUSTED, f"the message has {length} bytes, the limit is {self._most}", unread
            )
        self.length = length


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


class IncomingCall(StreamState):
    """A call that waits for its answer. Any thread may answer, once.

    It has the methods of grpc.ServicerContext that handlers use.

    Attributes:
        connection: The connection over which it comes.
        behavior: Takes the request; None: the call is not taken.
        deadline: Time at which the client gives it up; None: never.
        code, details, metadata: Status of gRPC at its end, text for a person, headers after the answer.
        has_opened: True if a part of the answer was sent, of a method with streams.
    """

    connection: "ServerConnection"
    behavior: "Behavior | Streaming | None" = None
    deadline: float | None = None
    code = 0
    details = ""
    metadata: Mapping[str, str] = MappingProxyType({})
    has_opened = False
    _lost: tuple[Callable[[], None], ...] = ()

    def time_remaining(self) -> float:
        """Return the seconds until the deadline."""
        return _LONG if self.deadline is None else self.deadline - time.monotonic()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Call back when the call is lost; False: it is over."""
        with self.connection.sending:
            if self.closed:
                return False
            self._lost = (*self._lost, callback)
            return True

    def set_code(self, code: "int | object") -> None:
        """Set the status: a number, or a grpc.StatusCode."""
        self.code = code if isinstance(code, int) else code.value[0]  # type: ignore[attr-defined]

    def set_details(self, details: str) -> None:
        """Set the status text for a person."""
        self.details = details

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str], ...]) -> None:
        """Set the headers after the answer."""
        self.metadata = dict(trailing_metadata)

    @override
    def take(self, size: int, source: ByteSource) -> None:
        if not isinstance(self.behavior, Streaming):
            super().take(size, source)
            return
        while size:
            part = min(size, self.missing)
            super().take(part, source)
            size -= part
            if self.is_whole:
                message = self.content
                self.begin_next()
                if not self.connection.took_replies(self):
                    raise DamagedMessage(_EXHAUSTED, "answers wait that are not read", size)
                self.behavior.take(message, self)

    def write(self, message: bytes) -> None:
        """Send one message of an answer of several."""
        self._send_part([b"\0" + len(message).to_bytes(4, "big"), message], b"")

    def close(self) -> None:
        """End an answer of several messages."""
        self._send_part([b""], OK_TRAILERS)

    def _send_part(self, contents: list[bytes], trailers: bytes) -> None:
        with contextlib.suppress(ConnectionBroken), self.connection.sending:
            if not self.closed:
                block = b"" if self.has_opened else OK_HEADERS
                self.has_opened = True
                self.connection.send_apart(self, block, contents, trailers, ends=False)

    def end(self, message: bytes | None) -> None:
        """End the call with a message, or with its status. A broken connection is its reader's matter."""
        self._lost = ()
        with contextlib.suppress(ConnectionBroken):
            if self.code or message is None:
                self.connection.fail(self)
            else:
                self.connection.send_message(self, OK_HEADERS, message, OK_TRAILERS)

    def refuse(self, code: int, details: str) -> None:
        """End the call with this status."""
        self.code, self.details = code, details
        self.end(None)

    def cancel(self) -> None:
        """End the call, whose message has not come, in favor of another one."""
        self.refuse(_EXHAUSTED, "too many messages are on their way to this server")

    def lose(self) -> None:
        """Call back: the client is gone."""
        with self.connection.sending:
            callbacks, self._lost = self._lost, ()
        for callback in callbacks:
            callback()


Behavior = Callable[[bytes, IncomingCall], None]
"""Takes a request and answers the call now or later. It does not raise."""


@dataclass(frozen=True)
class Streaming:
    """A method whose requests or answers are several messages.

    Attributes:
        take: Takes each message as it comes.
        end: The client sends no more.
    """

    take: Behavior
    end: Callable[[IncomingCall], None]
