"""Small answers, which mostly come in one piece."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from psfleet.http2 import frames
from psfleet.http2.call_errors import ConnectionBroken
from psfleet.http2.header_blocks import OK_HEADERS, OK_TRAILERS
from psfleet.http2.http2_client import ClientConnection, Http2Client
from psfleet.http2.socket_transport import PlainTransport

MESSAGE = b"\0\1values"


class Answering:
    """A client, and a server's end of its connection on which each write is read by itself."""

    def __init__(self, here: socket.socket, there: socket.socket) -> None:
        self.client = Http2Client(lambda: PlainTransport(here), "test", False, 1 << 20)
        self._there = there
        self._stream = -1

    def call(self) -> tuple[ClientConnection, int]:
        """A call that has left, and its stream."""
        call = self.client.begin("/test.Echo/Echo", b"", 60)
        self._stream += 2
        with contextlib.suppress(BlockingIOError):
            while self._there.recv(1 << 16, socket.MSG_DONTWAIT):
                pass
        return call, self._stream

    def send(self, *parts: bytes) -> None:
        """What the server answers."""
        for part in parts:
            self._there.send(part)


@pytest.fixture
def answering() -> Iterator[Answering]:
    """A connection without a server."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        made = Answering(here, there)
        yield made
        made.client.close()


def reply(stream: int, message: bytes = MESSAGE, *, size: int = 0, length: int = 0) -> bytes:
    """The bytes of an answer. `size`, `length`: by which its frame and its message lie about theirs."""
    whole = b"\0" + (len(message) + length).to_bytes(4, "big") + message
    last = frames.END_HEADERS | frames.END_STREAM
    return (
        frames.frame(frames.HEADERS, frames.END_HEADERS, stream, OK_HEADERS)
        + frames.head(len(whole) + size, frames.DATA, 0, stream)
        + whole
        + frames.frame(frames.HEADERS, last, stream, OK_TRAILERS)
    )


@pytest.mark.parametrize("message", [b"", MESSAGE, bytes(2000)])
def test_a_reply_is_the_same_in_one_part_and_in_two(answering: Answering, message: bytes) -> None:
    """Wherever it is cut, and behind frames of the connection too."""
    for cut in range(0, len(reply(1, message)), 1 + len(message) // 20):
        call, stream = answering.call()
        whole = reply(stream, message)
        answering.send(*(part for part in (whole[:cut], whole[cut:]) if part))
        assert call.finish() == message
    call, stream = answering.call()
    answering.send(frames.frame(frames.PING, frames.ACK, 0, bytes(8)) + reply(stream, message))
    assert call.finish() == message


@pytest.mark.parametrize(("size", "length"), [(1, 0), (-1, 0), (0, 1), (0, -1)])
def test_a_reply_that_lies_is_refused(answering: Answering, size: int, length: int) -> None:
    """A frame or a message of another length than it says ends the connection."""
    call, stream = answering.call()
    answering.send(reply(stream, size=size, length=length))
    with pytest.raises(ConnectionBroken):
        call.finish()


def test_a_reply_to_another_call_is_refused(answering: Answering) -> None:
    """It is not taken for the answer to this one."""
    call, stream = answering.call()
    answering.send(reply(stream + 2))
    with pytest.raises(ConnectionBroken, match="not open"):
        call.finish()
