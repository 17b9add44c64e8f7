"""Endpoints: gRPC's and that of psfleet's own HTTP/2 in this server, and those of its peers.

An endpoint is checked first: gRPC says only "failed to bind", and takes a unix socket away from a server
that still uses it.

The endpoint of psfleet's own HTTP/2 is beside gRPC's: a unix socket in the same folder, or any free port of
the same address. `Shard/Transport` says where.
"""

import contextlib
import hmac
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import grpc

from psfleet.core.base.errors import ConfigError, ServerUnavailable
from psfleet.core.base.files import LONGEST_PATH
from psfleet.core.base.logs import RateLimitedLog, log_of
from psfleet.core.base.observability.exposition import LatencyHistogram
from psfleet.core.base.settings.declared_settings import ServerLimits
from psfleet.core.net.connections.access import Access, is_tcp
from psfleet.core.net.connections.channel import (
    HANDSHAKE,
    await_connection,
    connection_limit,
    error_of,
    open_channel,
)
from psfleet.core.net.connections.tls_sockets import accepts
from psfleet.core.net.http2.calls import Behavior, InboundMessages, IncomingCall
from psfleet.core.net.http2.http2_server import Http2Server
from psfleet.core.net.http2.server_connection import ServerSettings
from psfleet_server.rpc.replies import DeferredReply, as_psfleet_error

_log = log_of(__name__)

_MOMENT = 0.5  # seconds
_BACKLOG = 128  # connections that the system holds until they are accepted; it tries others again


_SUFFIX = ".h2"


class Peer:
    """Calls to one server, made once each; it connects when it is first called.

    Args:
        name: Name for messages, as that of `Peer.server`.
        endpoint: Endpoint at which it listens.
        access: With what this process proves itself over TCP.
    """

    def __init__(self, name: str, endpoint: str, access: Access) -> None:
        self.name = name
        self._access = access
        self._channel = open_channel(endpoint, access)

    @classmethod
    def server(cls, index: int, endpoint: str, access: Access) -> Self:
        """Return a server of the fleet: "server 1 at host:port"."""
        return cls(f"server {index} at {endpoint}", endpoint, access)

    def call(self, method: str, request: bytes, seconds: float) -> bytes:
        """The answer to a call of "Service/Method".

        One that could not be made waits a moment for the connection, so that the next one finds it.

        Raises:
            PsfleetError: The call failed; ServerUnavailable if the server cannot be reached.
        """
        try:
            stub = self._channel.unary_unary(f"/psfleet.v1.{method}", None, None)
            reply: bytes = stub(request, timeout=seconds, metadata=self._access.metadata)
        except grpc.RpcError as error:
            failure = error_of(error, self.name)
            if isinstance(failure, ServerUnavailable):
                await_connection(self._channel, self._access, min(seconds, _MOMENT))
            raise failure from None
        except ValueError as error:  # the channel was closed meanwhile
            raise ServerUnavailable(f"the connection to {self.name} is closed: {error}") from None
        return reply

    def close(self) -> None:
        """Let go of the connection; calls under way fail. Safe to call twice."""
        self._channel.close()


def bind(server: grpc.Server, endpoint: str, access: Access) -> str:
    """Let the server listen there; the endpoint as clients must name it (port 0 is replaced).

    Raises:
        ConfigError: The address is in use, not of this host, or no address; or it is TCP, and
            `access` has no credentials and is not insecure.
    """
    if endpoint.startswith("unix:"):
        _claim_socket(endpoint)
    else:
        _try_port(endpoint)
    try:
        port = access.listen(server, endpoint)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {endpoint!r}: {error}") from None
    if endpoint.startswith("unix:"):
        os.chmod(endpoint.removeprefix("unix:"), 0o600)
        return endpoint
    return f"{endpoint.rpartition(':')[0]}:{port}"


def release(endpoint: str) -> None:
    """Remove what `bind` may have left in the file system."""
    if endpoint.startswith("unix:"):
        Path(endpoint.removeprefix("unix:")).unlink(missing_ok=True)


def _claim_socket(endpoint: str) -> None:
    """Remove a dead server's socket; refuse a living one's."""
    path = endpoint.removeprefix("unix:")
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise ConfigError(
            f"the socket path {path!r} has {len(os.fsencode(path))} bytes; "
            f"the limit is {LONGEST_PATH}, choose a shorter folder"
        )
    if not os.path.isdir(os.path.dirname(path)):
        raise ConfigError(f"cannot listen on {endpoint!r}: its folder does not exist")
    if not os.path.exists(path):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as error:
            raise ConfigError(f"cannot listen on {endpoint!r}: {error.strerror}") from None
        else:
            raise ConfigError(f"cannot listen on {endpoint!r}: another server listens there")


def _try_port(endpoint: str) -> None:
    """Bind the port for a moment, because the system says more plainly what is wrong with it."""
    host, _, port = endpoint.rpartition(":")
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {endpoint!r}: {error.strerror}; choose another address or port 0"
        ) from None


class MeasuredMethod(NamedTuple):
    """A method of the server over HTTP/2.

    Attributes:
        behavior: Takes the request, and a DeferredReply unless it `returns` the reply.
        latency: Gets the time from each call to its reply.
        returns: The behavior returns the reply.
        at_once: Asked first if there is one: it returns the reply, or None with nothing changed.
    """

    behavior: Callable[..., Any]
    latency: LatencyHistogram
    returns: bool
    at_once: Callable[[bytes], bytes | None] | None


class Http2Listener:
    """Listens from `start` to `stop`.

    Args:
        endpoint: The server's first endpoint, with its port.
        access: With what clients and server prove themselves over TCP.
        limits: Limits on connections and messages.
        messages: Those of all endpoints of this server.
    """

    def __init__(
        self, endpoint: str, access: Access, limits: ServerLimits, messages: InboundMessages
    ) -> None:
        self._endpoint = endpoint
        self._access = access
        self._limits = limits
        self._messages = messages
        self._path = ""
        self._server: Http2Server | None = None

    def start(self, methods: Mapping[str, MeasuredMethod]) -> tuple[int, str]:
        """Begin to answer; the port or else the path, (0, ""): it cannot listen.

        Raises:
            ConfigError: The address cannot be had.
        """
        path = self._endpoint.removeprefix("unix:") + _SUFFIX
        if not is_tcp(self._endpoint) and len(os.fsencode(path)) > LONGEST_PATH:
            return 0, ""
        listener = self._listen(path)
        credentials = self._access.credentials
        bearer = credentials.bearer if credentials and is_tcp(self._endpoint) else ""

        def refuse(path: str, authorization: str) -> str:
            if not bearer or hmac.compare_digest(authorization.encode(), bearer.encode()):
                return ""
            return "the call does not carry this job's token"

        settings = ServerSettings(
            message=self._limits.message,
            connections=connection_limit(self._limits),
            handshakes=self._limits.handshakes,
            streams=self._limits.streams,
            incoming=self._limits.incoming,
            handshake=HANDSHAKE,
            refuse=refuse,
            at_once={name: one.at_once for name, one in methods.items() if one.at_once is not None},
        )
        behaviors = {name: _answering(method) for name, method in methods.items()}
        wrap = accepts(self._access, self._endpoint)
        self._server = Http2Server(
            listener, wrap, behaviors, settings, RateLimitedLog(_log).say, self._messages
        )
        self._server.start()
        return (0, self._path) if self._path else (listener.getsockname()[1], "")

    def stop(self, grace: float) -> None:
        """Answer no more calls; those under way get `grace` seconds."""
        if self._server is not None:
            self._server.stop(grace)
        if self._path:
            Path(self._path).unlink(missing_ok=True)

    def _listen(self, path: str) -> socket.socket:
        try:
            if is_tcp(self._endpoint):
                host = self._endpoint.rpartition(":")[0].strip("[]")
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
            Path(path).unlink(missing_ok=True)  # of the process that had the first endpoint
            listener = socket.socket(socket.AF_UNIX)
            with contextlib.ExitStack() as stack:
                stack.callback(listener.close)
                listener.bind(path)
                os.chmod(path, 0o600)
                listener.listen(_BACKLOG)
                stack.pop_all()
        except OSError as error:
            raise ConfigError(
                f"cannot listen beside {self._endpoint!r}: {error.strerror}; choose another address, "
                "or PSFLEET_TRANSPORT=grpcio"
            ) from None
        self._path = path
        return listener


def _answering(method: MeasuredMethod) -> Behavior:
    behavior, latency, returns, _ = method

    def handle(request: bytes, call: IncomingCall) -> None:
        reply = DeferredReply(call, call.end, latency)
        try:
            if returns:
                reply.complete(behavior(request))
            else:
                behavior(request, reply)
        except Exception as error:
            reply.fail(as_psfleet_error(error))

    return handle
