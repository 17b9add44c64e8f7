"""Calls on an HTTP/2 connection: assembles their messages, limits them, and lets handlers reply.

StreamState assembles a gRPC message from DATA frames; both ends use it. IncomingCall adds the server's side:
it is the object through which a handler replies, now or later and from any thread. Two limits protect a
server. InboundMessages limits the number of messages that are only partly received, because their memory is
already allocated. RateLimit slows down a connection that has not yet made a permitted call.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from psfleet.core.base.errors import LimitExceeded, internal_error
from psfleet.core.base.logs import log_of
from psfleet.core.base.memory import unwritten_bytes
from psfleet.core.net.http2.frames import ConnectionBroken, DamagedMessage
from psfleet.core.net.http2.header_blocks import OK_HEADERS, OK_TRAILERS

if TYPE_CHECKING:
    from psfleet.core.net.http2.server_connection import ServerConnection

_log = log_of(__name__)

_PREFIX = 5  # bytes before each gRPC message: 1 if it is compressed, and its length as u32
_INVALID, _EXHAUSTED, _UNIMPLEMENTED, _INTERNAL = 3, 8, 12, 13  # status codes of gRPC
_SHORT = 1 << 10  # longest DATA frame whose prefix and message are read in one call, in bytes


_IN_ALL = 256  # partly received messages of all connections of a server
_BURST = 64.0  # units that a new connection may use at once
_EACH_SECOND = 32.0  # units that are added per second
_DECODED = 64  # bytes of headers or settings for one unit: few, because decoding them is slow
_BYTES = 64 << 10  # bytes of any other frame for one unit
_LONG = 86_400.0  # seconds that `time_remaining` returns for a call without a timeout


class ByteSource(Protocol):
    """Source of a message's bytes. In practice the connection's buffered reader."""

    def read_bytes(self, size: int) -> bytes:
        """Return the next `size` bytes. `size` must not exceed the reader's buffer."""

    def read_into(self, target: memoryview) -> None:
        """Fill the target with the next bytes, of any number."""


class StreamState:
    """State of one call (an HTTP/2 stream), and the message that the other end sends in it.

    Args:
        number: Number of the stream.
        window: Bytes that the other end accepts on this stream now (its flow-control window).
        most: Longest message accepted, in bytes.

    Attributes:
        received: Bytes of DATA frames since this end last enlarged the stream's window.
        remaining: Bytes of the announced content-length that have not arrived, or None if none was announced.
        ended: True once the other end has sent its last frame of the stream.
        unwanted: True if arriving bytes are skipped, because the request is not gRPC.
        closed: True once this end must not send on the stream.
        content: The message, once `is_whole`.
        length: Length of the message as its gRPC prefix announces it, or -1 until the prefix has arrived.
    """

    received = 0
    remaining: int | None = None
    ended = unwanted = closed = False
    content = b""
    length = -1
    _prefix = b""
    # Writable view of `content`. The memory is allocated in full as soon as the length is known.
    _place: memoryview | None = None
    _filled = 0

    def __init__(self, number: int, window: int, most: int) -> None:
        self.number = number
        self.window = window
        self._most = most

    @property
    def is_whole(self) -> bool:
        """True if the whole message has arrived."""
        return self.length >= 0 and self._filled == self.length

    @property
    def missing(self) -> int:
        """Number of bytes that are missing: of the prefix until it is complete, and then of the message."""
        return _PREFIX - len(self._prefix) or self.length - self._filled

    def begin_next(self) -> None:
        """Forget the message that has arrived, so that the stream's next message can be read."""
        self.content, self.length, self._prefix, self._place, self._filled = b"", -1, b"", None, 0

    def take(self, size: int, source: ByteSource) -> None:
        """Read the next `size` bytes of the message from the source.

        Raises:
            DamagedMessage: The message is compressed, too long, or longer than its prefix announces.
        """
        # A longer message is read into its own buffer, which saves the copy that the slice makes here.
        missing = _PREFIX - len(self._prefix)
        if missing == _PREFIX <= size <= _SHORT:  # usually a small message in one frame
            part = source.read_bytes(size)
            self._prefix = part[:_PREFIX]
            self._begin(0)
            if size == _PREFIX + self.length:
                self.content, self._filled = part[_PREFIX:], self.length
            elif size > _PREFIX:
                self._next(size - _PREFIX, 0)[:] = part[_PREFIX:]
            return
        if missing and size:
            # The prefix may be split over several DATA frames, byte by byte in the worst case.
            first = min(missing, size)
            self._prefix += source.read_bytes(first)
            size -= first
            if len(self._prefix) == _PREFIX:
                self._begin(size)
        if size:
            source.read_into(self._next(size, size))

    def _next(self, size: int, unread: int) -> memoryview:
        """Return the part of the buffer for the next `size` bytes, and treat these bytes as arrived.

        `unread`: Bytes of the frame that the caller has not yet read. If an error is raised, it carries this
        number, so that the connection can skip these bytes.
        """
        start, self._filled = self._filled, self._filled + size
        if self._filled > self.length:
            raise DamagedMessage(_INVALID, f"a message of {self.length} bytes has more", unread)
        if self._place is None:
            self.content, buffer = unwritten_bytes(self.length)
            self._place = memoryview(buffer).cast("B")
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
    """Limits how many calls of a server may have a partly received message. Any thread may call.

    Memory for the whole message is allocated when it begins to arrive. Without a limit, a client could claim
    much memory by announcing long messages that it never sends.

    Args:
        each: Largest number of such calls per connection.
        in_all: Largest number for all connections together. Once it is reached, a new call is admitted only
            if another connection has more such calls. The oldest call of the busiest connection is then
            cancelled (`call.cancel()`).
    """

    def __init__(self, each: int, in_all: int = _IN_ALL) -> None:
        self._each = each
        self._in_all = in_all
        self._lock = threading.Lock()
        self._count = 0
        self._calls: dict[Hashable, dict[Any, float]] = {}  # connection -> call -> time of `enter`

    def enter(self, connection: Hashable, call: Any) -> None:
        """Register a call whose message is about to arrive.

        Raises:
            LimitExceeded: The connection has its maximum of such calls. Or all connections together have
                theirs, and no other connection has more such calls than this one.
        """
        with self._lock:
            in_flight = len(self._calls.get(connection, ()))
            if in_flight >= self._each:
                raise LimitExceeded(
                    f"{in_flight} messages are on their way over this connection, the limit is {self._each}; "
                    "send fewer at a time, or raise incoming in PSFLEET_LIMITS"
                )
            oldest = None if self._count < self._in_all else self._oldest_of_most(in_flight)
            self._calls.setdefault(connection, {})[call] = time.monotonic()
            self._count += 1
        # Outside of the lock: `cancel` takes the lock of the connection and may write to its socket.
        if oldest is not None:
            oldest.cancel()

    def leave(self, connection: Hashable, call: Any) -> bool:
        """Unregister a call whose message has arrived or never will.

        Returns False if the call was already unregistered, because it was cancelled to admit another call.
        """
        with self._lock:
            return self._forget(connection, call)

    def _oldest_of_most(self, call_count: int) -> Any:
        """Remove and return the oldest call of the busiest connection, so that another call can be admitted.

        `call_count`: Registered calls of the connection that wants to add one.
        """
        largest_count = max(map(len, self._calls.values()))
        if call_count >= largest_count:
            raise LimitExceeded(
                f"{self._in_all} messages are on their way to this server, which is the most; "
                "send fewer at a time"
            )
        _, connection, call = min(
            (
                (began, connection, call)
                for connection, calls in self._calls.items()
                if len(calls) == largest_count
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
    """Token bucket for the frames of a connection: 64 units at once, then 32 units per second.

    A frame costs one unit. It costs one more for each 64 KiB in it, or for each 64 bytes of headers or
    settings. The headers of a call have about 300 bytes.

    Args:
        now: Present time in seconds, of any clock that only increases.
    """

    def __init__(self, now: float) -> None:
        self._units = _BURST
        self._since = now

    def take(self, length: int, is_decoded: bool, now: float) -> float:
        """Charge for a frame. Returns the seconds that the caller must wait before it reads the frame.

        Args:
            length: Length of the frame in bytes.
            is_decoded: True if the frame carries headers or settings.
            now: Present time in seconds.
        """
        self._units = min(_BURST, self._units + (now - self._since) * _EACH_SECOND)
        self._since = now
        # The balance may become negative. The caller then waits until new units have paid the debt.
        self._units -= 1 + length / (_DECODED if is_decoded else _BYTES)
        return max(0.0, -self._units / _EACH_SECOND)


class IncomingCall(StreamState):
    """A call that waits for its reply. Any thread may reply, once.

    Has the methods of grpc.ServicerContext that handlers use.

    Attributes:
        connection: Connection that the call arrived on.
        behavior: Handler of the call's method, or None if the call was refused.
        at_once: Function that may reply to the call directly (`ServerSettings.at_once`), or None.
        deadline: Time (time.monotonic) at which the client gives up, or None if it never does.
        code, details, metadata: Final gRPC status code, its text for a person, and trailing headers.
        has_opened: True if the headers and a part of the reply were sent. Only streaming methods send parts.
    """

    connection: "ServerConnection"
    behavior: "Behavior | Streaming | None" = None
    at_once: Callable[[bytes], bytes | None] | None = None
    deadline: float | None = None
    code = 0
    details = ""
    metadata: Mapping[str, str] = MappingProxyType({})
    has_opened = False
    _lost: tuple[Callable[[], None], ...] = ()

    def time_remaining(self) -> float:
        """Return the seconds until the deadline, or one day if the call has no deadline."""
        return _LONG if self.deadline is None else self.deadline - time.monotonic()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Call `callback` if the client disconnects before the reply.

        Returns False if the call is already over.
        """
        with self.connection.sending:
            if self.closed:
                return False
            self._lost = (*self._lost, callback)
            return True

    def set_code(self, code: "int | object") -> None:
        """Set the status code: a number, or a grpc.StatusCode."""
        self.code = code if isinstance(code, int) else code.value[0]  # type: ignore[attr-defined]

    def set_details(self, details: str) -> None:
        """Set the status text for a person."""
        self.details = details

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str], ...]) -> None:
        """Set the headers that follow the reply."""
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
                # A client that does not read its replies would make them accumulate here. So it may send
                # more only after it has read them.
                if not self.connection.took_replies(self):
                    raise DamagedMessage(_EXHAUSTED, "answers wait that are not read", size)
                self.run_handler(self.behavior.take, message)

    def write(self, message: bytes) -> None:
        """Send one message of a streaming reply."""
        self._send_part([b"\0" + len(message).to_bytes(4, "big"), message], b"")

    def close(self) -> None:
        """End a streaming reply with status OK."""
        self._send_part([b""], OK_TRAILERS)

    def _send_part(self, contents: list[bytes], trailers: bytes) -> None:
        with contextlib.suppress(ConnectionBroken), self.connection.sending:
            if not self.closed:
                block = b"" if self.has_opened else OK_HEADERS
                self.has_opened = True
                self.connection.send_apart(self, block, contents, trailers, ends=False)

    def end(self, message: bytes | None) -> None:
        """Reply with a message. If the status is not OK or `message` is None, reply with the status instead.

        A broken connection is ignored here: the thread that reads the connection handles it.
        """
        self._lost = ()  # the callbacks must not run if the connection is lost after the reply
        with contextlib.suppress(ConnectionBroken):
            if self.code or message is None:
                self.connection.fail(self)
            else:
                self.connection.send_message(self, OK_HEADERS, message, OK_TRAILERS)

    def refuse(self, code: int, details: str) -> None:
        """End the call with this status code and text."""
        self.code, self.details = code, details
        self.end(None)

    def run_handler(self, handler: Callable[..., None], *message: bytes) -> None:
        """Call a handler with this call as its last argument. If it raises, the call ends with INTERNAL.

        Otherwise the exception would end the connection, and the client would repeat the call until its
        deadline.
        """
        try:
            handler(*message, self)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the call with an unexpected error of its handler, and write the traceback to the log."""
        _log.error("a call has failed", exc_info=error)
        self.refuse(_INTERNAL, str(internal_error(error)))

    def cancel(self) -> None:
        """End a call whose message has not arrived in full, so that another call can be admitted."""
        self.refuse(_EXHAUSTED, "too many messages are on their way to this server")

    def lose(self) -> None:
        """Run the callbacks of `add_callback`, because the client has disconnected."""
        with self.connection.sending:
            callbacks, self._lost = self._lost, ()
        # Without the lock: a callback may take locks of the server, and holders of those locks send replies.
        for callback in callbacks:
            callback()


Behavior = Callable[[bytes, IncomingCall], None]
"""Handler of a method. It gets a request, and replies through the call now or later.

If it raises, the call ends with INTERNAL (`IncomingCall.run_handler`).
"""


@dataclass(frozen=True)
class Streaming:
    """Handler of a method whose requests or replies consist of several messages.

    Attributes:
        take: Called with each message as it arrives.
        end: Called once the client has sent its last message.
    """

    take: Behavior
    end: Callable[[IncomingCall], None]
