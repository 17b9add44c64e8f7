"""Whether a call goes over HTTP/2: what a worker makes of the endpoint that its server names."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from psfleet.core.base.errors import ServerUnavailable
from psfleet.core.net.connections import tls_sockets
from psfleet.core.net.connections.access import Access
from psfleet.core.net.v1.shard_pb2 import TransportReply
from psfleet_worker.connection.tensor_calls import TensorCalls
from tests.http2.calls import serving


class _Server:
    """What a worker hears of one server; `asked`: where it was each time that it was asked."""

    def __init__(self, endpoint: str, path: str, port: int = 0) -> None:
        self.endpoint = endpoint
        self.path = path
        self.port = port
        self.asked: list[str] = []

    def ask(self, seconds: float) -> bytes:
        """Answer Shard/Transport."""
        self.asked.append(self.endpoint)
        return TransportReply(path=self.path, port=self.port).SerializeToString()


@contextlib.contextmanager
def calls_to(server: _Server) -> Iterator[TensorCalls]:
    """A worker's calls to it."""
    with contextlib.closing(
        TensorCalls("server 0", lambda: server.endpoint, Access(), server.ask)
    ) as calls:
        yield calls


def test_a_server_that_has_moved_is_asked_anew(tmp_path: Path) -> None:
    """The connection to the earlier place is given up even where that still answers."""
    server = _Server("unix:first", "")
    with serving(tmp_path) as path, calls_to(server) as calls:
        server.path = path
        assert calls.carries("Shard/Push", 60.0)
        assert calls.carries("Shard/Pull", 60.0)
        server.endpoint = "unix:second"
        assert calls.carries("Shard/Push", 60.0)
        server.endpoint, server.path = "unix:third", ""
        assert not calls.carries("Shard/Push", 60.0)
        assert calls.client is None
    assert server.asked == ["unix:first", "unix:second", "unix:third"]


def test_a_closed_way_is_tried_three_times(tmp_path: Path) -> None:
    """Then calls stay with grpcio, until the server moves to where the way is open."""
    server = _Server("unix:first", str(tmp_path / "nobody"))
    with serving(tmp_path) as path, calls_to(server) as calls:
        assert [calls.carries("Shard/Push", 60.0) for _ in range(6)] == [False] * 6
        assert server.asked == ["unix:first"] * 3
        server.endpoint, server.path = "unix:second", path
        assert calls.carries("Shard/Push", 60.0)


def test_a_connection_that_is_not_made_in_time_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has not left, and has more time than a connection may take: it is no DeadlineExceeded, which
    would end it."""
    monkeypatch.setattr(tls_sockets, "HANDSHAKE", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as silent,
        contextlib.ExitStack() as stack,
    ):
        where = silent.getsockname()
        server = _Server("127.0.0.1:1", "", where[1])
        calls = stack.enter_context(calls_to(server))
        assert calls.carries("Shard/Push", 60.0)
        call = calls.begin("Shard/Push", b"", 60.0)
        with contextlib.suppress(TimeoutError):  # nobody accepts: soon the queue is full
            while True:
                stack.enter_context(socket.create_connection(where, 0.2))
        with pytest.raises(ServerUnavailable, match="does not answer: no connection within"):
            calls.begin("Shard/Push", b"", 60.0)
        assert calls.client is None
        with pytest.raises(ServerUnavailable):  # the client is closed
            call.finish()


def test_other_methods_stay_with_grpcio(tmp_path: Path) -> None:
    """The server is not even asked."""
    server = _Server("unix:first", str(tmp_path / "nobody"))
    with calls_to(server) as calls:
        assert not calls.carries("Coordinator/Heartbeat", 60.0)
    assert not server.asked
