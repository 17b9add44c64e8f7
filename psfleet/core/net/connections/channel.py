"""Channels of gRPC: their options, each with its reason; channels that follow a server; errors as statuses.

One thread per process sees when servers have moved, so that no call waits for where one was. A status code
tells any client the kind of error. The name of the class travels in the trailing metadata `psfleet-error`, so
that a psfleet client raises the class that the server raised.
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
_LONGEST = 2000  # characters: HTTP/2 peers cap all headers of a call at 8 KiB

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

# What gRPC itself reports, when no server has said anything.
_FOREIGN: dict[grpc.StatusCode, type[PsfleetError]] = {
    _Code.UNAVAILABLE: ServerUnavailable,
    _Code.CANCELLED: ServerUnavailable,
    _Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    _Code.RESOURCE_EXHAUSTED: LimitExceeded,
    _Code.UNAUTHENTICATED: AccessDenied,
    _Code.UNIMPLEMENTED: ProtocolError,
}


_LOOK = 0.1  # seconds
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


class _Settable(Protocol):
    """The part of a servicer context that carries a status."""

    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str], ...]) -> None: ...


def status_of(error: PsfleetError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return code, text and trailing metadata that stand for an error."""
    cls = next(cls for cls in type(error).__mro__ if cls in CODES)
    return CODES[cls], str(error)[:_LONGEST], ((KEY, cls.__name__),)


def failure(context: _Settable, error: PsfleetError) -> None:
    """Let the call of `context` end with the error."""
    code, details, metadata = status_of(error)
    context.set_code(code)
    context.set_details(details)
    context.set_trailing_metadata(metadata)


def error_of(error: grpc.RpcError, server: str, question: str = "") -> PsfleetError:
    """Return the error that a failed call stands for.

    Args:
        error: Error raised by gRPC.
        server: Names the other end, for the text.
        question: Says what was asked, and for how long it was waited.
    """
    if not isinstance(error, grpc.Call):
        return ServerUnavailable(f"{server} does not answer: {error}")
    name = next((value for key, value in error.trailing_metadata() or () if key == KEY), "")
    return error_named(str(name), error.code(), error.details() or "", server, question)


def error_named(
    name: str, code: grpc.StatusCode, details: str, server: str, question: str = ""
) -> PsfleetError:
    """Return the error of a class that the server has named, or else of the code; see error_of."""
    if name in _CLASSES:
        return _CLASSES[name](details)
    cls = _FOREIGN.get(code, PsfleetError)
    what = f" {question}" if cls is DeadlineExceeded and question else ""
    return cls(
        f"{server} does not answer{what}: {code.name}, {details}"
        if cls is not PsfleetError
        else f"{server} failed: {code.name}, {details}"
    )


class MoveObserver(Protocol):
    """Observer of moves."""

    def look(self) -> None:
        """Take note that the file has changed."""


class RelocationWatch:
    """Looks at a file of psfleet.core.base.json_documents; its thread runs while there are observers.

    Args:
        moves: The file.
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
        """Call `observer.look` after every change of the file, until `leave`."""
        with cls._lock:
            watch = cls._watches.get(moves)
            if watch is None:
                watch = cls._watches[moves] = cls(moves)
                watch._thread.start()
            watch._observers.add(observer)

    @classmethod
    def leave(cls, moves: Path, observer: MoveObserver) -> None:
        """Call it no more."""
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
            for observer in followers:
                observer.look()

    def _version(self) -> tuple[int, int]:
        """Return the version of the file, which is replaced as a whole."""
        with contextlib.suppress(OSError):
            status = os.stat(self._moves)
            return status.st_ino, status.st_mtime_ns
        return 0, 0


class RelocatingChannel:
    """Calls go to where the server was found last.

    When the server moves, calls under way end at once with CANCELLED: the machine on which it was may be off,
    and then they would never end.

    Args:
        endpoint: Endpoint at which the server listened at first.
        moves: The file of psfleet.core.base.json_documents.
        connect: Opens a channel to an endpoint.

    Attributes:
        endpoint: Endpoint to which calls go.
        on_move: Called in any thread when that has changed; must not block.
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
        """Connect anew if the server has moved."""
        endpoint = self._find()
        with self._lock:
            if endpoint == self.endpoint or self._closed:
                return
            self._channel.close()
            self.endpoint, self._channel = endpoint, self._connect(endpoint)
        self.on_move()

    def unary_unary(self, *method: Any) -> Callable[..., Any]:
        """Return a method, as grpc.Channel does."""
        return lambda *call, **more: self._channel.unary_unary(*method)(*call, **more)

    def stream_stream(self, *method: Any) -> Callable[..., Any]:
        """Return a method, as grpc.Channel does."""
        return lambda *call, **more: self._channel.stream_stream(*method)(*call, **more)

    def close(self) -> None:
        """Close the channel, as grpc.Channel does."""
        RelocationWatch.leave(self._moves, self)
        with self._lock:
            self._closed = True
            self._channel.close()

    def _find(self) -> str:
        """Return the present endpoint of the server."""
        moves, endpoint = read_relocations(self._moves), self._first
        for _ in moves:  # one step for each time that it has moved
            endpoint = moves.get(endpoint, endpoint)
        return endpoint


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
        # Those whose handshake is not over count too, for gRPC closes them only after their time.
        ("grpc.max_allowed_incoming_connections", connection_limit(limits)),
        ("grpc.max_concurrent_streams", limits.streams),
    ]


def connection_limit(limits: ServerLimits) -> int:
    """Return the connections that one of the two endpoints of this process may have.

    Both together leave descriptors for everything else: a process without one cannot even accept a
    connection to close it, nor open its log.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return limits.connections
    return min(limits.connections, max((most - _RESERVED) // 2, 1))


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as the system allows it: each connection takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
