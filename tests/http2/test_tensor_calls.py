"""Whether a call goes over HTTP/2: what a worker makes of the endpoint that its server names."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from psfleet.wire.access import Access
from psfleet.wire.v1.shard_pb2 import TransportReply
from psfleet_worker.connection.tensor_calls import TensorCalls
from tests.http2.calls import serving


class _Server:
    """What a worker hears of one server; `asked`: where it was each time that it was asked."""

    def __init__(self, endpoint: str, path: str) -> None:
        self.endpoint = endpoint
        self.path = path
        self.asked: list[str] = []

    def ask(self, seconds: float) -> bytes:
        """Answer Shard/Transport."""
        self.asked.append(self.endpoint)
        return TransportReply(path=self.path).SerializeToString()


@contextlib.contextmanager
def calls_to(server: _Server) -> Iterator[TensorCalls]:
    """A worker's calls to it."""
    calls = TensorCalls("server 0", lambda: server.endpoint, Access(), server.ask)
    try:
        yield calls
    finally:
        calls.close()


def test_a_server_that_has_moved_is_asked_anew(tmp_path: Path) -> None:
    """The connection to the earlier place is given up even where that still answers."""
    server = _Server("unix:first", "")
    with serving(tmp_path) as path, calls_to(server) as calls:
        server.path = path
        assert calls.carries("Shard/Push")
        assert calls.carries("Shard/Pull")
        server.endpoint = "unix:second"
        assert calls.carries("Shard/Push")
        server.endpoint, server.path = "unix:third", ""
        assert not calls.carries("Shard/Push")
        assert not calls.is_connected
    assert server.asked == ["unix:first", "unix:second", "unix:third"]


def test_a_closed_way_is_tried_three_times(tmp_path: Path) -> None:
    """Then calls stay with grpcio, until the server moves to where the way is open."""
    server = _Server("unix:first", str(tmp_path / "nobody"))
    with serving(tmp_path) as path, calls_to(server) as calls:
        assert [calls.carries("Shard/Push") for _ in range(6)] == [False] * 6
        assert server.asked == ["unix:first"] * 3
        server.endpoint, server.path = "unix:second", path
        assert calls.carries("Shard/Push")


def test_other_methods_stay_with_grpcio(tmp_path: Path) -> None:
    """The server is not even asked."""
    server = _Server("unix:first", str(tmp_path / "nobody"))
    with calls_to(server) as calls:
        assert not calls.carries("Coordinator/Beat")
    assert not server.asked
