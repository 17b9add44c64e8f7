"""Sends tensor calls over a server's own HTTP/2 endpoint, and falls back to gRPC if there is none.

A server listens twice: with grpcio for all methods, and with psfleet's HTTP/2 server (psfleet.core.net.http2)
for pushes and pulls, which cost less CPU there. This module asks the server over gRPC where the second
endpoint is, connects to it, and turns its errors into psfleet's. After a broken connection, or when the
server has moved, the next call asks again. If the endpoint cannot be reached (a firewall may close its port),
calls go over gRPC.
"""

import threading
from collections.abc import Callable

import grpc

from psfleet.core.base.errors import DeadlineExceeded, PsfleetError, ServerUnavailable
from psfleet.core.net.connections.access import Access, is_tcp
from psfleet.core.net.connections.channel import GRACE, HANDSHAKE, KEY, error_named
from psfleet.core.net.connections.tls_sockets import connects
from psfleet.core.net.frame import MAX_MESSAGE
from psfleet.core.net.http2.frames import CallFailed, ConnectionBroken, DeadlinePassed
from psfleet.core.net.http2.http2_client import ClientConnection, Http2Client
from psfleet.core.net.v1 import shard_pb2

_METHODS = "Shard/Push", "Shard/Pull", "Shard/Exchange"
PATHS = {method: f"/psfleet.v1.{method}" for method in _METHODS}
_PROBE = 10.0  # seconds in which a server that is alive replies to a probe
_MOST_FAILURES = 3  # failed connections in a row; then a firewall may have closed the port
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class TensorCalls:
    """Tensor calls to one server.

    Args:
        name: Name of the server in error messages.
        endpoint: Returns the server's present gRPC endpoint, which changes when the server moves.
        access: Credentials of this process.
        ask: Asks over gRPC where the server listens (`Shard/Transport`). Takes the time limit in seconds;
            raises PsfleetError.

    Attributes:
        client: Client of the HTTP/2 endpoint, or None while calls go over gRPC.
    """

    def __init__(
        self, name: str, endpoint: Callable[[], str], access: Access, ask: Callable[[float], bytes]
    ) -> None:
        self._name = name
        self._endpoint = endpoint
        self._access = access
        self._ask = ask
        self._lock = threading.Lock()
        self.client: Http2Client | None = None
        self._found = endpoint()  # gRPC endpoint at the time of the last lookup
        self._asks = True  # True if the next call asks the server where it listens
        self._closed = False
        self._failures = 0  # failed connections in a row

    def carries(self, method: str, seconds: float) -> bool:
        """Return True if a call goes over the HTTP/2 endpoint. May ask the server and connect first.

        Args:
            method: "Service/Method".
            seconds: Time limit of the call, including the lookup of the endpoint.

        Raises:
            PsfleetError: The server cannot be asked.
        """
        if method not in PATHS:
            return False
        if self._endpoint() != self._found:
            self._follow()
        if self.client is None and self._asks:
            self._connect(seconds)
        return self.client is not None

    def call(self, method: str, request: bytes, seconds: float) -> bytes:
        """Make a call for which `carries` returned True, and return the reply.

        Raises:
            PsfleetError: The call failed.
        """
        return self.begin(method, request, seconds).finish()

    def begin(self, method: str, request: bytes, seconds: float) -> ClientConnection:
        """Send a call for which `carries` returned True; `finish` of the result returns the reply.

        Raises:
            ServerUnavailable: No connection can be made, or it is lost.
        """
        client = self.client
        if client is None:
            raise ServerUnavailable(f"the connection to {self._name} is closed")
        try:
            return client.begin(PATHS[method], request, max(seconds, 0) + GRACE)
        except Exception as error:
            raise self.failed(client, error, seconds) from None

    def failed(self, client: Http2Client, error: Exception, seconds: float) -> Exception:
        """Return the error that a call that could not be sent raises."""
        match error:
            # The time limit of the connection has passed, not that of the call, which may be tried again.
            case DeadlinePassed():
                failure = ConnectionBroken(f"no connection within {HANDSHAKE:g} seconds")
                return self._failed(client, failure, seconds)
            case ConnectionBroken():
                return self._failed(client, error, seconds)
        return error

    def _failed(self, client: Http2Client, error: Exception, seconds: float) -> PsfleetError:
        """Return the error of a call whose client failed with `error`."""
        match error:
            case CallFailed():
                code = _CODES.get(error.code, grpc.StatusCode.UNKNOWN)
                return error_named(error.metadata.get(KEY, ""), code, error.details, self._name)
            case DeadlinePassed():
                details = f"no answer within {seconds:.1f} seconds"
                return DeadlineExceeded(f"{self._name} does not answer: {details}")
        self._lose(client)
        return ServerUnavailable(f"{self._name} does not answer: {error}")

    def interrupt(self) -> None:
        """Make calls under way fail if the server has moved; the next call goes to its new endpoint."""
        client = self.client
        if client is not None and self._endpoint() != self._found:
            client.close()

    def close(self) -> None:
        """Close the connections; calls under way fail. Safe to call twice."""
        with self._lock:
            client, self.client, self._closed = self.client, None, True
        if client is not None:
            client.close()

    def _connect(self, seconds: float) -> None:
        offer = shard_pb2.TransportReply.FromString(self._ask(seconds))
        client = self._made(offer) if offer.port or offer.path else None
        if client is not None:
            try:
                client.connect()
            except (ConnectionBroken, DeadlinePassed) as error:
                client.close()
                self._failures += 1
                # A firewall that drops packets makes each try last until its limit: one is enough then.
                silent = isinstance(error, DeadlinePassed)
                self._asks = not silent and self._failures < _MOST_FAILURES
                return
        with self._lock:
            is_open = not self._closed
            if is_open:
                self.client, self._asks, self._failures = client, False, 0
        if client is not None and not is_open:  # closed meanwhile
            client.close()

    def _made(self, offer: shard_pb2.TransportReply) -> Http2Client:
        endpoint = f"unix:{offer.path}"
        if offer.port:
            endpoint = f"{self._found.rpartition(':')[0]}:{offer.port}"
        return Http2Client(
            connects(self._access, endpoint),
            "psfleet",
            is_tcp(endpoint) and self._access.credentials is not None,
            MAX_MESSAGE,
            self._access.metadata or (),
            self._probe,
            self._failed,
        )

    def _probe(self) -> None:
        try:
            self._ask(_PROBE)
        except DeadlineExceeded:
            pass  # the server may be stopped or short of CPU; the call has a deadline of its own
        except PsfleetError as error:
            raise ConnectionBroken(str(error)) from None

    def _follow(self) -> None:
        """Note that the server has moved; its transport is looked up again at the new endpoint."""
        with self._lock:
            client, self.client = self.client, None
            self._found, self._asks, self._failures = self._endpoint(), True, 0
        if client is not None:
            client.close()

    def _lose(self, client: Http2Client) -> None:
        """Note that the server may have ended; the transport of the next one there is looked up again."""
        with self._lock:
            if self.client is client:
                self.client, self._asks = None, True
        client.close()
