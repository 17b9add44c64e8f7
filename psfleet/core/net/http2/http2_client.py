"""Client of unary gRPC calls over HTTP/2 and blocking sockets, for the calls that carry tensors.

The thread that makes a call writes the request and reads the reply itself, so nothing is handed over between
threads. Each connection therefore carries one call at a time. Concurrent calls use several connections,
which are reused afterwards. The client is ordinary gRPC and works with any gRPC server.
docs/decisions/0016-http2.md explains why psfleet does not use grpcio here.
"""

import contextlib
import select
import threading
import time
from collections.abc import Callable

from typing_extensions import override

from psfleet.core.net.http2 import frames
from psfleet.core.net.http2.calls import StreamState
from psfleet.core.net.http2.flow_control import PREFIX, RENEW
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
from psfleet.core.net.http2.http2_connection import Http2Connection
from psfleet.core.net.http2.socket_transport import Transport

_MOST_STREAMS = 2**31 - 1
_UNKNOWN = 2  # status of gRPC


_MOST_BLOCKS = 64  # header blocks that a client remembers
# Longest reply that is compared as a whole. For a longer one, the second pass over the bytes costs too much.
_LONGEST_PLAIN = 1 << 10
# Number of bytes before and after the message of such a reply.
_OPENING, _CLOSING = map(len, around_message(1, 0, OK_HEADERS, OK_TRAILERS))


class Http2Client:
    """Makes calls to one server. Any thread may call.

    Args:
        connect: Makes a connected transport. Raises ConnectionBroken or DeadlinePassed.
        authority: Name of the server in the `:authority` header, for its logs.
        tls: True if the transport uses TLS.
        most: Longest reply accepted, in bytes.
        metadata: Headers of every call.
        wrap: Translates an error of this package into the exception that the call raises. Its arguments are
            this client, the error, and the timeout of the call in seconds.

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
        self._blocks: dict[tuple[str, float], bytes] = {}  # path and timeout -> encoded headers
        self._lock = threading.Lock()
        self.idle: list[ClientConnection] = []
        self._open: set[ClientConnection] = set()
        self._closed = False

    def call(self, path: str, message: bytes, seconds: float) -> bytes:
        """Make a call and return the reply.

        Args:
            path: Method as "/package.Service/Method".
            message: The request.
            seconds: Timeout of the call.

        Raises:
            CallFailed: The server replies with an error status.
            ConnectionBroken: The connection is lost. The server may or may not have executed the call.
            DeadlinePassed: No reply arrives in time.
        """
        return self.begin(path, message, seconds).finish()

    def begin(self, path: str, message: bytes, seconds: float) -> "ClientConnection":
        """Send the request of a call without waiting.

        Call `finish` of the returned connection to get the reply.

        The arguments are those of `call`. With `begin`, several calls can be sent before the first reply is
        read.
        """
        block = self._blocks.get((path, seconds)) or self._block(path, seconds)
        try:
            connection = self.idle.pop()  # no lock: list.pop is atomic, so one thread gets it
        except IndexError:
            connection = self._connected()
        try:
            connection.begin(block, message, seconds)
        except BaseException:
            self.drop(connection)
            raise
        return connection

    def _block(self, path: str, seconds: float) -> bytes:
        """Return the encoded headers of a call, and remember them for calls with the same timeout."""
        block = request_prefix(path, self._authority, self._tls, self._metadata)
        block += timeout_field(seconds)
        if len(self._blocks) >= _MOST_BLOCKS:
            self._blocks.clear()
        self._blocks[path, seconds] = block
        return block

    def close(self) -> None:
        """Close all connections; calls in progress fail. Safe to call twice."""
        with self._lock:
            self._closed = True
        self.forget_idle()
        with self._lock:
            # Only shut them down: the thread that waits for a reply closes its own connection.
            for connection in self._open:
                connection.transport.shut()

    def forget_idle(self) -> None:
        """Close the connections that carry no call at present."""
        idle: list[ClientConnection] = []
        with self._lock:
            # `begin` pops without the lock. Pop here too, so that a connection is never both used and closed.
            with contextlib.suppress(IndexError):
                while True:
                    idle.append(self.idle.pop())
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
        # `close` ran while this thread was connecting, and did not see the new connection.
        raise ConnectionBroken("the connection is closed")

    def give(self, connection: "ClientConnection") -> None:
        """Keep a connection for the next call, or close it if it cannot carry another call."""
        with self._lock:
            # Stream numbers cannot be used twice, and end at _MOST_STREAMS.
            is_clean = connection.ended and not connection.is_leaving
            if is_clean and not self._closed and connection.number < _MOST_STREAMS - 2:
                self.idle.append(connection)
                return
        self.drop(connection)

    def drop(self, connection: "ClientConnection") -> None:
        """Close a connection that will not be used again."""
        with self._lock:
            self._open.discard(connection)
        connection.transport.close()


class ClientConnection(Http2Connection[StreamState]):
    """Client's end of a connection, and the one call that it carries. One thread at a time uses it.

    Attributes:
        incoming: Poll object (select.poll) that is ready when bytes of the reply arrive.
        number: Stream number of the present or last call.
        ended: True once the call is over.
        is_leaving: True if the server accepts no further calls on the connection.
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
        """Send a request whose headers are already encoded."""
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        if not self.has_greeted:
            self.has_greeted = True
            self.send([frames.PREFACE + self.greeting()])
        self.number = number = self.number + 2  # 1, 3, 5 ...: clients use odd numbers
        self.ended, self._failure = False, None
        self._stream = stream = StreamState(number, self.stream_window, self.most)
        self.streams[number] = stream
        self.send_message(stream, block, message, b"")

    def fileno(self) -> int:
        """Return the descriptor of the socket. It becomes readable when bytes of the reply arrive."""
        return self.transport.fileno()

    def finish(self) -> bytes:
        """Read the reply of the call. Raises the errors of `Http2Client.call`, translated by `wrap`.

        The connection is idle or closed afterwards, so the caller must not use it any longer.
        """
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
        """Read the reply frame by frame."""
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
        """Return a small reply of a psfleet server that has arrived as a whole, or None to read it by frames.

        Such a reply is always the same bytes around the message, so two comparisons replace the parser. If it
        returns None, nothing has been read from the buffer.
        """
        if self.ended:  # the server refused the call while the request was being sent
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
            self.took(0)  # the bytes are counted already; this only enlarges the window
        self.ended = True
        self.streams.clear()  # its only stream is over, and its request has been sent completely
        return part[_OPENING:-_CLOSING]

    @override
    def tick(self) -> None:
        if time.monotonic() > self._deadline:
            raise DeadlinePassed

    @override
    def newest(self) -> int:
        return self.number

    def on_headers(self, number: int, block: bytes, ends: bool) -> None:
        """Read the headers or the trailers of the reply."""
        if block in (OK_HEADERS, OK_TRAILERS):  # written by one of our servers; nothing to decode
            self.ended |= ends and number == self.number
            return
        # Decode even a block that is ignored below: it can change the table that later blocks use.
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
        """Reject a reply that ends without trailers, which gRPC does not allow."""
        if stream.number == self.number:
            raise ConnectionBroken("an answer ends without a status")

    def is_late(self, number: int, ends: bool) -> bool:
        """Return True for every stream used so far: frames for a call that has ended here are skipped."""
        return not self.is_idle(number)

    def on_stream_error(self, number: int, error: StreamError, ends: bool) -> None:
        """End the connection: it carries no other call that could continue."""
        raise ProtocolViolation(error.code, str(error))

    @override
    def on_damage(self, stream: StreamState, damage: DamagedMessage) -> None:
        raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, damage.details)

    def on_goaway(self, newest: int) -> None:
        """Note that the server will close the connection. It still replies to a call that it has accepted."""
        self.is_leaving = True
        if newest < self.number:
            raise ConnectionBroken("the server takes no more calls")

    def on_reset(self, stream: StreamState) -> None:
        """Fail the call if the server resets its stream without a reply."""
        if stream.number == self.number and not self.ended:
            raise ConnectionBroken("the server has reset the call")


def _number(status: str) -> int:
    with contextlib.suppress(ValueError):
        return int(status)
    return _UNKNOWN
