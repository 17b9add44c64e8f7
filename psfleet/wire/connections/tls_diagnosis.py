"""Diagnosis of a server over TCP that does not answer: it is away, or one rejects the other's identity.

gRPC says UNAVAILABLE for both, and where a server turns a certificate down it says only that the
connection was closed. So the question is asked again, with Python's own TLS. No request is sent.
"""

import contextlib
import datetime
import socket
import ssl
from collections.abc import Callable

from psfleet.errors import PsfleetError
from psfleet.wire.connections.access import Access, is_tcp
from psfleet.wire.connections.certificates import ends
from psfleet.wire.connections.client_socket import speaks_tls
from psfleet.wire.connections.credentials import SERVER_NAME, Credentials

_STEP_TIMEOUT = 2.0  # seconds for each step
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""First bytes of an HTTP/2 client: the preface and empty settings (RFC 9113, section 3.4)."""

_NOT_VALID = {  # OpenSSL's x509_vfy.h
    7: "it is of another job",  # X509_V_ERR_CERT_SIGNATURE_FAILURE
    9: "it is not valid yet; compare the hosts' clocks",  # X509_V_ERR_CERT_NOT_YET_VALID
    10: "it has expired",  # X509_V_ERR_CERT_HAS_EXPIRED
    19: "it is of another job",  # X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN
    20: "it is of another job",  # X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY
    26: "it is not a server's",  # X509_V_ERR_INVALID_PURPOSE
    62: "it is made out to another name",  # X509_V_ERR_HOSTNAME_MISMATCH
}


def why_refused(endpoint: str, access: Access) -> str:
    """Explain why the server and this process reject each other; empty: that is not it, or not sure."""
    if not is_tcp(endpoint):
        return ""
    first = _ask(endpoint, access)
    # A server that is just being killed looks like one that hangs up.
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
        tls.end.write(_HELLO)
        return "" if tls.take(lambda: tls.end.read(1)) else _refusal(credentials)
    except (ssl.SSLError, ConnectionError):
        return _refusal(credentials)


class _TlsConversation:
    """TLS over a socket that its owner closes. (One of `ssl` is left open if its server hangs up.)"""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext) -> None:
        self._plain = plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.end = context.wrap_bio(self._incoming, self._outgoing, server_hostname=SERVER_NAME)

    def take(self, step: Callable[[], object]) -> object:
        """Take a step of `end`, with all that has to travel for it."""
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
    """Say why a server whose certificate is good does not take ours."""
    with contextlib.suppress(PsfleetError):
        end = ends(credentials.certificate)
        if end <= datetime.datetime.now(datetime.UTC):
            return f"this process's certificate has expired, on {end:%Y-%m-%d %H:%M} UTC"
    return "the server does not take this process's certificate; it is of another job"
