"""Options of gRPC channels and servers, each with its reason."""

import contextlib
import functools
import resource
from pathlib import Path
from typing import Any

import grpc

from psfleet.settings.declared_settings import ServerLimits
from psfleet.wire.connections.access import Access
from psfleet.wire.connections.relocating_channel import RelocatingChannel
from psfleet.wire.frame import MAX_MESSAGE

GRACE = 1.0
"""Seconds by which a call outlives the wait it was made for, so that the server, which knows whom
the wait is for, says so before gRPC gives up with nothing but a code."""

HANDSHAKE = 10.0
"""Seconds within which a new connection must have proved itself; both ends give up then."""

_RESERVED = 200  # descriptors for files, logs, other servers and connections about to be closed
_PING_MS = 20_000

_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    # Two clients in one process (tests, several fleets) must not share connections.
    ("grpc.use_local_subchannel_pool", 1),
    # psfleet resends by itself, with the sequence numbers that make it safe.
    ("grpc.enable_retries", 0),
    # Servers of a fleet are on its own network.
    ("grpc.enable_http_proxy", 0),
    # A server that restarts, or its standby, is found at once; gRPC's own pauses grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    # This one is no pause, whatever its name: it is how long a connection may take until the server
    # has answered to it. One that is busy takes a while; given up too soon, it would never be reached.
    ("grpc.min_reconnect_backoff_ms", int(HANDSHAKE * 1000)),
    # A host that has vanished without a word is noticed while a call waits for it.
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.keepalive_timeout_ms", _PING_MS // 2),
]

_SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE),
    # A port that is in use is an error, not a second server behind the same port.
    ("grpc.so_reuseport", 0),
    # Let clients ping as often as they do. A held call is answered after many pings, on a busy host
    # they come in bursts, and gRPC counts them against the client: it would close the connection
    # with "too_many_pings" and all calls on it. So none is counted.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", _PING_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    # Who connects and does not prove itself is not waited for (gRPC's own: two minutes).
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE * 1000)),
    # No member of a fleet compresses, and a few bytes would become gigabytes before they are counted.
    ("grpc.compression_enabled_algorithms_bitset", 1),
]


def open_channel(endpoint: str, access: Access | None = None) -> grpc.Channel:
    """Return a channel to `unix:/path` or `host:port`; it connects when first used.

    Calls over TCP carry `access.metadata`. Where servers may move, the channel follows them.

    Raises:
        ConfigError: The endpoint is TCP, and `access` has no credentials and is not insecure.
    """
    own = access or Access()
    if own.relocations:
        connect = functools.partial(own.channel, options=_CHANNEL_OPTIONS)
        moving: Any = RelocatingChannel(endpoint, Path(own.relocations), connect)
        channel: grpc.Channel = moving  # it has what psfleet uses of one
        return channel
    return own.channel(endpoint, _CHANNEL_OPTIONS)


def await_connection(channel: grpc.Channel, access: Access, seconds: float) -> None:
    """Wait until the channel is connected, at most so long.

    gRPC moves a connection on only while a call waits for it. A call on a channel that was just
    refused fails at once, so calls that are made again after a sleep never see a TLS handshake,
    which takes several messages, come to its end. This makes a call that waits.
    """
    if isinstance(channel, RelocatingChannel):
        channel.look()
    status = channel.unary_unary("/psfleet.v1.Shard/Status", None, None)
    with contextlib.suppress(grpc.RpcError, ValueError):  # ValueError: closed meanwhile
        status(b"", timeout=seconds, wait_for_ready=True, metadata=access.metadata)


def server_options(limits: ServerLimits) -> list[tuple[str, Any]]:
    """Return the options of a server that keeps these limits."""
    return [
        *_SERVER_OPTIONS,
        ("grpc.max_receive_message_length", limits.message),
        ("grpc.max_allowed_incoming_connections", min(limits.connections, _room())),
        ("grpc.max_concurrent_streams", limits.streams),
    ]


def _room() -> int:
    """Connections for which this process has descriptors.

    Without one gRPC cannot accept a connection, not even to close it.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_MESSAGE if most == resource.RLIM_INFINITY else max(most - _RESERVED, 1)
