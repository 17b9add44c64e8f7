"""Small calls to a server and their answers, which mostly come in one piece; headers as the call before."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from psfleet.core.net.http2 import frames
from psfleet.core.net.http2.frames import ConnectionBroken
from psfleet.core.net.http2.header_blocks import (
    OK_HEADERS,
    OK_TRAILERS,
    request_prefix,
    timeout_field,
)
from psfleet.core.net.http2.http2_client import ClientConnection, Http2Client
from psfleet.core.net.http2.http2_server import Http2Server
from psfleet.core.net.http2.server_connection import ServerSettings
from psfleet.core.net.http2.socket_transport import PlainTransport
from tests.http2.calls import METHODS, SETTINGS, only

MESSAGE = b"\0\1values"
TOKEN = (("authorization", "token"),)


class Calling:
    """A client's end of a connection on which the server reads each write by itself."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._received = b""
        end.settimeout(60)
        end.send(frames.PREFACE + frames.settings({}) + frames.window_update(0, 1 << 30))

    def send(self, *parts: bytes) -> None:
        """What the client writes."""
        for part in filter(None, parts):
            self._end.send(part)

    def hear(self, wanted: bytes) -> None:
        """Return when the server has said this; what it says before is passed over."""
        while wanted not in self._received:
            said = self._end.recv(1 << 16)
            assert said, "the server has closed the connection"
            self._received += said

    def ends(self) -> bool:
        """Whether the server closes the connection."""
        with contextlib.suppress(ConnectionResetError):
            while self._end.recv(1 << 16):
                pass
        return True


@contextlib.contextmanager
def calling(folder: Path, settings: ServerSettings = SETTINGS) -> Iterator[Calling]:
    """A connection to a server with METHODS."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(folder / "h2"))
        listener.listen(4)
        server = Http2Server(listener, PlainTransport, METHODS, settings)
        server.start()
        try:
            end.connect(str(folder / "h2"))
            yield Calling(end)
        finally:
            end.close()
            server.stop(5.0)


def call(stream: int, message: bytes = MESSAGE, *, size: int = 0, length: int = 0) -> bytes:
    """The bytes of a call. `size`, `length`: by which its frame and its message lie about theirs."""
    block = request_prefix("/test.Echo/Echo", "test", False, TOKEN) + timeout_field(60)
    whole = b"\0" + (len(message) + length).to_bytes(4, "big") + message
    return (
        frames.frame(frames.HEADERS, frames.END_HEADERS, stream, block)
        + frames.head(len(whole) + size, frames.DATA, frames.END_STREAM, stream)
        + whole
    )


def reply(stream: int, message: bytes = MESSAGE, *, size: int = 0, length: int = 0) -> bytes:
    """The bytes of its answer. `size`, `length`: by which its frame and its message lie about theirs."""
    whole = b"\0" + (len(message) + length).to_bytes(4, "big") + message
    last = frames.END_HEADERS | frames.END_STREAM
    return (
        frames.frame(frames.HEADERS, frames.END_HEADERS, stream, OK_HEADERS)
        + frames.head(len(whole) + size, frames.DATA, 0, stream)
        + whole
        + frames.frame(frames.HEADERS, last, stream, OK_TRAILERS)
    )


@pytest.mark.parametrize("message", [b"", MESSAGE, bytes(5000)])
def test_a_call_is_the_same_in_one_part_and_in_two(tmp_path: Path, message: bytes) -> None:
    """Wherever it is cut, beside another one, and behind frames of the connection too."""
    with calling(tmp_path) as client:
        stream = 1
        for cut in range(0, len(call(1, message)), 1 + len(message) // 20):
            whole = call(stream, message)
            client.send(whole[:cut], whole[cut:])
            client.hear(reply(stream, message))
            stream += 2
        client.send(call(stream, message) + call(stream + 2, message))
        client.hear(reply(stream, message))
        client.hear(reply(stream + 2, message))
        ping = frames.frame(frames.PING, frames.ACK, 0, bytes(8))
        client.send(ping + call(stream + 4, message))
        client.hear(reply(stream + 4, message))


def test_a_frame_that_lies_ends_the_connection(tmp_path: Path) -> None:
    """It says that it is longer than it is, so nobody knows where the next one begins."""
    with calling(tmp_path) as client:
        client.send(call(1))
        client.hear(reply(1))
        client.send(call(3, size=1), call(5))
        assert client.ends()


@pytest.mark.parametrize(
    ("length", "words"), [(-1, b"a message of 7 bytes has more"), (1, b"ended without its message")]
)
def test_a_message_that_lies_ends_its_call(tmp_path: Path, length: int, words: bytes) -> None:
    """It says that it is shorter, or longer, than its frame; other calls go on."""
    with calling(tmp_path) as client:
        client.send(call(1))
        client.hear(reply(1))
        client.send(call(3, length=length), call(5))
        client.hear(words)
        client.hear(reply(5))


def test_a_number_comes_once(tmp_path: Path) -> None:
    """A call on a stream that was used before ends the connection."""
    with calling(tmp_path) as client:
        for stream in (1, 3):
            client.send(call(stream))
            client.hear(reply(stream))
        client.send(call(3))
        assert client.ends()


def test_headers_are_known_only_of_calls_that_were_taken(tmp_path: Path) -> None:
    """A call that was refused for its token is refused again."""
    with calling(tmp_path, replace(SETTINGS, refuse=only("another"))) as client:
        for stream in (1, 3, 5):
            client.send(call(stream))
            client.hear(b"does not carry this job")
            client._received = b""


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


READER = """
import resource, socket, sys
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.tls_sockets import accepts
transport = accepts(Access(), "unix:/x")(socket.socket(fileno=int(sys.argv[1])))
place = memoryview(bytearray(64))
before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
for _ in range(100):
    transport.receive(place, lambda: None)
    transport.send([b"reply"])
print(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)
"""


def test_a_server_is_woken_once_for_a_call() -> None:
    """A thread that waits for a call over a Unix socket sleeps on while the client reads the last reply."""
    here, there = socket.socketpair()
    command = [sys.executable, "-c", READER, str(there.fileno())]
    with here, there:
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, text=True, pass_fds=[there.fileno()]) as server:
            for _ in range(100):
                time.sleep(0.002)  # so that the server waits again
                here.send(b"call")
                time.sleep(0.002)
                assert here.recv(64) == b"reply"
            output, _ = server.communicate(timeout=60)
    assert int(output) < 150
