"""Unary calls to one server: each connection carries one call at a time."""

import contextlib
import select
import threading
import time
from collections.abc import Callable

from typing_extensions import override

from psfleet.core.net.http2 import frames
from psfleet.core.net.http2.calls import StreamState
from psfleet.core.net.http2.frames import (
    CallFailed,
    ConnectionBroken,
    DamagedMessage,
    DeadlinePassed,
    ErrorCode,
    ProtocolViolation,
    StreamError,
    around_message,
)
from psfleet.core.net.http2.header_blocks import (
    OK_HEADERS,
    OK_TRAILERS,
    RESPONSE,
    read_message,
    request_prefix,
    timeout_field,
)
from psfleet.core.net.http2.http2_connection import PREFIX, RENEW, Http2Connection
from psfleet.core.net.http2.socket_transport import Transport

_MOST_STREAMS = 2**31 - 1
_UNKNOWN = 2  # status of gRPC


_MOST_BLOCKS = 64
_LONGEST_PLAIN = 1 << 10  # bytes of an answer; to look at those of a longer one twice takes longer
_OPENING, _CLOSING = map(len, around_message(1, 0, OK_HEADERS, OK_TRAILERS))


class Http2Client:
    """Makes calls to a server; any thread may call.

    Args:
        connect: Makes a connected transport; raises ConnectionBroken or DeadlinePassed.
        authority: The server's name, for its logs.
        tls: True if the transport is under TLS.
        most: Bytes that an answer may have.
        metadata: Headers of every call.
        wrap: Makes what a call raises that has ended with an error of this package, given this client,
            the error and the seconds that the answer could take.

    Attributes:
        idle: Connections that carry no call.
    """

    def __init__(
        self,
        connect: Callable[[], Transport],
        authority: str,
        tls: bool,
        most: int,
        metadata: tuple[tuple[str, str], ...] = (),
        wrap: "Callable[[Http2Client, Exception, float], Exception]" = lambda _, error, __: error,
    ) -> None:
        self.wrap = wrap
        self._connect = connect
        self._authority = authority
        self._tls = tls
        self._most = most
        self._metadata = metadata
        self._blocks: dict[tuple[str, float], bytes] = {}  # headers by path and seconds
        self._lock = threading.Lock()
        self.idle: list[ClientConnection] = []
        self._open: set[ClientConnection] = set()
        self._closed = False

    def call(self, path: str, message: bytes, seconds: float) -> bytes:
        """Make a call.

        Args:
            path: "/package.Service/Method".
            message: The request.
            seconds: Longest time until the answer.

        Raises:
            CallFailed: The server answers with an error.
            ConnectionBroken: The connection is lost; the server may have taken the call.
            DeadlinePassed: There is no answer in time.
        """
        return self.begin(path, message, seconds).finish()

    def begin(self, path: str, message: bytes, seconds: float) -> "ClientConnection":
        """Send a call whose answer is read later, with `finish` of what this returns; see `call`."""
        block = self._blocks.get((path, seconds)) or self._block(path, seconds)
        try:
            connection = self.idle.pop()  # one thread gets it
        except IndexError:
            connection = self._connected()
        try:
            connection.begin(block, message, seconds)
        except BaseException:
            self.drop(connection)
            raise
        return connection

    def _block(self, path: str, seconds: float) -> bytes:
        """Return the headers of a call, kept for the next one that may take as long."""
        block = request_prefix(path, self._authority, self._tls, self._metadata)
        block += timeout_field(seconds)
        if len(self._blocks) >= _MOST_BLOCKS:
            self._blocks.clear()
        self._blocks[path, seconds] = block
        return block

    def close(self) -> None:
        """End the connections; calls under way fail. Safe to call twice."""
        with self._lock:
            self._closed = True
        self.forget_idle()
        with self._lock:
            for connection in self._open:
                connection.transport.shut()

    def forget_idle(self) -> None:
        """End the connections that carry no call."""
        with self._lock:
            idle, self.idle = self.idle, []
            self._open.difference_update(idle)
        for connection in idle:
            connection.say_goodbye(0, ErrorCode.NO_ERROR, "")
            connection.transport.close()

    def _connected(self) -> "ClientConnection":
        connection = ClientConnection(self, self._connect(), self._most)
        with self._lock:
            if not self._closed:
                self._open.add(connection)
                return connection
        connection.transport.close()
        raise ConnectionBroken("the connection is closed")

    def give(self, connection: "ClientConnection") -> None:
        """Take a connection back that carries no call any more."""
        with self._lock:
            is_clean = connection.ended and not connection.is_leaving
            if is_clean and not self._closed and connection.number < _MOST_STREAMS - 2:
                self.idle.append(connection)
                return
        self.drop(connection)

    def drop(self, connection: "ClientConnection") -> None:
        """Close a connection that is of no more use."""
        with self._lock:
            self._open.discard(connection)
        connection.transport.close()


class ClientConnection(Http2Connection[StreamState]):
    """The client's end of a connection, and the call that it carries, whose reply is read once.

    Attributes:
        incoming: Waits for the reply.
        number: Number of the call.
        ended: The call is over.
        is_leaving: The server takes no further call.
    """

    def __init__(self, client: Http2Client, transport: Transport, most: int) -> None:
        super().__init__(transport, most, _MOST_STREAMS, RESPONSE)
        self.incoming = select.poll()
        self.incoming.register(transport.fileno(), select.POLLIN)
        self._client = client
        self._stream: StreamState | None = None
        self._seconds = 0.0
        self._deadline = 0.0
        self.number = -1
        self.ended = True
        self._failure: CallFailed | None = None
        self.is_leaving = False

    def begin(self, block: bytes, message: bytes, seconds: float) -> None:
        """Send a call; see Http2Client.begin."""
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        if not self.has_greeted:
            self.has_greeted = True
            self.send([frames.PREFACE + self.greeting()])
        self.number = number = self.number + 2
        self.ended, self._failure = False, None
        self._stream = stream = StreamState(number, self.stream_window, self.most)
        self.streams[number] = stream
        self.send_message(stream, block, message, b"")

    def fileno(self) -> int:
        """Descriptor on which the answer arrives."""
        return self.transport.fileno()

    def finish(self) -> bytes:
        """Read the answer; see Http2Client.call."""
        client = self._client
        try:
            reply = self._plain_reply()
            if reply is None:
                reply = self._reply()
        except CallFailed as error:
            client.give(self)
            raise client.wrap(client, error, self._seconds) from None
        except (ConnectionBroken, DeadlinePassed) as error:
            if isinstance(error, ProtocolViolation):
                self.say_goodbye(0, error.code, str(error))
            client.drop(self)
            raise client.wrap(client, error, self._seconds) from None
        except BaseException:
            client.drop(self)
            raise
        client.give(self)
        return reply

    def _reply(self) -> bytes:
        """Read the answer frame by frame."""
        stream = self._stream
        assert stream is not None
        while not self.ended:
            self.read()
        if not stream.closed:
            self.drop(stream)
        if self._failure is not None:
            raise self._failure
        if not stream.is_whole:
            raise ConnectionBroken("an answer ends in its middle")
        content, stream.content = stream.content, b""
        return content

    def _plain_reply(self) -> bytes | None:
        """Return the answer if it comes at once and is plain; None: it is to be read frame by frame."""
        if self.ended:  # it was refused while the request was sent
            return None
        part, number = self.arrived(_LONGEST_PLAIN), self.number
        length = len(part) - _OPENING - _CLOSING
        if length < 0:
            return None
        opening, closing = around_message(number, length, OK_HEADERS, OK_TRAILERS)
        if not part.startswith(opening) or not part.endswith(closing):
            return None
        self._start += len(part)
        self.received += PREFIX + length
        if self.received >= RENEW:
            self.took(0)
        self.ended = True
        self.streams.clear()  # there is one call, all of which has left
        return part[_OPENING:-_CLOSING]

    @override
    def tick(self) -> None:
        if time.monotonic() > self._deadline:
            raise DeadlinePassed

    @override
    def newest(self) -> int:
        return self.number

    def on_headers(self, number: int, block: bytes, ends: bool) -> None:
        """Take the headers or the trailers of the answer."""
        if block in (OK_HEADERS, OK_TRAILERS):  # as our server writes them
            self.ended |= ends and number == self.number
            return
        headers, _ = self.headers.read(block)
        if number != self.number or self.ended:
            return
        status = headers.get("grpc-status", "")
        http = headers.get(":status", "200")
        if http != "200" and not http.startswith("1"):
            self._failure = CallFailed(_UNKNOWN, f"HTTP status {http}", {})
        elif status not in ("", "0"):
            self._failure = CallFailed(_number(status), read_message(headers), headers)
        if ends:
            self.ended = True

    def on_end(self, stream: StreamState) -> None:
        """Refuse an answer without trailers, which is none of gRPC."""
        if stream.number == self.number:
            raise ConnectionBroken("an answer ends without a status")

    def is_late(self, number: int, ends: bool) -> bool:
        """An answer whose call has ended here is passed over."""
        return not self.is_idle(number)

    def on_stream_error(self, number: int, error: StreamError, ends: bool) -> None:
        """There is one call, so the connection ends with it."""
        raise ProtocolViolation(error.code, str(error))

    @override
    def on_damage(self, stream: StreamState, damage: DamagedMessage) -> None:
        raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, damage.details)

    def on_goaway(self, newest: int) -> None:
        """Note that the server is about to end the connection; it may still answer the call."""
        self.is_leaving = True
        if newest < self.number:
            raise ConnectionBroken("the server takes no more calls")

    def on_reset(self, stream: StreamState) -> None:
        """Fail: the server has given up the call, and a refusal has come before."""
        if stream.number == self.number and not self.ended:
            raise ConnectionBroken("the server has reset the call")


def _number(status: str) -> int:
    with contextlib.suppress(ValueError):
        return int(status)
    return _UNKNOWN
