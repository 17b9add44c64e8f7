"""Binds the two addresses of this server, serves tensors at the second one, and calls other servers.

Every method is served at exactly one of the addresses. Methods that carry values of tables use the address
for tensors, over psfleet's own HTTP/2. All other methods use gRPC. Both addresses are bound before the first
call is served, because a client derives both from the same endpoint
(psfleet/core/base/settings/server_endpoints.py).

An address is checked before gRPC binds it, because gRPC only reports "failed to bind", and takes a unix
socket away from a server that still uses it.
"""

import contextlib
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
from psfleet.core.base.settings.server_endpoints import addresses_of
from psfleet.core.net.connections.access import Access, is_tcp
from psfleet.core.net.connections.channel import await_connection, open_channel
from psfleet.core.net.connections.connection_limits import HANDSHAKE, connection_limit
from psfleet.core.net.connections.error_statuses import error_of
from psfleet.core.net.connections.tls_sockets import accepts
from psfleet.core.net.connections.token_check import refusal
from psfleet.core.net.http2.calls import InboundMessages, IncomingCall
from psfleet.core.net.http2.http2_server import Http2Server
from psfleet.core.net.http2.server_connection import ServerSettings
from psfleet_server.rpc.call_admission import READS, REFUSED
from psfleet_server.rpc.replies import DeferredReply, as_psfleet_error

_log = log_of(__name__)

_MOMENT = 0.5  # seconds to wait for the connection after a failed call
_BACKLOG = 128  # connections that the system holds until they are accepted


class Peer:
    """Client of one server that makes each call once, without retries. Connects with the first call.

    Args:
        name: Name of the server in messages, such as "server 1 at host:port".
        endpoint: Endpoint of the server.
        access: Credentials for calls over TCP.
    """

    def __init__(self, name: str, endpoint: str, access: Access) -> None:
        self.name = name
        self._access = access
        self._channel = open_channel(endpoint, access)

    @classmethod
    def server(cls, index: int, endpoint: str, access: Access) -> Self:
        """Return a client of server `index` of the fleet, named "server 1 at host:port"."""
        return cls(f"server {index} at {endpoint}", endpoint, access)

    def call(self, method: str, request: bytes, seconds: float) -> bytes:
        """Call a method of the server and return the bytes of the reply.

        If the server is unreachable, this waits up to 0.5 seconds for the connection before it raises the
        error, so that the next call finds the connection ready.

        Args:
            method: Service and name of the method, such as "Membership/Freeze".
            request: Bytes of the request.
            seconds: Limit of the call.

        Raises:
            ServerUnavailable: The server cannot be reached.
            PsfleetError: The call failed in another way.
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
        """Close the connection. Running calls fail. Safe to call twice."""
        self._channel.close()


def bind(server: grpc.Server, endpoint: str, access: Access) -> tuple[str, socket.socket]:
    """Bind both addresses of an endpoint: the gRPC address in `server`, and a socket for tensors.

    Returns:
        The endpoint that clients must use, with the actual ports in place of port 0, and the listening socket
        for tensors.

    Raises:
        ConfigError: An address is in use, invalid or not of this host. Or it is TCP, and `access` neither has
            credentials nor allows insecure connections.
    """
    control, tensors = addresses_of(endpoint)
    for address in (control, tensors):
        if not is_tcp(address):
            _claim_socket(address)
    if is_tcp(control):
        _try_port(control)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listener(tensors))
        try:
            port = access.listen(server, control)
        except RuntimeError as error:
            release(endpoint)
            raise ConfigError(f"cannot listen on {control!r}: {error}") from None
        stack.pop_all()
    if not is_tcp(endpoint):
        os.chmod(endpoint.removeprefix("unix:"), 0o600)
    elif control.endswith(":0"):
        host = control.rpartition(":")[0]
        endpoint = f"{host}:{port}/{listener.getsockname()[1]}"
    return endpoint, listener


def release(endpoint: str) -> None:
    """Remove the socket files that `bind` may have created for an endpoint."""
    for address in addresses_of(endpoint):
        if not is_tcp(address):
            Path(address.removeprefix("unix:")).unlink(missing_ok=True)


def _listener(address: str) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
        ConfigError: The address cannot be bound.
    """
    try:
        if is_tcp(address):
            host, _, port = address.rpartition(":")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            where = host.strip("[]"), int(port)
            return socket.create_server(where, family=family, backlog=_BACKLOG)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            path = address.removeprefix("unix:")
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(_BACKLOG)
            stack.pop_all()
            return listener
    except OSError as error:
        raise _cannot_listen(address, error) from None


def _cannot_listen(address: str, error: OSError) -> ConfigError:
    advice = "; choose another address or port 0" if is_tcp(address) else ""
    return ConfigError(f"cannot listen on {address!r}: {error.strerror}{advice}")


def _claim_socket(endpoint: str) -> None:
    """Remove the socket file that a dead server has left.

    Raises:
        ConfigError: A server still listens there, or the path cannot be used.
    """
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
            raise _cannot_listen(endpoint, error) from None
        else:
            raise ConfigError(f"cannot listen on {endpoint!r}: another server listens there")


def _try_port(endpoint: str) -> None:
    """Bind the port for a moment, because the system's error message gives the reason and gRPC's does not."""
    host, _, port = endpoint.rpartition(":")
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise _cannot_listen(endpoint, error) from None


class MeasuredMethod(NamedTuple):
    """Method that carries tensors, with the histogram of its durations.

    Attributes:
        behavior: Function of the request's bytes and, unless `returns` is set, of a DeferredReply.
        latency: Histogram that gets the time from each call to its reply.
        returns: True if the behavior returns the reply. Otherwise it completes the DeferredReply.
        at_once: Fast path that is called first, or None. It returns the reply, or it returns None without
            having changed anything, and `behavior` then handles the call.
    """

    behavior: Callable[..., Any]
    latency: LatencyHistogram
    returns: bool
    at_once: Callable[[bytes], bytes | None] | None = None

    def serve_call(self, request: bytes, call: IncomingCall) -> None:
        """Handle a call.

        The reply may come later. An exception of the method becomes the error of the call.
        """
        reply = DeferredReply(call, call.end, self.latency)
        try:
            if self.returns:
                reply.complete(self.behavior(request))
            else:
                self.behavior(request, reply)
        except Exception as error:
            reply.fail(as_psfleet_error(error))


def tensor_server(
    listener: socket.socket,
    endpoint: str,
    access: Access,
    limits: ServerLimits,
    messages: InboundMessages,
    methods: Mapping[str, MeasuredMethod],
) -> Http2Server:
    """Return the server for calls that carry tensors. The caller must start it.

    Args:
        listener: Socket that `bind` has made. The server closes it when it stops.
        endpoint: Endpoint of this process.
        access: Credentials of this process. Over TCP a call without the job's token is refused.
        limits: Limits on connections and messages.
        messages: Counter of the messages that are arriving at both addresses.
        methods: Methods by path.
    """
    credentials = access.credentials if is_tcp(endpoint) else None

    def refuse(path: str, authorization: str) -> str:
        if credentials is None:
            return ""
        tokens = [authorization] if authorization else []
        why = refusal(credentials, tokens, only_reads=path in READS)
        return REFUSED.format(why) if why else ""

    settings = ServerSettings(
        message=limits.message,
        connections=connection_limit(limits),
        handshakes=limits.handshakes,
        streams=limits.streams,
        incoming=limits.incoming,
        handshake=HANDSHAKE,
        refuse=refuse,
        at_once={
            name: method.at_once for name, method in methods.items() if method.at_once is not None
        },
    )
    behaviors = {name: method.serve_call for name, method in methods.items()}
    wrap = accepts(access, endpoint)
    return Http2Server(listener, wrap, behaviors, settings, RateLimitedLog(_log).say, messages)
