"""gRPC channels of the control plane: their options, moves of servers, and errors as statuses.

Calls without tensors (joining, heartbeats, status ...) use these channels; calls with tensors use ../http2.
Each channel option below has its reason beside it.

A server may move to another endpoint, which the launcher writes to a file. One thread per process watches
the file (RelocationWatch) and reconnects the channels. So no call has to time out at the old endpoint first.

An error is sent as a gRPC status code, which any client understands. The name of the error's class is sent
too, in the trailing header `psfleet-error`, so that a psfleet client raises the same class as the server.
"""

import contextlib
import functools
import os
import resource
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

import grpc

from psfleet.core.base import errors
from psfleet.core.base.errors import (
    AccessDenied,
    DeadlineExceeded,
    LimitExceeded,
    ProtocolError,
    PsfleetError,
    ServerUnavailable,
)
from psfleet.core.base.job_files import read_relocations
from psfleet.core.base.settings.declared_settings import ServerLimits
from psfleet.core.base.threads import ServiceThread
from psfleet.core.net.connections.access import Access
from psfleet.core.net.frame import MAX_MESSAGE

KEY = "psfleet-error"
# Longest text of an error, in characters: many HTTP/2 peers cap the headers of a call at 8 KiB.
_LONGEST = 2000

_Code = grpc.StatusCode
CODES: dict[type[PsfleetError], grpc.StatusCode] = {
    errors.PsfleetError: _Code.INTERNAL,
    errors.UsageError: _Code.INVALID_ARGUMENT,
    errors.ShapeError: _Code.INVALID_ARGUMENT,
    errors.IdError: _Code.INVALID_ARGUMENT,
    errors.UnknownTable: _Code.NOT_FOUND,
    errors.TableConflict: _Code.ALREADY_EXISTS,
    errors.ConfigError: _Code.INVALID_ARGUMENT,
    errors.RuleError: _Code.INVALID_ARGUMENT,
    errors.WrongType: _Code.INVALID_ARGUMENT,
    errors.LimitExceeded: _Code.RESOURCE_EXHAUSTED,
    errors.FrameError: _Code.INVALID_ARGUMENT,
    errors.ProtocolError: _Code.FAILED_PRECONDITION,
    errors.Gap: _Code.OUT_OF_RANGE,
    errors.Fenced: _Code.ABORTED,
    errors.LaneLost: _Code.FAILED_PRECONDITION,
    errors.NotReady: _Code.UNAVAILABLE,
    errors.Later: _Code.UNAVAILABLE,
    errors.DeadlineExceeded: _Code.DEADLINE_EXCEEDED,
    errors.ServerUnavailable: _Code.UNAVAILABLE,
    errors.AccessDenied: _Code.UNAUTHENTICATED,
    errors.LogError: _Code.DATA_LOSS,
    errors.NoRoom: _Code.UNAVAILABLE,
    errors.CheckpointError: _Code.DATA_LOSS,
}
_CLASSES = {cls.__name__: cls for cls in CODES}

# Errors for statuses that gRPC itself reports, when no psfleet server has named an error class.
_FOREIGN: dict[grpc.StatusCode, type[PsfleetError]] = {
    _Code.UNAVAILABLE: ServerUnavailable,
    _Code.CANCELLED: ServerUnavailable,
    _Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    _Code.RESOURCE_EXHAUSTED: LimitExceeded,
    _Code.UNAUTHENTICATED: AccessDenied,
    _Code.UNIMPLEMENTED: ProtocolError,
}


_LOOK = 0.1  # seconds between checks of the file of moved servers
GRACE = 1.0
"""Seconds that a client adds to the time it asks a server to wait, to get the timeout of its call.

So the server gives up first, with a message that names the processes it waited for. A timeout of gRPC would
only have a status code."""
HANDSHAKE = 10.0
"""Seconds that a new connection has to authenticate itself. After that, either end closes the connection."""
# File descriptors left for files, logs, connections to other servers, and connections about to be closed.
_RESERVED = 200
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


class _Settable(Protocol):
    """The methods of grpc.ServicerContext that set a status."""

    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str], ...]) -> None: ...


def status_of(error: PsfleetError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return the status code, text and trailing metadata that a server sends for an error."""
    cls = next(cls for cls in type(error).__mro__ if cls in CODES)
    return CODES[cls], str(error)[:_LONGEST], ((KEY, cls.__name__),)


def failure(context: _Settable, error: PsfleetError) -> None:
    """End a call with an error, from within the handler that serves `context`."""
    code, details, metadata = status_of(error)
    context.set_code(code)
    context.set_details(details)
    context.set_trailing_metadata(metadata)


def error_of(error: grpc.RpcError, server: str, question: str = "") -> PsfleetError:
    """Return the psfleet error for a gRPC call that failed.

    Args:
        server: Name of the other process, for the error's text.
        question: Request that the call waited for, and how long it waited. Used in the text of a timeout.
    """
    if not isinstance(error, grpc.Call):
        return ServerUnavailable(f"{server} does not answer: {error}")
    name = next((value for key, value in error.trailing_metadata() or () if key == KEY), "")
    return error_named(str(name), error.code(), error.details() or "", server, question)


def error_named(
    name: str, code: grpc.StatusCode, details: str, server: str, question: str = ""
) -> PsfleetError:
    """Return the psfleet error for a failed call: of the class that the server has named, if it named one.

    Otherwise the status code decides the class.

    Args:
        name: Name of the class from the trailing metadata, or empty.
        server: Name of the other process, for the error's text.
        question: Request that the call waited for, and how long it waited. Used in the text of a timeout.
    """
    if name in _CLASSES:
        return _CLASSES[name](details)
    cls = _FOREIGN.get(code, PsfleetError)
    waiting = f" {question}" if cls is DeadlineExceeded and question else ""
    return cls(
        f"{server} does not answer{waiting}: {code.name}, {details}"
        if cls is not PsfleetError
        else f"{server} failed: {code.name}, {details}"
    )


class MoveObserver(Protocol):
    """Object that wants to know when servers may have moved."""

    def look(self) -> None:
        """Read the file of moved servers again. RelocationWatch calls this in its thread after a change."""


class RelocationWatch:
    """Watches the file that lists the new endpoints of moved servers (psfleet.core.base.job_files).

    A process has one watch, with one thread, for each file. The thread runs while there are observers.
    """

    _watches: ClassVar[dict[Path, "RelocationWatch"]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, moves: Path) -> None:
        self._moves = moves
        self._seen = self._version()
        self._observers: weakref.WeakSet[MoveObserver] = weakref.WeakSet()
        self._over = threading.Event()
        self._thread = ServiceThread(self._run, "moved servers")

    @classmethod
    def follow(cls, moves: Path, observer: MoveObserver) -> None:
        """Call `observer.look` after every change of the file, until `leave` is called."""
        with cls._lock:
            watch = cls._watches.get(moves)
            if watch is None:
                watch = cls._watches[moves] = cls(moves)
                watch._thread.start()
            watch._observers.add(observer)

    @classmethod
    def leave(cls, moves: Path, observer: MoveObserver) -> None:
        """Stop calling the observer that was passed to `follow`."""
        with cls._lock:
            watch = cls._watches.get(moves)
            if watch is None:
                return
            watch._observers.discard(observer)
            if not watch._observers:
                del cls._watches[moves]
                watch._over.set()

    def _run(self) -> None:
        while not self._over.wait(_LOOK):
            now = self._version()
            if now == self._seen:
                continue
            self._seen = now
            with self._lock:
                followers = list(self._observers)
            # Without the lock, because an observer takes a lock of its own, and may close its channel,
            # which calls `leave`.
            for observer in followers:
                observer.look()

    def _version(self) -> tuple[int, int]:
        """Return two numbers that differ once the file was replaced.

        The file is always replaced as a whole.
        """
        with contextlib.suppress(OSError):
            status = os.stat(self._moves)
            return status.st_ino, status.st_mtime_ns
        return 0, 0


class RelocatingChannel:
    """gRPC channel to a server that may move. Each call goes to the server's latest endpoint.

    When the server moves, calls in progress fail at once with CANCELLED. The old machine may be off, and
    calls to it could otherwise wait forever.

    Args:
        moves: Path of the file that lists the new endpoints of moved servers.

    Attributes:
        on_move: Called after the endpoint has changed, in any thread. Must not block.
    """

    def __init__(self, endpoint: str, moves: Path, connect: Callable[[str], grpc.Channel]) -> None:
        self._first = endpoint
        self._moves = moves
        self._connect = connect
        self._lock = threading.Lock()
        self._closed = False
        self.on_move: Callable[[], None] = lambda: None
        self.endpoint = self._find()
        self._channel = connect(self.endpoint)
        RelocationWatch.follow(moves, self)
        self.look()  # the server may have moved before the watch began

    def look(self) -> None:
        """Connect to the server's new endpoint if it has moved."""
        endpoint = self._find()
        with self._lock:
            if endpoint == self.endpoint or self._closed:
                return
            self._channel.close()
            self.endpoint, self._channel = endpoint, self._connect(endpoint)
        self.on_move()

    def unary_unary(self, *method: Any) -> Callable[..., Any]:
        """Return a callable for a unary method, as grpc.Channel does. Each call uses the present channel."""
        return lambda *call, **options: self._channel.unary_unary(*method)(*call, **options)

    def stream_stream(self, *method: Any) -> Callable[..., Any]:
        """Return a callable for a streaming method, as grpc.Channel does.

        Each call uses the present channel.
        """
        return lambda *call, **options: self._channel.stream_stream(*method)(*call, **options)

    def close(self) -> None:
        """Close the channel, as grpc.Channel does."""
        RelocationWatch.leave(self._moves, self)
        with self._lock:
            self._closed = True
            self._channel.close()

    def _find(self) -> str:
        """Return the server's present endpoint, found by following its moves from the first endpoint."""
        moves, endpoint = read_relocations(self._moves), self._first
        for _ in moves:  # at most one step per entry, even if the entries form a cycle
            endpoint = moves.get(endpoint, endpoint)
        return endpoint


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


def connection_limit(limits: ServerLimits) -> int:
    """Return the number of connections that each of this process's two endpoints (gRPC and HTTP/2) may have.

    Leaves some file descriptors free. A process without a free descriptor could not open its log, and could
    not even accept a surplus connection to close it.
    """
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return limits.connections
    return min(limits.connections, max((soft_limit - _RESERVED) // 2, 1))


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open files as far as the system allows: each connection needs one."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
