"""A server of unary gRPC calls: one thread for each connection."""

import contextlib
import hmac
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from psfleet.http2 import frames
from psfleet.http2.call_errors import ConnectionBroken
from psfleet.http2.header_blocks import (
    OK_HEADERS,
    OK_TRAILERS,
    failure_trailers,
    seconds_of,
    split_timeout,
)
from psfleet.http2.http2_connection import Http2Connection, StreamState
from psfleet.http2.socket_transport import Part, Transport
from psfleet.platform.service_thread import ServiceThread

__all__ = ["Behavior", "Http2Server", "IncomingCall", "ServerSettings"]

_NO_ERROR = 0  # of RST_STREAM
_UNAUTHENTICATED, _UNIMPLEMENTED, _EXHAUSTED = 16, 12, 8  # statuses of gRPC
_INVALID, _UNKNOWN = 3, 2
_LOOK = 0.02  # seconds between looks for the end of calls
_LONGEST_PLAIN = 4 << 10  # bytes of a call; to look at those of a longer one twice takes longer
_SHORTEST_PLAIN = frames.HEAD_SIZE + frames.MESSAGE_HEAD_SIZE
_MOST_KNOWN = 16
_LONG = 86_400.0  # seconds that a call without a timeout may take


class IncomingCall:
    """A call that waits for its answer. Any thread may answer; the first answer counts.

    It has the methods of grpc.ServicerContext that handlers use.
    """

    def __init__(
        self, connection: "_ServerConnection", stream: StreamState, seconds: float | None
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._code = 0
        self._details = ""
        self._metadata: dict[str, str] = {}
        self._message: bytes | None = None
        self._lost: list[Callable[[], None]] = []

    def time_remaining(self) -> float:
        """Seconds until nobody waits any more."""
        return _LONG if self._deadline is None else self._deadline - time.monotonic()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Call back when the call is lost; False: it is over."""
        with self._connection.sending:
            if self._stream.closed:
                return False
            self._lost.append(callback)
            return True

    def set_code(self, code: "int | object") -> None:
        """The status: a number, or a grpc.StatusCode."""
        self._code = code if isinstance(code, int) else code.value[0]  # type: ignore[attr-defined]

    def set_details(self, details: str) -> None:
        """What the status says to a person."""
        self._details = details

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str], ...]) -> None:
        """Headers after the answer."""
        self._metadata = dict(trailing_metadata)

    def send(self, message: bytes | None) -> None:
        """First the message, if there is one; then None ends the call."""
        if message is not None:
            self._message = message
            return
        self._lost.clear()
        self._connection.answer(
            self._stream, self._message, self._code, self._details, self._metadata
        )

    def lose(self) -> None:
        """The client is gone."""
        with self._connection.sending:
            lost, self._lost = self._lost, []
        for callback in lost:
            callback()


Behavior = Callable[[bytes, IncomingCall], None]
"""Takes a request and answers the call now or later. It does not raise."""


@dataclass(frozen=True)
class ServerSettings:
    """What a server takes.

    Attributes:
        message: Bytes of one message.
        connections: Open connections; a further one is closed at once.
        handshakes: Connections that have not made a call yet; when there are more, the oldest is closed.
        streams: Calls that are open at once on one connection.
        incoming: Calls of one connection whose message is on its way.
        handshake: Seconds within which a connection must have made a call.
        token: What the header `authorization` must be; None: anything.
    """

    message: int
    connections: int
    handshakes: int
    streams: int
    incoming: int
    handshake: float
    token: str | None = None


class Http2Server:
    """Answers calls on a listening socket, from `start` to `stop`.

    Args:
        listener: The socket; the server closes it.
        wrap: Makes a transport of an accepted socket; with TLS it shakes hands.
        behaviors: What answers a call, by path.
        settings: What it takes.
    """

    def __init__(
        self,
        listener: socket.socket,
        wrap: Callable[[socket.socket], Transport],
        behaviors: Mapping[str, Behavior],
        settings: ServerSettings,
    ) -> None:
        self._listener = listener
        self._wrap = wrap
        self.behaviors = behaviors
        self.settings = settings
        self._lock = threading.Condition()
        self._peers: set[_OpenConnection] = set()
        self._over = False
        self._thread = ServiceThread(self._accept, "http2")

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self, grace: float) -> None:
        """Take no more connections; end those that are open when no call is, or after `grace` seconds."""
        with self._lock:
            self._over = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        deadline = time.monotonic() + grace
        with self._lock:
            while self._is_busy() and time.monotonic() < deadline:
                self._lock.wait(_LOOK)
            left = [*self._peers]
        for peer in left:
            peer.transport.shut()
        for peer in left:
            peer.thread.join()

    def _is_busy(self) -> bool:
        return any(peer.connection and peer.connection.streams for peer in self._peers)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._over:
                    return
                time.sleep(_LOOK)  # no descriptor is left
                continue
            self._meet(sock)

    def _meet(self, sock: socket.socket) -> None:
        try:
            peer = _OpenConnection(self._wrap(sock), time.monotonic())
        except OSError:  # it is closed already
            sock.close()
            return
        peer.thread = ServiceThread(lambda: self._serve(peer), "http2 connection")
        with self._lock:
            if self._over or len(self._peers) >= self.settings.connections:
                peer.transport.close()
                return
            strangers = [one for one in self._peers if one.connection is None]
            if len(strangers) >= self.settings.handshakes:
                min(strangers, key=lambda one: one.since).transport.shut()
            self._peers.add(peer)
        peer.thread.start()

    def _serve(self, peer: "_OpenConnection") -> None:
        try:
            connection = _ServerConnection(peer, self)
            peer.transport.handshake(connection.tick)
            connection.run()
        except ConnectionBroken:
            pass  # the other end sees it
        except Exception:
            traceback.print_exc(file=sys.stderr)  # a defect; other connections go on
        finally:
            peer.transport.close()
            with self._lock:
                self._peers.discard(peer)
                self._lock.notify_all()


@dataclass(eq=False)
class _OpenConnection:
    """A connection; `connection`: once it has made a call that may be made."""

    transport: Transport
    since: float
    thread: threading.Thread = field(init=False)
    connection: "_ServerConnection | None" = None


class _ServerConnection(Http2Connection):
    """The server's end of a connection."""

    def __init__(self, peer: _OpenConnection, server: Http2Server) -> None:
        super().__init__(peer.transport, server.settings.message, server.settings.streams)
        self._peer = peer
        self._server = server
        self._newest = 0
        self._calls: dict[int, tuple[Behavior, IncomingCall]] = {}
        self._coming = 0  # streams whose message is not whole
        self._known: dict[
            bytes, Behavior
        ] = {}  # by the headers of calls that were taken, but their timeouts

    def run(self) -> None:
        """Serve until the connection ends."""
        try:
            self.send([self.greeting()])
            if self.read_bytes(len(frames.PREFACE)) != frames.PREFACE:
                raise ConnectionBroken("the other end does not speak HTTP/2")
            while True:
                if self.streams or not self._take_plain():
                    self.read()
        finally:
            self._lose_all()

    def _lose_all(self) -> None:
        for stream in [*self.streams.values()]:
            self.drop(stream)
        for _, call in [*self._calls.values()]:
            call.lose()

    def _take_plain(self) -> bool:
        """Take a call as our client sends a small one, with the headers of a call that was taken before.

        False: it is to be read frame by frame. It does what that would do.
        """
        piece = self.arrived(_LONGEST_PLAIN)
        if len(piece) < _SHORTEST_PLAIN:
            return False
        size, kind, flags, number = frames.read_head(piece)
        start = frames.HEAD_SIZE + size
        if kind != frames.HEADERS or flags != frames.END_HEADERS:
            return False
        block, timeout = split_timeout(piece[frames.HEAD_SIZE : start])
        behavior = self._known.get(block)
        body = start + frames.MESSAGE_HEAD_SIZE
        length = len(piece) - body
        if behavior is None or not timeout or length < 0:
            return False
        expected = length + 5, frames.DATA, frames.END_STREAM, number, 0, length
        if frames.read_message_head(piece, start) != expected:
            return False
        if not number % 2 or number <= self._newest or length > self.most:
            return False
        seconds = seconds_of(timeout)
        self.skip(len(piece))
        self.took(5 + length)
        self._newest = number
        stream = self.open(number)
        stream.took_whole(length)
        call = IncomingCall(self, stream, seconds)
        self._calls[number] = behavior, call
        behavior(piece[body:], call)
        return True

    def tick(self) -> None:
        """See Http2Connection: a connection has to prove itself in time."""
        late = time.monotonic() > self._peer.since + self._server.settings.handshake
        if late and self._peer.connection is None:
            raise ConnectionBroken("the other end has made no call in time")

    def newest(self) -> int:
        """See Http2Connection."""
        return self._newest

    def on_headers(self, number: int, block: bytes, ends: bool) -> None:
        """A call begins; or its client ends it with trailers."""
        headers, seconds = self.headers.read(block)
        if number in self.streams:
            if not ends:
                raise ConnectionBroken(f"stream {number} has headers in its middle")
            self.on_end(self.streams[number])
            return
        if not number % 2 or number <= self._newest:
            raise ConnectionBroken(f"a call comes on stream {number} after stream {self._newest}")
        self._newest = number
        stream = self.open(number)
        refused = self._refusal(headers)
        if refused:
            self.answer(stream, None, *refused, {})
            return
        self._peer.connection = self
        call = IncomingCall(self, stream, seconds)
        behavior = self._server.behaviors[headers[":path"]]
        if len(self._known) < _MOST_KNOWN and self.headers.knows(block):
            self._known[split_timeout(block)[0]] = behavior
        self._calls[number] = (behavior, call)
        self._coming += 1
        if ends:
            self.on_end(stream)

    def _refusal(self, headers: dict[str, str]) -> tuple[int, str] | None:
        """The status and words with which a call is refused before its message is taken in."""
        settings = self._server.settings
        if settings.token is not None and not _equal(
            headers.get("authorization", ""), settings.token
        ):
            return _UNAUTHENTICATED, "the call does not carry this job's token"
        if headers.get(":path") not in self._server.behaviors:
            return _UNIMPLEMENTED, f"method {headers.get(':path')!r} is not answered here"
        if len(self.streams) > settings.streams:
            return (
                _EXHAUSTED,
                f"{len(self.streams) - 1} calls are open, the limit is {settings.streams}",
            )
        if self._coming >= settings.incoming:
            return _EXHAUSTED, (
                f"{self._coming} messages are on their way over this connection, the limit is "
                f"{settings.incoming}; send fewer at a time, or raise incoming in PSFLEET_LIMITS"
            )
        return None

    def on_end(self, stream: StreamState) -> None:
        """The request is here."""
        found = self._calls.get(stream.number)
        if found is None:
            return
        self._coming -= 1
        behavior, call = found
        if not stream.is_whole:
            self.answer(stream, None, _INVALID, "the call ended without its message", {})
            return
        message, stream.content = stream.content, b""
        behavior(message, call)

    def on_reset(self, stream: StreamState) -> None:
        """The client does not wait any more."""
        found = self._calls.pop(stream.number, None)
        if found is not None:
            if not stream.is_whole:
                self._coming -= 1
            found[1].lose()

    def answer(
        self,
        stream: StreamState,
        message: bytes | None,
        code: int,
        details: str,
        metadata: dict[str, str],
    ) -> None:
        """End a call. If the connection breaks, its reading thread sees that too."""
        self._calls.pop(stream.number, None)
        try:
            if code or message is None:
                self._fail(stream, failure_trailers(code or _UNKNOWN, details, metadata))
            else:
                self.send_message(stream, OK_HEADERS, message, OK_TRAILERS)
        except ConnectionBroken:
            pass

    def _fail(self, stream: StreamState, block: bytes) -> None:
        flags = frames.END_HEADERS | frames.END_STREAM
        parts: list[Part] = [frames.frame(frames.HEADERS, flags, stream.number, block)]
        if not stream.is_whole:  # what still comes of the message is not wanted
            parts.append(frames.reset(stream.number, _NO_ERROR))
        with self.sending:
            if not stream.closed:
                self.drop(stream)
                self.transport.send(parts)


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())
