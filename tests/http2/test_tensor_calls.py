"""Calls that carry tensors: to which address they go, and what becomes of a connection that fails."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from psfleet.core.base.errors import ProtocolError, ServerUnavailable
from psfleet.core.net.connections import tls_sockets
from psfleet.core.net.connections.access import Access
from psfleet_worker.connection.tensor_calls import TensorCalls
from tests.http2.calls import serving


class _Place:
    """Where a worker believes that its server is."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint


@contextlib.contextmanager
def calls_to(place: _Place) -> Iterator[TensorCalls]:
    """A worker's calls to it."""
    with contextlib.closing(TensorCalls("server 0", lambda: place.endpoint, Access())) as calls:
        yield calls


def answered(calls: TensorCalls) -> None:
    """A call reaches the server, which answers that it has no such method."""
    with pytest.raises(ProtocolError, match="is not answered here"):
        calls.call("Shard/Push", b"", 60.0)


def test_a_server_that_has_moved_is_followed(tmp_path: Path) -> None:
    """The connection to the earlier place is given up even where that still answers."""
    with serving(tmp_path) as path:
        Path(f"{tmp_path}/first.h2").symlink_to(path)
        Path(f"{tmp_path}/second.h2").symlink_to(path)
        place = _Place(f"unix:{tmp_path}/first")
        with calls_to(place) as calls:
            before = calls.begin("Shard/Push", b"", 60.0)
            calls.follow()  # it is where it was
            assert calls.client.idle == []
            client, place.endpoint = calls.client, f"unix:{tmp_path}/second"
            calls.follow()
            assert calls.client is not client
            with pytest.raises(ServerUnavailable, match="server 0 does not answer"):
                before.finish()
            answered(calls)


def test_a_server_that_is_away_is_tried_again(tmp_path: Path) -> None:
    """Nobody listens there: each call says so, and the one after the server's start gets through."""
    place = _Place(f"unix:{tmp_path}/sock")
    with calls_to(place) as calls:
        for _ in range(5):
            with pytest.raises(ServerUnavailable, match="cannot connect to"):
                calls.begin("Shard/Push", b"", 60.0)
        with serving(tmp_path) as path:
            Path(f"{tmp_path}/sock.h2").symlink_to(path)
            answered(calls)


def test_a_connection_that_is_not_made_in_time_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call has not left, and has more time than a connection may take: it is no DeadlineExceeded, which
    would end it."""
    monkeypatch.setattr(tls_sockets, "HANDSHAKE", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as silent,
        contextlib.ExitStack() as stack,
    ):
        where = silent.getsockname()
        calls = stack.enter_context(calls_to(_Place(f"127.0.0.1:1/{where[1]}")))
        call = calls.begin("Shard/Push", b"", 60.0)
        with contextlib.suppress(TimeoutError):  # nobody accepts: soon the queue is full
            while True:
                stack.enter_context(socket.create_connection(where, 0.2))
        with pytest.raises(ServerUnavailable, match="does not answer: no connection within"):
            calls.begin("Shard/Push", b"", 60.0)
        calls.close()
        with pytest.raises(ServerUnavailable):
            call.finish()
