"""Sockets for the HTTP/2 endpoint, plain or under TLS, and probes that explain a refused connection.

`accepts` and `connects` make the transports for ../http2. The probes explain a failed connection to the
user: gRPC reports UNAVAILABLE both if a server is absent and if it rejects a certificate, and sometimes
only that the connection was closed. `why_refused` connects again with Python's own TLS, which distinguishes
these cases. The probes send no request.
"""

import contextlib
import datetime
import functools
import socket
import ssl
import time
from collections.abc import Callable

from psfleet.core.base.errors import PsfleetError
from psfleet.core.net.connections.access import Access, is_tcp
from psfleet.core.net.connections.connection_limits import HANDSHAKE
from psfleet.core.net.connections.credentials import SERVER_NAME, Credentials
from psfleet.core.net.http2.frames import ConnectionBroken, DeadlinePassed
from psfleet.core.net.http2.socket_transport import PlainTransport, Tick, TlsTransport, Transport

_MOMENT = 2.0  # seconds within which a live server sends its first byte or closes the connection
_TLS = (b"\x15", b"\x16")  # first byte of a TLS record: alert, handshake (RFC 8446, section 5.1)
_HTTP2 = "h2"
_STEP_TIMEOUT = 2.0  # seconds for each step of a probe
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""First bytes of an HTTP/2 client: the preface and an empty SETTINGS frame (RFC 9113, section 3.4)."""
_NOT_VALID = {  # OpenSSL's x509_vfy.h
    7: "it is of another job",  # X509_V_ERR_CERT_SIGNATURE_FAILURE
    9: "it is not valid yet; compare the hosts' clocks",  # X509_V_ERR_CERT_NOT_YET_VALID
    10: "it has expired",  # X509_V_ERR_CERT_HAS_EXPIRED
    19: "it is of another job",  # X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN
    20: "it is of another job",  # X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY
    26: "it is not a server's",  # X509_V_ERR_INVALID_PURPOSE
    62: "it is made out to another name",  # X509_V_ERR_HOSTNAME_MISMATCH
}


def connected(endpoint: str, seconds: float) -> socket.socket:
    """Return a socket connected to `unix:/path` or `host:port`, with a timeout of `seconds`.

    Raises:
        OSError: The endpoint cannot be reached in time.
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


def closes_at_once(endpoint: str, *, tls: bool = False) -> bool:
    """Return whether a server accepts a connection and closes it at once, as if it had too many connections.

    A server that keeps the connection sends its first byte, or with TLS its reply to the handshake.

    Args:
        endpoint: `unix:/path` or `host:port`.
        tls: True to begin a TLS handshake.
    """
    try:
        return _first(endpoint, tls) == b""
    except OSError:
        return False


def is_silent(endpoint: str, *, tls: bool = False) -> bool:
    """Return whether a server accepts a connection but sends nothing, as a stopped process does.

    Args:
        endpoint: `unix:/path` or `host:port`.
        tls: True to begin a TLS handshake.
    """
    try:
        return _first(endpoint, tls) is None
    except OSError:
        return False


def speaks_tls(endpoint: str) -> bool:
    """Return whether a server speaks TLS.

    Also False if the server cannot be reached or closes the connection.
    """
    with contextlib.suppress(OSError):
        return _first(endpoint, True) in _TLS
    return False


def _first(endpoint: str, tls: bool) -> bytes | None:
    """Return the first byte that a server sends, b"" if it closes the connection, or None if it is silent."""
    with (
        contextlib.suppress(ConnectionResetError, BrokenPipeError),
        connected(endpoint, _MOMENT) as probe,
    ):
        if tls:
            probe.sendall(_hello())
        try:
            return probe.recv(1)
        except TimeoutError:
            return None
    return b""


def _hello() -> bytes:
    """Return the first message of a client's TLS handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The probe ends before anything secret is sent, so it need not verify the server.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    end = context.wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        end.do_handshake()
    return outgoing.read()


def accepts(
    access: Access, endpoint: str, protocol: str = _HTTP2
) -> Callable[[socket.socket], Transport]:
    """Return a function that makes a transport from an accepted socket, with TLS if there are credentials.

    Args:
        endpoint: Endpoint that the server listens on. A Unix socket never uses TLS.
        protocol: Protocol to agree on during the TLS handshake (ALPN).
    """
    if not is_tcp(endpoint) or access.credentials is None:
        return functools.partial(PlainTransport, mostly_waits=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    _prove(context, access.credentials, protocol)

    def wrap(sock: socket.socket) -> Transport:
        tls_socket = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return TlsTransport(tls_socket, needs_http2=protocol == _HTTP2)

    return wrap


def connects(access: Access, endpoint: str) -> Callable[[], Transport]:
    """Return a function that connects to `unix:/path` or `host:port` and returns the transport.

    That function raises ConnectionBroken, or DeadlinePassed if the server does not accept in time.
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
    """Configure TLS so that both ends must present a certificate of the job's authority."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=credentials.ca.decode("ascii"))
    context.load_cert_chain(credentials.folder / "cert.pem", credentials.folder / "key.pem")
    context.set_alpn_protocols([protocol])


def why_refused(endpoint: str, access: Access) -> str:
    """Return why the server and this process reject each other, or "" if no reason is found."""
    if not is_tcp(endpoint):
        return ""
    first = _ask(endpoint, access)
    # Ask twice: a server that is just being killed closes connections too, but the second time it is gone.
    return first if first and _ask(endpoint, access) == first else ""


def _ask(endpoint: str, access: Access) -> str:
    if access.credentials is None:
        advice = "the server wants credentials and this process has none (PSFLEET_TLS)"
        return advice if speaks_tls(endpoint) else ""
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _STEP_TIMEOUT) as plain:
            return _ask_with(plain, access.credentials)
    except OSError:
        return ""


def _ask_with(plain: socket.socket, credentials: Credentials) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(cadata=credentials.ca.decode())
    context.load_cert_chain(credentials.folder / "cert.pem", credentials.folder / "key.pem")
    tls = _TlsConversation(plain, context)
    try:
        tls.take(tls.end.do_handshake)
    except ssl.SSLCertVerificationError as error:
        why = _NOT_VALID.get(error.verify_code, error.verify_message)
        return f"the server's certificate is not good here: {why}"
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return "the server speaks no TLS; it was started with --insecure, or it is no server"
        return ""
    try:
        # Under TLS 1.3 a client learns only after the handshake that its certificate was rejected. So send
        # some bytes and see whether the server closes the connection.
        tls.end.write(_HELLO)
        return "" if tls.take(lambda: tls.end.read(1)) else _refusal(credentials)
    except (ssl.SSLError, ConnectionError):
        return _refusal(credentials)


class _TlsConversation:
    """TLS over a socket, which the caller closes.

    Used instead of `ssl.SSLSocket`, which leaves the socket open if the server closes it in the handshake.
    """

    def __init__(self, plain: socket.socket, context: ssl.SSLContext) -> None:
        self._plain = plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.end = context.wrap_bio(self._incoming, self._outgoing, server_hostname=SERVER_NAME)

    def take(self, step: Callable[[], object]) -> object:
        """Call a TLS method until it completes, and meanwhile move bytes between OpenSSL and the socket."""
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                self._plain.sendall(self._outgoing.read())
                if data := self._plain.recv(1 << 16):
                    self._incoming.write(data)
                else:
                    self._incoming.write_eof()
            else:
                self._plain.sendall(self._outgoing.read())
                return result


def _refusal(credentials: Credentials) -> str:
    """Return why a server that has a valid certificate rejects this process's certificate."""
    from psfleet.core.net.connections.certificates import (
        ends,  # loads the cryptography, rarely needed
    )

    with contextlib.suppress(PsfleetError):
        end = ends(credentials.certificate)
        if end <= datetime.datetime.now(datetime.UTC):
            return f"this process's certificate has expired, on {end:%Y-%m-%d %H:%M} UTC"
    return "the server does not take this process's certificate; it is of another job"
