"""HTTP/1.1: connections whose requests one thread each answers, one after the other."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any

from typing_extensions import override

from psfleet.http2.connection_admission import ServedConnection
from psfleet.http2.frames import ConnectionBroken, ErrorCode
from psfleet.http2.http2_server import Http2Server
from psfleet.http2.socket_transport import Transport
from psfleet.serving.grpc_service import serving_module

LONGEST = 64 << 20
"""Bytes of a request's body."""
Reply = tuple[int, bytes, str, list[tuple[bytes, bytes]]]
"""Status, body, type of the content, more headers."""
_LONGEST_HEAD = 32 << 10  # bytes of the path and the headers of a request
_IDLE = 75.0  # seconds without a byte after which a connection is closed
_BUFFER = 64 << 10


@dataclass
class HttpRequest:
    """A request.

    Attributes:
        path, headers: As they came; headers of lower case, those of one name after each other.
        method: GET, POST or another one.
        body: All of its bytes.
        refusal: Reply that it gets in place of its own; None: it is taken.
        keeps_open: True if the client wants to make another one.
    """

    path: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    method: str = ""
    body: bytes = b""
    refusal: Reply | None = None
    keeps_open: bool = True


class HttpConnection:
    """The server's end of a connection. Implements psfleet.http2.connection_admission.ServedConnection.

    Args:
        transport: Its bytes.
        check: Says whether a request may be answered, by its path and headers: None, or its reply.
        reply_to: The reply to a request. It does not raise.
        too_large: Reply to one that is.
    """

    def __init__(
        self,
        transport: Transport,
        check: Callable[[HttpRequest], Reply | None],
        reply_to: Callable[[HttpRequest], Reply],
        too_large: Reply,
    ) -> None:
        self.transport = transport
        self.is_authenticated = self.is_busy = False
        self._check, self._reply_to, self._too_large = check, reply_to, too_large
        self._httptools = serving_module("httptools")
        self._parser: Any = self._httptools.HttpRequestParser(self)
        self._view = memoryview(bytearray(_BUFFER))
        self._request = HttpRequest()
        self._parts: list[bytes] = []
        self._size = 0  # of the headers, then of the body
        self._whole: list[HttpRequest] = []
        self._last = time.monotonic()
        self._is_ending = False

    def run(self) -> None:
        """See ServedConnection."""
        while True:
            size = self.transport.receive(self._view, self.tick)
            self._last = time.monotonic()
            try:
                self._parser.feed_data(self._view[:size])
            except (self._httptools.HttpParserError, self._httptools.HttpParserUpgrade) as error:
                self._whole.append(self._refused(error))
            whole, self._whole = self._whole, []
            for request in whole:
                self._send_reply(request)
            self._last = time.monotonic()

    def _refused(self, error: Exception) -> HttpRequest:
        request = self._request
        if request.refusal is None:
            request.refusal = 400, b"the request is no HTTP/1.1\n", "text/plain", []
        request.keeps_open = False
        return request

    def _send_reply(self, request: HttpRequest) -> None:
        self.is_busy = True
        status, body, kind, more = request.refusal or self._reply_to(request)
        keeps_open = request.keeps_open and not self._is_ending
        head = _head(status, kind, int(time.time()))
        for name, value in [*more, *([] if keeps_open else [(b"connection", b"close")])]:
            head += b"%b: %b\r\n" % (name, value)
        head += b"content-length: %d\r\n\r\n" % len(body)
        self.transport.send([head + body] if request.method != "HEAD" else [head])
        self.is_busy = False
        if request.refusal is not None:
            self._pass_over()
        if not keeps_open:
            raise ConnectionBroken("the connection has ended")

    def _pass_over(self) -> None:
        """Drop what a client still sends: unread, it would end the connection before the reply is read."""
        self._last = time.monotonic() - _IDLE  # until it is silent
        for _ in range(LONGEST // _BUFFER):
            self.transport.receive(self._view, self.tick)

    # -- what the parser finds -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        self._request, self._parts, self._size = HttpRequest(), [], 0

    def on_url(self, url: bytes) -> None:
        """A part of the path."""
        self._grow(len(url), _LONGEST_HEAD)
        self._request.path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._grow(len(name) + len(value), _LONGEST_HEAD)
        self._request.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """All headers are here: whoever may not ask need not send more."""
        request, self._size = self._request, 0
        request.method = self._parser.get_method().decode("ascii")
        request.refusal = self._check(request)
        if request.refusal is not None:
            raise ConnectionRefusedError
        self.is_authenticated = True
        if (b"expect", b"100-continue") in request.headers:
            self.transport.send([b"HTTP/1.1 100 Continue\r\n\r\n"])

    def on_body(self, part: bytes) -> None:
        """A part of the body."""
        self._grow(len(part), LONGEST)
        self._parts.append(part)

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._request.body = b"".join(self._parts)
        self._request.keeps_open = self._parser.should_keep_alive()
        self._whole.append(self._request)

    def _grow(self, size: int, most: int) -> None:
        self._size += size
        if self._size > most:
            self._request.refusal = self._too_large
            raise OverflowError

    # -- as all connections --------------------------------------------------------------------

    def tick(self) -> None:
        """See ServedConnection."""
        if time.monotonic() - self._last > _IDLE:
            raise ConnectionBroken("the client is silent")

    def newest(self) -> int:
        """See ServedConnection."""
        return 0

    def say_goodbye(self, newest: int, code: ErrorCode, details: str) -> None:
        """See ServedConnection: the next reply is the last one."""
        self._is_ending = True


@lru_cache(64)
def _head(status: int, kind: str, second: int) -> bytes:
    """The first lines of a reply."""
    date, phrase = formatdate(second, usegmt=True), HTTPStatus(status).phrase
    return f"HTTP/1.1 {status} {phrase}\r\ndate: {date}\r\ncontent-type: {kind}\r\n".encode()


class HttpListener(Http2Server):
    """Answers requests of HTTP/1.1 on a listening socket, as Http2Server does calls.

    Args:
        connection: Makes the server's end of a connection.
        arguments: As for Http2Server.
    """

    def __init__(
        self, connection: Callable[[Transport], ServedConnection], *arguments: Any
    ) -> None:
        super().__init__(*arguments)
        self._make = connection

    @override
    def _connection(self, transport: Transport, since: float) -> ServedConnection:
        return self._make(transport)
