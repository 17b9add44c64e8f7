"""A client that waits for a held call may ping as often as it likes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from psfleet.settings.declared_settings import ServerLimits
from psfleet.wire.connections.channel import server_options

_HASTY = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
]
_HELD = 5.0
"""Seconds: gRPC pings once a second at most, and the third ping too many closes a connection."""


def test_a_held_call_outlives_many_pings(tmp_path: Path) -> None:
    """Pings far more often than announced do not close the connection ("too_many_pings")."""
    over = threading.Event()

    def wait(request: bytes, context: grpc.ServicerContext) -> bytes:
        over.wait(_HELD)
        return b"reply"

    handlers = {"Wait": grpc.unary_unary_rpc_method_handler(wait)}
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, options=server_options(ServerLimits()))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
        server.add_insecure_port(f"unix:{tmp_path}/socket")
        server.start()
        try:
            with grpc.insecure_channel(f"unix:{tmp_path}/socket", options=_HASTY) as channel:
                assert channel.unary_unary("/test/Wait", None, None)(b"", timeout=60) == b"reply"
        finally:
            over.set()
            server.stop(None).wait()
