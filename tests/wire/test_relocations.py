"""A channel follows a server that moves, and lets nobody wait for where the server was."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from psfleet.core.base.job_files import write_relocations
from psfleet.core.base.settings.declared_settings import ServerLimits
from psfleet.core.net.connections.channel import server_options
from psfleet.core.net.connections.relocations import RelocatingChannel
from tests.pools import grpcio_server
from tests.waiting import until


@contextlib.contextmanager
def server(
    endpoint: str, over: threading.Event | None = None, options: Any = ()
) -> Iterator[threading.Event]:
    """A server that answers "there", or with `over` nothing until that is set; the event of a call."""
    called = threading.Event()

    def reply(request: bytes, context: grpc.ServicerContext) -> bytes:
        called.set()
        if over is not None:
            over.wait()
        return b"there"

    methods = {"Ask": grpc.unary_unary_rpc_method_handler(reply)}
    with grpcio_server("test", methods, endpoint, 1, options):
        try:
            yield called
        finally:
            if over is not None:
                over.set()


def test_a_call_under_way_ends_when_its_server_moves(tmp_path: Path) -> None:
    """The old server keeps silent for ever; the call fails all the same, and the next one is answered."""
    old, new, moves = f"unix:{tmp_path}/old", f"unix:{tmp_path}/new", tmp_path / "moves"
    moved = threading.Event()
    with server(old, threading.Event()) as called, server(new):
        channel = RelocatingChannel(old, moves, grpc.insecure_channel)
        channel.on_move = moved.set
        ask = channel.unary_unary("/test/Ask", None, None)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, b"")
            assert called.wait(120)
            write_relocations(moves, {old: new})
            with pytest.raises(grpc.RpcError) as failed:
                waiting.result(120)
        assert failed.value.code() is grpc.StatusCode.CANCELLED
        assert moved.wait(120)
        assert channel.endpoint == new
        assert ask(b"") == b"there"
        channel.close()
    until(lambda: all(one.name != "moved servers" for one in threading.enumerate()), "end")


def test_a_server_that_moves_while_its_channel_opens_is_followed(tmp_path: Path) -> None:
    """The file changes while the first channel opens, before anything watches it: calls follow the server."""
    moves = tmp_path / "moves"
    endpoints: list[str] = []

    def connect(endpoint: str) -> grpc.Channel:
        endpoints.append(endpoint)
        write_relocations(moves, {"unix:a": "unix:b"})
        return grpc.insecure_channel(endpoint)

    channel = RelocatingChannel("unix:a", moves, connect)
    assert (channel.endpoint, endpoints) == ("unix:b", ["unix:a", "unix:b"])
    channel.close()


def test_one_thread_looks_for_all_channels(tmp_path: Path) -> None:
    """It lives as long as the last channel."""
    moves = tmp_path / "moves"
    channels = [RelocatingChannel(f"unix:{n}", moves, grpc.insecure_channel) for n in "ab"]

    def count() -> int:
        return sum(one.name == "moved servers" for one in threading.enumerate())

    assert count() == 1
    channels[0].close()
    write_relocations(moves, {"unix:a": "unix:c", "unix:b": "unix:d"})
    until(lambda: channels[1].endpoint == "unix:d", "move")
    assert channels[0].endpoint == "unix:a"
    channels[1].close()
    until(lambda: count() == 0, "end")


_HASTY = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
]
_HELD = 5.0
"""Seconds: gRPC pings once a second at most, and the third ping too many closes a connection."""


def test_a_held_call_outlives_many_pings(tmp_path: Path) -> None:
    """Pings far more often than announced do not close the connection ("too_many_pings")."""
    over, place = threading.Event(), f"unix:{tmp_path}/socket"
    end = threading.Timer(_HELD, over.set)
    with (
        server(place, over, server_options(ServerLimits())),
        grpc.insecure_channel(place, options=_HASTY) as channel,
    ):
        end.start()
        assert channel.unary_unary("/test/Ask", None, None)(b"", timeout=60) == b"there"
    end.join()
