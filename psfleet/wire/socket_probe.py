"""What a look at a server's socket tells of why it does not answer."""

import contextlib

from psfleet.wire.client_socket import connected

__all__ = ["answers_tls", "closes_at_once"]

_MOMENT = 2.0  # seconds; whoever is there answers, or hangs up, sooner
_TLS = (b"\x15", b"\x16")  # records of TLS begin so: alert, handshake (RFC 8446, section 5.1)


def closes_at_once(endpoint: str, *, tls: bool = False) -> bool:
    """Whether it takes a connection and closes it without a word, as a server with too many does.

    One that has a place speaks first, or with TLS when it is spoken to.

    Args:
        endpoint: `unix:/path` or `host:port`.
        tls: Speak to it.
    """
    try:
        return _first(endpoint, tls) == b""
    except OSError:
        return False


def answers_tls(endpoint: str) -> bool:
    """Whether a server speaks TLS; no: it speaks something else, or hangs up, or nothing is there."""
    with contextlib.suppress(OSError):
        return _first(endpoint, True) in _TLS
    return False


def _first(endpoint: str, tls: bool) -> bytes:
    """The first byte that comes over a new connection; none: it was closed."""
    with (
        contextlib.suppress(ConnectionResetError, BrokenPipeError),
        connected(endpoint, _MOMENT) as probe,
    ):
        if tls:
            probe.sendall(_hello())
        return probe.recv(1)
    return b""


def _hello() -> bytes:
    """What begins a TLS connection."""
    import ssl  # loads the cryptography, rarely needed

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing else is said
    outgoing = ssl.MemoryBIO()
    end = context.wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        end.do_handshake()
    return outgoing.read()
