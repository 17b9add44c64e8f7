"""The door of a server that listens on TCP: who gets in, with which token, and how much at a time.

Tokens: a stranger's call ends before its message is taken in, so it costs no memory.

Messages: gRPC's own unary handlers hold a thread of the pool while a message is on its way, for as long as
its sender likes. As handlers of streams they are called before it, so that calls can be counted first. To a
client that sends one message both are the same.

Connections: gRPC ends a handshake that takes too long, but counts no handshakes: a client that opens
connections faster than they time out takes all that there may be, and members find the server full. It does
not give an accepted socket to anybody either. So a thread looks at the sockets of this process, and shuts
down those that psfleet.core.net.http2.connection_admission names. gRPC sees that as the other end hanging up.

Which connection has proved itself is known from its calls (`proved`), or from its age: gRPC has ended all
that did not complete a handshake in time, and over TLS only members can.
"""

import contextlib
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

import grpc

from psfleet.core.base.errors import AccessDenied, FrameError, LimitExceeded
from psfleet.core.base.settings.declared_settings import ServerLimits
from psfleet.core.base.threads import ServiceThread
from psfleet.core.net.connections import channel
from psfleet.core.net.connections.access import TOKEN_KEY, Access, is_tcp
from psfleet.core.net.connections.channel import HANDSHAKE
from psfleet.core.net.connections.credentials import Credentials
from psfleet.core.net.http2.calls import InboundMessages
from psfleet.core.net.http2.connection_admission import (
    UnauthenticatedConnection,
    closing_notice,
    network_of,
    room,
    surplus,
)
from psfleet_server.rpc.replies import RateLimitedLog

_READS = frozenset(
    f"/psfleet.v1.{method}"
    for method in (
        "Followers/ReadChanges",
        "Followers/ReadRows",
        "Metrics/Collect",
        "Shard/Evictions",
        "Shard/ReadState",
        "Shard/Status",
        "Shard/Transport",
    )
)
"""Methods that change nothing, whatever they are called with: a pull may commit a push."""

Handler = Any  # grpc.RpcMethodHandler, generic in its stubs only


def gates(access: Access, endpoint: str) -> "list[grpc.ServerInterceptor[Any, Any]]":
    """Return the interceptors for the handlers of a server at this endpoint."""
    if access.credentials is None or not is_tcp(endpoint):
        return []
    return [_TokenInterceptor(access.credentials)]


class _TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Lets calls with the token pass; about 5 microseconds each."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        # A handler that takes a stream of requests is called before any of them is read.
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)
        self._log = RateLimitedLog()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Handler | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        metadata = handler_call_details.invocation_metadata or ()
        tokens = [value for key, value in metadata if key == TOKEN_KEY]
        reads = handler_call_details.method in _READS
        if len(tokens) == 1 and self._credentials.allows(tokens[0], reads=reads):
            return continuation(handler_call_details)
        return self._refusal

    def _refuse(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        tokens = [value for key, value in context.invocation_metadata() if key == TOKEN_KEY]
        few = ("it carries no token", "its token is not this job's")
        what = few[len(tokens)] if len(tokens) < len(few) else f"it carries {len(tokens)} tokens"
        if len(tokens) == 1 and self._credentials.allows(tokens[0], reads=True):
            what = "its token is that of readers, which only follow the job and read its figures"
        self._log.say(f"refused a call from {context.peer()}: {what}")
        channel.failure(
            context,
            AccessDenied(
                f"the call was refused: {what}; use the credentials of this job (PSFLEET_TLS)"
            ),
        )
        yield from ()


Behavior = Callable[..., Any]


class InboundLimit(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Takes in messages for the handlers behind it.

    Args:
        messages: Those of all endpoints of this server.
        on_call: Called with the peer of each call (ServicerContext.peer).
    """

    def __init__(self, messages: InboundMessages, on_call: Callable[[str], None]) -> None:
        self._messages = messages
        self._on_call = on_call
        self._handlers: dict[int, tuple[Handler, Handler]] = {}  # by id, with what has it

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Handler | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        entry = self._handlers.get(id(handler))
        if entry is None:
            entry = self._handlers[id(handler)] = (handler, self._around(handler))
        return entry[1]

    def _around(self, handler: Handler) -> Handler:
        """The handler, called before its message."""
        if handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._answering(handler.unary_unary))
        behavior = self._held(handler.unary_stream)
        behavior.experimental_non_blocking = True  # type: ignore[attr-defined]  # see parking
        return grpc.stream_stream_rpc_method_handler(behavior)

    def _answering(self, behavior: Behavior) -> Behavior:
        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            request = self._take(requests, context)
            reply: bytes = b"" if request is None else behavior(request, context)
            return reply

        return handle

    def _held(self, behavior: Behavior) -> Behavior:
        def handle(
            requests: Iterator[bytes],
            context: grpc.ServicerContext,
            send: Callable[[bytes | None], None],
        ) -> None:
            request = self._take(requests, context)
            if request is None:
                send(None)
            else:
                behavior(request, context, send)

        return handle

    def _take(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes | None:
        """The message of a call; None: there is none, and the call has its status."""
        peer = context.peer()
        self._on_call(peer)
        try:
            self._messages.enter(peer, context)
        except LimitExceeded as error:
            channel.failure(context, error)
            return None
        try:
            return next(requests)
        except StopIteration:
            channel.failure(context, FrameError("the call ended without its message"))
            return None
        finally:
            self._messages.leave(peer, context)


_CALM, _BUSY = 0.1, 0.02  # seconds between two looks; _BUSY when strangers are many
_LATE = 1.0  # seconds by which gRPC may end a handshake too late

BACKLOG = 128
"""Connections that the system holds until they are accepted; one beyond them is tried again by the
other end's system. gRPC's own backlog is 4,096: it accepts all at once, and calls wait until it has."""

_RECEIVED = struct.Struct("128xQ")  # bytes received: in tcp_info of linux/tcp.h, since Linux 4.1
_MAPPED = "::ffff:"  # an IPv4 address as IPv6 sockets see it


@dataclass(slots=True)
class _AcceptedConnection:
    """An accepted connection; `peer` is its other end, as gRPC names it but without the family."""

    peer: str
    stranger: UnauthenticatedConnection
    proved: bool = False


class GrpcioAdmission:
    """Watches the connections that this process has accepted on a port, from `start` to `stop`."""

    def __init__(self, limits: ServerLimits) -> None:
        self._port = 0
        self._limits = limits
        self._connections: dict[
            int, _AcceptedConnection | None
        ] = {}  # by inode; None: another socket
        self._proved: set[str] = set()
        self._log = RateLimitedLog()
        self._over = threading.Event()
        self._thread = ServiceThread(self._run, "grpcio_admission")

    @property
    def open(self) -> int:
        """Connections that are open, as of the last look."""
        return sum(one is not None for one in [*self._connections.values()])

    def proved(self, peer: str) -> None:
        """A call of a member has come over the connection of this peer (ServicerContext.peer)."""
        self._proved.add(peer)

    def start(self, endpoint: str) -> None:
        """Begin to watch the connections to this endpoint."""
        self._port = int(endpoint.rpartition(":")[2])
        for inode, descriptor in _sockets().items():
            with contextlib.suppress(OSError), _opened(descriptor, inode) as end:
                if self._is_listener(end):
                    end.listen(BACKLOG)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        pause = _CALM
        while not self._over.wait(pause):
            pause = _BUSY if self._look() else _CALM

    def _look(self) -> bool:
        """Close what is too much; whether there are so many strangers that it soon may be again."""
        peers, self._proved = self._proved, set()  # before the sockets: theirs are among those
        descriptors = _sockets()
        self._meet(descriptors)
        self._recognize({unquote(peer).partition(":")[2] for peer in tuple(peers)})
        members = [one for one in self._connections.values() if one is not None and one.proved]
        strangers = [
            replace(one.stranger, silent=_is_silent(descriptors[inode], inode))
            for inode, one in self._connections.items()
            if one is not None and not one.proved
        ]
        each = self._limits.handshakes
        in_all = room(self._limits.connections, len(members), each)
        closing = surplus(strangers, each, in_all)
        for stranger in closing:
            _shut(descriptors[stranger.number], stranger.number)
        if closing:
            self._log.say(closing_notice(closing))
        return bool(closing) or len(strangers) > min(each, in_all) // 2

    def _meet(self, descriptors: dict[int, int]) -> None:
        """Forget sockets that are closed and look at new ones."""
        for inode in self._connections.keys() - descriptors.keys():
            del self._connections[inode]
        for inode in descriptors.keys() - self._connections.keys():
            self._connections[inode] = self._connection(descriptors[inode], inode)

    def _is_listener(self, end: socket.socket) -> bool:
        return (
            end.family in (socket.AF_INET, socket.AF_INET6)
            and end.getsockname()[1] == self._port
            and bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        )

    def _connection(self, descriptor: int, inode: int) -> _AcceptedConnection | None:
        with contextlib.suppress(OSError), _opened(descriptor, inode) as end:
            if end.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            if end.getsockname()[1] != self._port:
                return None
            host, port = end.getpeername()[:2]
            host = host.removeprefix(_MAPPED)
            peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            return _AcceptedConnection(
                peer, UnauthenticatedConnection(inode, network_of(host), time.monotonic(), True)
            )
        return None

    def _recognize(self, peers: set[str]) -> None:
        old = time.monotonic() - HANDSHAKE - _LATE
        for one in self._connections.values():
            if one is not None and not one.proved:
                one.proved = one.peer in peers or one.stranger.since < old


def _sockets() -> dict[int, int]:
    """The descriptors of this process's sockets, by inode."""
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                descriptors[status.st_ino] = int(name)
    return descriptors


@contextlib.contextmanager
def _opened(descriptor: int, inode: int) -> Iterator[socket.socket]:
    """A socket of gRPC's. It may close it at any time, and the number be another's: see that it is it.

    Raises:
        OSError: It is closed by now.
    """
    with socket.socket(fileno=os.dup(descriptor)) as end:
        if os.fstat(end.fileno()).st_ino != inode:
            raise OSError("closed meanwhile")
        yield end


def _is_silent(descriptor: int, inode: int) -> bool:
    """Return whether nothing was received from the other end."""
    with contextlib.suppress(OSError, struct.error), _opened(descriptor, inode) as end:
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
        return _RECEIVED.unpack(info) == (0,)
    return False


def _shut(descriptor: int, inode: int) -> None:
    with contextlib.suppress(OSError), _opened(descriptor, inode) as end:
        end.shutdown(socket.SHUT_RDWR)
