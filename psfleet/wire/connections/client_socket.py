"""Sockets that are connected to an endpoint, and the diagnosis of one that does not answer."""

import contextlib
import socket

from psfleet.wire.connections.access import is_tcp


def connected(endpoint: str, seconds: float) -> socket.socket:
    """Return a socket connected to `unix:/path` or `host:port`; its timeout is `seconds`.

    Raises:
        OSError: It cannot be reached in time.
    """
    if is_tcp(endpoint):
        host, _, port = endpoint.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), seconds)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(seconds)
        sock.connect(endpoint.removeprefix("unix:"))
    except BaseException:
        sock.close()
        raise
    return sock


_MOMENT = 2.0  # seconds; a server that is there answers, or hangs up, sooner
_TLS = (b"\x15", b"\x16")  # records of TLS begin so: alert, handshake (RFC 8446, section 5.1)


def closes_at_once(endpoint: str, *, tls: bool = False) -> bool:
    """Return whether it accepts and at once closes a connection, as a server with too many of them does.

    One that has a place speaks first, or with TLS when it is spoken to.

    Args:
        endpoint: `unix:/path` or `host:port`.
        tls: Speak to it.
    """
    try:
        return _first(endpoint, tls) == b""
    except OSError:
        return False


def speaks_tls(endpoint: str) -> bool:
    """Return whether a server speaks TLS; False also if it speaks something else, hangs up, or is not
    there.
    """
    with contextlib.suppress(OSError):
        return _first(endpoint, True) in _TLS
    return False


def _first(endpoint: str, tls: bool) -> bytes:
    """Return the first byte that comes over a new connection; none: it was closed."""
    with (
        contextlib.suppress(ConnectionResetError, BrokenPipeError),
        connected(endpoint, _MOMENT) as probe,
    ):
        if tls:
            probe.sendall(_hello())
        return probe.recv(1)
    return b""


def _hello() -> bytes:
    """Return the first bytes of a TLS connection."""
    import ssl  # loads the cryptography, rarely needed

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing else is said
    outgoing = ssl.MemoryBIO()
    end = context.wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        end.do_handshake()
    return outgoing.read()
