"""A client's end of a connection that sends any bytes and reads frames."""

import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from psfleet.core.net.http2 import frames
from tests.http2.calls import opened

GRPC = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test.Echo/Echo"),
    (":authority", "test"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)
"""Headers of a call."""

Fields = Sequence[tuple[str, str]]


def block(fields: Fields) -> bytes:
    """A header block of literals without index."""
    return b"".join(
        b"\0" + b"".join(bytes((len(one),)) + one.encode("latin-1") for one in field)
        for field in fields
    )


def headers(stream: int, fields: Fields = GRPC, flags: int = frames.END_HEADERS) -> bytes:
    """A frame of headers."""
    return frames.frame(frames.HEADERS, flags, stream, block(fields))


def message(stream: int, content: bytes = b"hello", flags: int = frames.END_STREAM) -> bytes:
    """A message in one frame."""
    return frames.frame(
        frames.DATA, flags, stream, b"\0" + len(content).to_bytes(4, "big") + content
    )


def goaway(code: int) -> tuple[int, int, bytes]:
    """What a frame that ends the connection begins with; see `RawConnection.until`."""
    return frames.GOAWAY, 0, code.to_bytes(4, "big")


def rst(code: int, stream: int = 1) -> tuple[int, int, bytes]:
    """A frame that ends a stream; see `RawConnection.until`."""
    return frames.RST_STREAM, stream, code.to_bytes(4, "big")


class RawConnection:
    """A connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._rest = b""
        sock.settimeout(60)

    def send(self, *parts: bytes) -> None:
        """Write bytes; a server that has closed the connection meanwhile says why in what is read."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(b"".join(parts))

    def read(self) -> tuple[int, int, int, bytes] | None:
        """Type, flags, stream and payload of the next frame; None: the connection has ended."""
        if not self._has(frames.HEAD_SIZE):
            return None
        length, kind, flags, stream = frames.read_head(self._rest)
        assert self._has(frames.HEAD_SIZE + length)
        payload = self._rest[frames.HEAD_SIZE : frames.HEAD_SIZE + length]
        self._rest = self._rest[frames.HEAD_SIZE + length :]
        return kind, flags, stream, payload

    def _has(self, size: int) -> bool:
        while len(self._rest) < size:
            try:
                more = self._socket.recv(1 << 16)
            except ConnectionResetError:
                more = b""
            if not more:
                return False
            self._rest += more
        return True

    def until(self, kind: int, stream: int, content: bytes) -> int:
        """Read up to the frame of this kind and stream that has this in it; its flags.

        Of GOAWAY and RST_STREAM the content is the error code, and no other one may come.
        """
        while True:
            found = self.read()
            assert found is not None, "the connection has ended"
            if found[0] in (frames.GOAWAY, frames.RST_STREAM) and kind not in (
                frames.HEADERS,
                frames.DATA,
            ):
                assert found[0] == kind, found
                assert found[2] == stream
                assert found[3][4 * (kind == frames.GOAWAY) :][:4] == content, found
                return found[1]
            if found[0] == kind and found[2] == stream and content in found[3]:
                return found[1]

    def ping(self, text: bytes = b"alive???") -> None:
        """Return when the server has answered; nothing but that may end the connection."""
        self.send(frames.frame(frames.PING, 0, 0, text))
        while True:
            found = self.read()
            assert found is not None, "the connection has ended"
            assert found[0] != frames.GOAWAY, found
            if found[0] == frames.PING:
                assert found == (frames.PING, frames.ACK, 0, text)
                return

    def ends(self) -> None:
        """Return when the server has closed the connection."""
        while self.read() is not None:
            pass


@contextlib.contextmanager
def talking(path: Path | str, preface: bytes = frames.PREFACE) -> Iterator[RawConnection]:
    """A connection to a server that has got the preface and settings."""
    with opened(str(path)) as sock:
        connection = RawConnection(sock)
        connection.send(preface, frames.settings({}))
        yield connection
