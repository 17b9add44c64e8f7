"""gRPC channels and servers of the control plane: how they are opened, and the reasons for their options.

Calls without tensors (joining, heartbeats, status ...) use these channels; calls with tensors use ../http2.
Each option below has its reason beside it. relocations.py makes a channel follow a server that moves.
"""

import contextlib
import functools
from pathlib import Path
from typing import Any

import grpc

from psfleet.core.base.settings.declared_settings import ServerLimits
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.connection_limits import HANDSHAKE, connection_limit
from psfleet.core.net.connections.relocations import RelocatingChannel
from psfleet.core.net.frame import MAX_MESSAGE

_PING_MS = 20_000
_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    # Two clients in one process (tests, several fleets) must not share connections.
    ("grpc.use_local_subchannel_pool", 1),
    # psfleet resends calls itself: only it knows the sequence numbers that make a repetition safe.
    ("grpc.enable_retries", 0),
    # Servers are on the fleet's own network. A proxy set for the internet would break the connection.
    ("grpc.enable_http_proxy", 0),
    # Find a restarted server or its standby quickly: gRPC's default pauses grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Despite its name this is the time limit for establishing a connection. It must be long enough
    # for a busy server, which could otherwise never be reached.
    ("grpc.min_reconnect_backoff_ms", int(HANDSHAKE * 1000)),
    # Notice a host that has vanished without closing its connections while a call waits for it.
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.keepalive_timeout_ms", _PING_MS // 2),
]
_SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE),
    # Fail if the port is in use. Otherwise two servers would share the port and split its connections.
    ("grpc.so_reuseport", 0),
    # Accept all pings of clients. During a long call many pings arrive, and on a busy host they arrive in
    # bursts. gRPC would treat them as abuse and close the connection with all its calls ("too_many_pings").
    ("grpc.http2.min_recv_ping_interval_without_data_ms", _PING_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    # Drop a connection that does not authenticate itself in time (gRPC's default is two minutes).
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE * 1000)),
    # Accept no compressed messages. No process of a fleet sends them, and a stranger's few bytes could
    # expand to gigabytes before the limit on messages applies.
    ("grpc.compression_enabled_algorithms_bitset", 1),
]


def open_channel(endpoint: str, access: Access | None = None) -> grpc.Channel:
    """Return a gRPC channel to `unix:/path` or `host:port`. It connects when it is first used.

    The caller must pass `access.metadata` with each call. If servers may move (`access.relocations`), calls
    go to the server's latest endpoint.

    Raises:
        ConfigError: The endpoint is TCP, and `access` has no credentials and is not insecure.
    """
    effective_access = access or Access()
    if effective_access.relocations:
        connect = functools.partial(effective_access.channel, options=_CHANNEL_OPTIONS)
        moving: Any = RelocatingChannel(endpoint, Path(effective_access.relocations), connect)
        channel: grpc.Channel = moving  # has all methods of a channel that psfleet uses
        return channel
    return effective_access.channel(endpoint, _CHANNEL_OPTIONS)


def await_connection(channel: grpc.Channel, access: Access, seconds: float) -> None:
    """Wait up to `seconds` until the channel is connected. Returns normally if it is not.

    gRPC works on a connection only while a call waits for it, but right after a refusal calls fail at once. A
    loop of short calls with pauses would therefore never complete a TLS handshake, which takes several
    messages. This function makes one call that waits for the connection.
    """
    if isinstance(channel, RelocatingChannel):
        channel.look()
    status = channel.unary_unary("/psfleet.v1.Shard/Status", None, None)
    with contextlib.suppress(grpc.RpcError, ValueError):  # ValueError: closed meanwhile
        status(b"", timeout=seconds, wait_for_ready=True, metadata=access.metadata)


def server_options(limits: ServerLimits) -> list[tuple[str, Any]]:
    """Return the gRPC options of a server with these limits."""
    return [
        *_SERVER_OPTIONS,
        ("grpc.max_receive_message_length", limits.message),
        # This limit includes connections in their handshake, which gRPC closes only at the time limit.
        ("grpc.max_allowed_incoming_connections", connection_limit(limits)),
        ("grpc.max_concurrent_streams", limits.streams),
    ]
