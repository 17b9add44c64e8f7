"""Unary calls over psfleet's HTTP/2, with grpcio at either end."""

import contextlib
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from psfleet.core.net.http2 import frames
from psfleet.core.net.http2.frames import CallFailed, ConnectionBroken, DeadlinePassed
from psfleet.core.net.http2.header_blocks import OK_HEADERS, OK_TRAILERS
from psfleet.core.net.http2.http2_client import Http2Client
from psfleet.core.net.http2.socket_transport import PlainTransport
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.http2.calls import SETTINGS, connected, listening, only, opened, serving
from tests.http2.raw_connection import headers, message, talking
from tests.pools import grpcio_server

SIZES = [0, 1, 5, 16_379, 16_384, 65_530, 65_536, (1 << 20) + 3, (1 << 24) + 7]
SENTENCE = "100 % of ids: ä, 'x'; \n%41"
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@contextlib.contextmanager
def grpcio_channel(path: str) -> Iterator[grpc.Channel]:
    """A client of grpcio's."""
    with grpc.insecure_channel(f"unix:{path}", options=OPTIONS) as channel:
        yield channel


def _fail(request: bytes, context: grpc.ServicerContext) -> bytes:
    context.set_trailing_metadata((("psfleet-error", "Gap"),))
    context.abort(grpc.StatusCode.OUT_OF_RANGE, request.decode())


@contextlib.contextmanager
def client_of_grpcio() -> Iterator[Http2Client]:
    """A client of ours at a server of grpcio's, which has some of METHODS."""
    handler = grpc.unary_unary_rpc_method_handler
    methods = {"Echo": handler(lambda request, context: request), "Fail": handler(_fail)}
    with grpcio_server("test.Echo", methods, options=OPTIONS) as endpoint:
        host, _, port = endpoint.partition(":")

        def connect() -> PlainTransport:
            return PlainTransport(socket.create_connection((host, int(port))))

        with contextlib.closing(Http2Client(connect, "test", False, 1 << 28)) as client:
            yield client


@pytest.mark.parametrize("size", SIZES)
def test_messages_arrive_as_they_were(tmp_path: Path, size: int) -> None:
    """Of any size, both ways, answered at once or later, between every pair of ends."""
    message = random.Random(size).randbytes(size)
    with serving(tmp_path) as path, connected(path) as client, grpcio_channel(path) as channel:
        for method in ("/test.Echo/Echo", "/test.Echo/Later"):
            assert client.call(method, message, 30) == message
            assert channel.unary_unary(method, None, None)(message, timeout=60) == message
    with client_of_grpcio() as client:
        assert client.call("/test.Echo/Echo", message, 30) == message


def test_errors_arrive_as_they_were(tmp_path: Path) -> None:
    """Code, text and the name of the class, between every pair of ends; unknown methods too."""
    with serving(tmp_path) as path, connected(path) as client, grpcio_channel(path) as channel:
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary("/test.Echo/Fail", None, None)(SENTENCE.encode(), timeout=60)
        assert error.value.code() is grpc.StatusCode.OUT_OF_RANGE
        assert error.value.details() == SENTENCE
        metadata: Any = error.value.trailing_metadata()
        assert dict(metadata)["psfleet-error"] == "Gap"
        check_errors(client)
    with client_of_grpcio() as client:
        check_errors(client)


def check_errors(client: Http2Client) -> None:
    """A client of ours hears them, and goes on."""
    with pytest.raises(CallFailed) as failed:
        client.call("/test.Echo/Fail", SENTENCE.encode(), 30)
    assert (failed.value.code, failed.value.details) == (11, SENTENCE)
    assert failed.value.metadata["psfleet-error"] == "Gap"
    with pytest.raises(CallFailed) as failed:
        client.call("/test.Echo/Nothing", b"", 30)
    assert failed.value.code == 12
    assert client.call("/test.Echo/Echo", b"on", 30) == b"on"


def test_a_handler_that_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its call ends with INTERNAL and a sentence, and its connection goes on; the log has the traceback."""
    crashes = replace(SETTINGS, at_once={"/test.Echo/Echo": lambda request: [][len(request)]})
    with serving(tmp_path) as path, connected(path) as client:
        for _ in range(3):  # the second and third with known headers
            with pytest.raises(CallFailed) as raised:
                client.call("/test.Echo/Crash", b"what", 60)
            assert (raised.value.code, raised.value.details) == (
                13,
                "the server failed: KeyError: 'what'; see its log",
            )
            assert client.call("/test.Echo/Echo", b"fine", 60) == b"fine"
            assert len(client.idle) == 1
            assert capsys.readouterr().err.count("Traceback") == 1
    (tmp_path / "h2").unlink()
    with serving(tmp_path, crashes) as path, connected(path) as client:
        assert client.call("/test.Echo/Echo", b"fine", 60) == b"fine"  # read frame by frame
        for _ in range(2):
            with pytest.raises(CallFailed, match="the server failed: IndexError: "):
                client.call("/test.Echo/Echo", b"fine", 60)
            assert len(client.idle) == 1


def test_many_calls_at_once(tmp_path: Path) -> None:
    """One connection of grpcio's carries many calls; threads of ours have a connection each."""
    messages = [random.Random(seed).randbytes(150_000) for seed in range(6)]
    settings = replace(SETTINGS, handshakes=20)
    with (
        serving(tmp_path, settings) as path,
        connected(path) as client,
        grpcio_channel(path) as channel,
    ):
        method = channel.unary_unary("/test.Echo/Later", None, None)
        futures = [method.future(message, timeout=60) for message in messages]
        with ThreadPoolExecutor(6) as pool:
            replies = pool.map(lambda one: client.call("/test.Echo/Echo", one, 30), messages)
            assert list(replies) == messages
        assert [future.result() for future in futures] == messages


def test_a_deadline_ends_a_call(tmp_path: Path) -> None:
    """The client goes on over another connection."""
    with serving(tmp_path) as path, connected(path) as client:
        silent = socket.socket(socket.AF_UNIX)
        silent.bind(str(tmp_path / "silent"))
        silent.listen(1)
        mute = Http2Client(
            lambda: PlainTransport(opened(str(tmp_path / "silent"))), "test", False, 1 << 20
        )
        with contextlib.closing(silent), contextlib.closing(mute), pytest.raises(DeadlinePassed):
            mute.call("/test.Echo/Echo", b"", 0.1)
        assert client.call("/test.Echo/Echo", b"on", 30) == b"on"


def test_a_lost_connection_is_said(tmp_path: Path) -> None:
    """A server that stops ends what is idle; the next call says so."""
    with contextlib.ExitStack() as stack:
        with serving(tmp_path) as path:
            client = stack.enter_context(connected(path))
            assert client.call("/test.Echo/Echo", b"1", 30) == b"1"
        with pytest.raises((ConnectionBroken, ConnectionRefusedError)):
            client.call("/test.Echo/Echo", b"2", 30)


RIGHT, WRONG = (("authorization", f"Bearer {token}") for token in ("right", "wrong"))


def test_only_the_token_opens(tmp_path: Path) -> None:
    """A call without the job's token is refused before its message is taken in. Of two tokens neither opens,
    whichever is the right one: nobody has to know which of them counts."""
    with serving(tmp_path, replace(SETTINGS, refuse=only("Bearer right"))) as path:
        with connected(path, (RIGHT,)) as client:
            assert client.call("/test.Echo/Echo", b"on", 30) == b"on"
        for metadata in ((), (WRONG,), (RIGHT, WRONG), (WRONG, RIGHT), (RIGHT, RIGHT)):
            with (
                connected(path, metadata) as client,
                pytest.raises(CallFailed, match="does not carry this job's token") as failed,
            ):
                client.call("/test.Echo/Echo", b"x" * 1_000_000, 30)
            assert failed.value.code == 16


def test_a_server_that_stops_says_so(tmp_path: Path) -> None:
    """The call that it still takes is answered; then its clients are told the last one that it has taken."""
    with contextlib.ExitStack() as stack:
        with serving(tmp_path) as path:
            client = stack.enter_context(talking(path))
            client.send(headers(1), message(1))
            client.until(frames.DATA, 1, b"hello")
        client.until(frames.GOAWAY, 0, bytes(4))
        client.until(frames.GOAWAY, 0, bytes(4))
        client.ends()


def test_a_client_that_closes_says_so(tmp_path: Path) -> None:
    """Its last frame is GOAWAY."""
    with contextlib.closing(listening(tmp_path)) as listener:
        client = Http2Client(
            lambda: PlainTransport(opened(str(tmp_path / "h2"))), "test", False, 1 << 20
        )
        call = client.begin("/test.Echo/Echo", b"", 60)
        sock, _ = listener.accept()
        with sock:
            last = frames.END_HEADERS | frames.END_STREAM
            opening = frames.frame(frames.HEADERS, frames.END_HEADERS, 1, OK_HEADERS)
            closing = frames.frame(frames.HEADERS, last, 1, OK_TRAILERS)
            empty = frames.frame(frames.DATA, 0, 1, bytes(5))
            sock.sendall(frames.settings({}) + opening + empty + closing)
            assert call.finish() == b""
            client.close()
            said = b""
            while more := sock.recv(1 << 16):
                said += more
        assert said.endswith(frames.goaway(0, 0, ""))


def test_a_message_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """No memory is taken for it, and the connection goes on."""
    with serving(tmp_path, replace(SETTINGS, message=1000)) as path, connected(path) as client:
        assert client.call("/test.Echo/Echo", b"x" * 1000, 30) == b"x" * 1000
        with pytest.raises(CallFailed, match="the message has 1001 bytes, the limit is 1000"):
            client.call("/test.Echo/Echo", b"x" * 1001, 30)
        assert client.call("/test.Echo/Echo", b"on", 30) == b"on"


def test_strangers_keep_nobody_out(tmp_path: Path) -> None:
    """The oldest connection that has made no call is closed when there are more than `handshakes`."""
    with serving(tmp_path) as path, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(opened(path)) for _ in range(SETTINGS.handshakes + 3)]
        client = stack.enter_context(connected(path))
        assert client.call("/test.Echo/Echo", b"on", 30) == b"on"
        strangers[0].settimeout(30)
        while strangers[0].recv(1000):
            pass


@pytest.mark.parametrize("seed", range(6))
def test_noise_ends_one_connection_only(tmp_path: Path, seed: int) -> None:
    """Random and damaged frames never stop the server, nor a call of somebody else."""
    dice = random.Random(seed)
    with serving(tmp_path) as path, connected(path) as client:
        assert client.call("/test.Echo/Echo", b"on", 30) == b"on"  # from now on it is no stranger
        for _ in range(10):
            with opened(path) as stranger, contextlib.suppress(OSError):
                stranger.sendall(frames.PREFACE * dice.choice([0, 1, 1, 1]))
                for _ in range(dice.randrange(1, 6)):
                    stranger.sendall(noise(dice))
        assert client.call("/test.Echo/Echo", b"on", 30) == b"on"


def noise(dice: random.Random) -> bytes:
    """A frame in which something is wrong."""
    payload = dice.randbytes(dice.choice([0, 1, 4, 5, 8, 9, 60]))
    kind, flags = dice.randrange(12), dice.choice([0, 1, 4, 5, 8, 13, 0x25, 255])
    whole = frames.frame(kind, flags, dice.choice([0, 1, 2, 3, 2**31 - 1]), payload)
    return whole if dice.random() < 0.7 else whole[: dice.randrange(len(whole))] + dice.randbytes(3)


def test_no_socket_is_left() -> None:
    """A server of a fleet removes both of its sockets when it ends."""
    with LocalFleet(1, 1, in_process=True) as fleet:
        folder = Path(fleet.endpoints[0].removeprefix("unix:")).parent
        assert [path.name for path in folder.glob("*.h2")] == ["0.sock.h2"]
        fleet.connect(0, "async").close()
        assert fleet.wait() == [0]
        assert not [*folder.glob("*.sock*")]
