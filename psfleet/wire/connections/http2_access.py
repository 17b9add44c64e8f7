"""Sockets of psfleet's own HTTP/2: with the job's mutual TLS over TCP, as gRPC's channels have it."""

import socket
import ssl
import time
from collections.abc import Callable

from psfleet.http2.call_errors import ConnectionBroken, DeadlinePassed
from psfleet.http2.socket_transport import PlainTransport, Tick, TlsTransport, Transport
from psfleet.wire.connections.access import Access, is_tcp
from psfleet.wire.connections.channel import HANDSHAKE
from psfleet.wire.connections.client_socket import connected
from psfleet.wire.connections.credentials import SERVER_NAME, Credentials

_HTTP2 = "h2"


def accepts(
    access: Access, endpoint: str, protocol: str = _HTTP2
) -> Callable[[socket.socket], Transport]:
    """Return the function that makes a transport of a socket accepted by a server at this endpoint.

    `protocol`: What is spoken over it, for TLS.
    """
    if not is_tcp(endpoint) or access.credentials is None:
        return PlainTransport
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    _prove(context, access.credentials, protocol)

    def wrap(sock: socket.socket) -> Transport:
        tls_socket = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return TlsTransport(tls_socket, needs_http2=protocol == _HTTP2)

    return wrap


def connects(access: Access, endpoint: str) -> Callable[[], Transport]:
    """Return the function that makes a connection to `unix:/path` or `host:port`.

    It raises ConnectionBroken, or DeadlinePassed if no byte arrives.
    """
    context = None
    if is_tcp(endpoint) and access.credentials is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _prove(context, access.credentials, _HTTP2)

    def connect() -> Transport:
        try:
            sock = connected(endpoint, HANDSHAKE)
            sock.settimeout(None)
        except TimeoutError:
            raise DeadlinePassed from None
        except OSError as error:
            raise ConnectionBroken(f"cannot connect to {endpoint!r}: {error.strerror}") from None
        if context is None:
            return PlainTransport(sock)
        transport = TlsTransport(
            context.wrap_socket(sock, server_hostname=SERVER_NAME, do_handshake_on_connect=False)
        )
        try:
            transport.handshake(_until(time.monotonic() + HANDSHAKE))
        except BaseException:
            transport.close()
            raise
        return transport

    return connect


def _until(deadline: float) -> Tick:
    def tick() -> None:
        if time.monotonic() > deadline:
            raise ConnectionBroken("the server takes too long to agree on TLS")

    return tick


def _prove(context: ssl.SSLContext, credentials: Credentials, protocol: str) -> None:
    """Let both ends prove themselves with certificates of the job's own authority."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=credentials.ca.decode("ascii"))
    context.load_cert_chain(credentials.folder / "cert.pem", credentials.folder / "key.pem")
    context.set_alpn_protocols([protocol])
