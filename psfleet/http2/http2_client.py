"""Unary calls to one server: each connection carries one call at a time."""

import contextlib
import select
import threading
import time
from collections.abc import Callable

from psfleet.http2 import frames
from psfleet.http2.call_errors import CallFailed, ConnectionBroken, DeadlinePassed
from psfleet.http2.header_blocks import (
    OK_HEADERS,
    OK_TRAILERS,
    read_message,
    request_prefix,
    timeout_field,
)
from psfleet.http2.http2_connection import Http2Connection, StreamState
from psfleet.http2.message_frames import around_message
from psfleet.http2.socket_transport import Transport

__all__ = ["Http2Client", "OutgoingCall"]

_MOST_STREAMS = 2**31 - 1
_UNKNOWN = 2  # status of gRPC
_SILENCE = 20.0  # seconds without an answer after which the server is probed


_LONGEST_PLAIN = 1 << 10  # bytes of an answer; to look at those of a longer one twice takes longer
_OPENING, _CLOSING = map(len, around_message(1, 0, OK_HEADERS, OK_TRAILERS))


class Http2Client:
    """Makes calls to a server; any thread may call.

    Args:
        connect: Makes a connected transport; raises ConnectionBroken or DeadlinePassed.
        authority: The server's name, for its logs.
        tls: Whether the transport is under TLS.
        most: Bytes that an answer may have.
        metadata: Headers of every call.
        probe: Called when an answer is not here after 20 seconds, and so on; raises if the server is gone.
        failed: Makes what a call raises that has ended with an error of this package, given this client,
            the error and the seconds that the answer could take.
    """

    def __init__(
        self,
        connect: Callable[[], Transport],
        authority: str,
        tls: bool,
        most: int,
        metadata: tuple[tuple[str, str], ...] = (),
        probe: Callable[[], None] = lambda: None,
        failed: "Callable[[Http2Client, Exception, float], Exception]" = lambda _, error, __: error,
    ) -> None:
        self.failed = failed
        self._connect = connect
        self._authority = authority
        self._tls = tls
        self._most = most
        self._metadata = metadata
        self._probe = probe
        self._prefixes: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._idle: list[_ClientConnection] = []
        self._open: set[_ClientConnection] = set()
        self._closed = False

    @property
    def is_ready(self) -> bool:
        """Whether there is a connection that carries no call."""
        return bool(self._idle)

    def call(self, path: str, message: bytes, seconds: float) -> bytes:
        """Make a call.

        Args:
            path: "/package.Service/Method".
            message: The request.
            seconds: How long the answer may take.

        Raises:
            CallFailed: The server answers with an error.
            ConnectionBroken: The connection is lost; the server may have taken the call.
            DeadlinePassed: There is no answer in time.
        """
        return self.begin(path, message, seconds).finish()

    def begin(self, path: str, message: bytes, seconds: float) -> "OutgoingCall":
        """Send a call whose answer is read later; see `call`."""
        prefix = self._prefixes.get(path)
        if prefix is None:
            prefix = request_prefix(path, self._authority, self._tls, self._metadata)
            self._prefixes[path] = prefix
        connection = self._take()
        try:
            stream = connection.begin(
                prefix + timeout_field(seconds), message, time.monotonic() + seconds
            )
        except BaseException:
            self.drop(connection)
            raise
        return OutgoingCall(self, connection, stream, seconds)

    def connect(self) -> None:
        """Have a connection.

        Raises:
            ConnectionBroken: The server cannot be reached.
        """
        self.give(self._take())

    def close(self) -> None:
        """End the connections; calls under way fail. Safe to call twice."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self._open.difference_update(idle)
            for one in self._open:
                one.transport.shut()
        for one in idle:
            one.transport.close()

    def _take(self) -> "_ClientConnection":
        with self._lock:
            if self._idle:
                return self._idle.pop()
        made = _ClientConnection(self._connect(), self._most, self._probe)
        with self._lock:
            if not self._closed:
                self._open.add(made)
                return made
        made.transport.close()
        raise ConnectionBroken("the connection is closed")

    def give(self, connection: "_ClientConnection") -> None:
        """The connection carries no call any more."""
        with self._lock:
            if not self._closed and connection.is_clean:
                self._idle.append(connection)
                return
        self.drop(connection)

    def drop(self, connection: "_ClientConnection") -> None:
        """The connection is of no more use."""
        with self._lock:
            self._open.discard(connection)
        connection.transport.close()


class OutgoingCall:
    """A call that has left. Whoever has it reads its answer, once."""

    def __init__(
        self,
        client: Http2Client,
        connection: "_ClientConnection",
        stream: StreamState,
        seconds: float,
    ) -> None:
        self._client = client
        self._connection = connection
        self._stream = stream
        self._seconds = seconds

    def fileno(self) -> int:
        """Where the answer comes in."""
        return self._connection.transport.fileno()

    def arrives(self, seconds: float) -> bool:
        """Whether the answer comes in within so many seconds; waits for it."""
        return bool(self._connection.incoming.poll(seconds * 1000))

    def finish(self) -> bytes:
        """Read the answer; see Http2Client.call."""
        try:
            answer = self._connection.finish(self._stream)
        except CallFailed as error:
            self._client.give(self._connection)
            raise self._client.failed(self._client, error, self._seconds) from None
        except (ConnectionBroken, DeadlinePassed) as error:
            self._client.drop(self._connection)
            raise self._client.failed(self._client, error, self._seconds) from None
        except BaseException:
            self._client.drop(self._connection)
            raise
        self._client.give(self._connection)
        return answer


class _ClientConnection(Http2Connection):
    """The client's end of a connection. `incoming`: Polls for what the server sends."""

    def __init__(self, transport: Transport, most: int, probe: Callable[[], None]) -> None:
        super().__init__(transport, most, _MOST_STREAMS)
        self.incoming = select.poll()
        self.incoming.register(transport.fileno(), select.POLLIN)
        self._probe = probe
        self._deadline = self._next_probe = 0.0
        self._number = -1
        self._ended = True
        self._failure: CallFailed | None = None
        self._is_new = True

    @property
    def is_clean(self) -> bool:
        """Whether another call may be made."""
        return self._ended and self._number < _MOST_STREAMS - 2

    def begin(self, block: bytes, message: bytes, deadline: float) -> StreamState:
        """Send a call; see Http2Client.begin."""
        self._deadline = deadline
        self._next_probe = time.monotonic() + _SILENCE
        if self._is_new:
            self._is_new = False
            self.send([frames.PREFACE + self.greeting()])
        self._number += 2
        self._ended, self._failure = False, None
        stream = self.open(self._number)
        self.send_message(stream, block, message, b"")
        return stream

    def finish(self, stream: StreamState) -> bytes:
        """Read the answer; see Http2Client.call."""
        if not self._ended and (message := self._plain_answer()) is not None:
            self._ended = True
            self.drop(stream)
            return message
        while not self._ended:
            self.read()
        if not stream.closed:
            self.drop(stream)
        if self._failure is not None:
            raise self._failure
        if not stream.is_whole:
            raise ConnectionBroken("an answer ends in its middle")
        content, stream.content = stream.content, b""
        return content

    def _plain_answer(self) -> bytes | None:
        """The answer, if all of it comes at once and is plain; None: it is to be read frame by frame."""
        piece, number = self.arrived(_LONGEST_PLAIN), self._number
        length = len(piece) - _OPENING - _CLOSING
        if length < 0:
            return None
        opening, closing = around_message(number, length, OK_HEADERS, OK_TRAILERS)
        if not piece.startswith(opening) or not piece.endswith(closing):
            return None
        self.skip(len(piece))
        self.took(5 + length)
        return piece[_OPENING:-_CLOSING]

    def tick(self) -> None:
        """See Http2Connection."""
        now = time.monotonic()
        if now > self._deadline:
            raise DeadlinePassed
        if now > self._next_probe:
            self._probe()
            self._next_probe = time.monotonic() + _SILENCE

    def newest(self) -> int:
        """See Http2Connection."""
        return self._number

    def on_headers(self, number: int, block: bytes, ends: bool) -> None:
        """The headers or the trailers of the answer."""
        if block in (OK_HEADERS, OK_TRAILERS):  # as our server writes them
            self._ended |= ends and number == self._number
            return
        headers, _ = self.headers.read(block)
        if number != self._number or self._ended:
            return
        status = headers.get("grpc-status", "")
        http = headers.get(":status", "200")
        if http != "200" and not http.startswith("1"):
            self._failure = CallFailed(_UNKNOWN, f"HTTP status {http}", {})
        elif status not in ("", "0"):
            self._failure = CallFailed(_number(status), read_message(headers), headers)
        if ends:
            self._ended = True

    def on_end(self, stream: StreamState) -> None:
        """An answer without trailers is no answer of gRPC."""
        if stream.number == self._number:
            raise ConnectionBroken("an answer ends without a status")

    def on_reset(self, stream: StreamState) -> None:
        """The server has given up the call; a refusal has come before."""
        if stream.number == self._number and not self._ended:
            raise ConnectionBroken("the server has reset the call")


def _number(status: str) -> int:
    with contextlib.suppress(ValueError):
        return int(status)
    return _UNKNOWN
