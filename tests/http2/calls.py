"""A server of psfleet's HTTP/2 on a unix socket, and clients of it."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from psfleet.core.net.http2.calls import InboundMessages, IncomingCall
from psfleet.core.net.http2.http2_client import Http2Client
from psfleet.core.net.http2.http2_server import Http2Server
from psfleet.core.net.http2.server_connection import ServerSettings
from psfleet.core.net.http2.socket_transport import PlainTransport

SETTINGS = ServerSettings(
    message=1 << 28, connections=20, handshakes=4, streams=100, incoming=8, handshake=10.0
)


def only(token: str) -> Callable[[str, str], str]:
    """Refuse all other tokens."""
    return lambda path, authorization: (
        "" if authorization == token else "the call does not carry this job's token"
    )


def echo(request: bytes, call: IncomingCall) -> None:
    """Answer with the request."""
    call.end(request)


def later(request: bytes, call: IncomingCall) -> None:
    """The same from another thread."""
    threading.Thread(target=echo, args=(request, call)).start()


def fail(request: bytes, call: IncomingCall) -> None:
    """Answer with an error whose text is the request."""
    call.set_code(11)
    call.set_details(request.decode())
    call.set_trailing_metadata((("psfleet-error", "Gap"),))
    call.end(None)


def crash(request: bytes, call: IncomingCall) -> None:
    """Raise what no handler should."""
    raise KeyError(request.decode())


METHODS = {
    "/test.Echo/Echo": echo,
    "/test.Echo/Later": later,
    "/test.Echo/Fail": fail,
    "/test.Echo/Crash": crash,
}


@contextlib.contextmanager
def serving(
    folder: Path,
    settings: ServerSettings = SETTINGS,
    messages: InboundMessages | None = None,
    methods: Mapping[str, Callable[[bytes, IncomingCall], None]] = METHODS,
) -> Iterator[str]:
    """The path of the socket of a server with these methods."""
    server = Http2Server(listening(folder), PlainTransport, methods, settings, messages=messages)
    server.start()
    try:
        yield str(folder / "h2")
    finally:
        server.stop(5.0)


def listening(folder: Path) -> socket.socket:
    """A socket that listens at `h2` in the folder."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "h2"))
    listener.listen(64)
    return listener


def opened(path: str) -> socket.socket:
    """A socket that is connected to the server."""
    end = socket.socket(socket.AF_UNIX)
    end.connect(path)
    return end


@contextlib.contextmanager
def connected(path: str, metadata: tuple[tuple[str, str], ...] = ()) -> Iterator[Http2Client]:
    """A client of the server."""
    with contextlib.closing(
        Http2Client(lambda: PlainTransport(opened(path)), "test", False, 1 << 28, metadata)
    ) as client:
        yield client
