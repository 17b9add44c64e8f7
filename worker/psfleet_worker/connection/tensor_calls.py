"""Calls that carry tensors: which of a server's two endpoints takes them, and what to do when one fails."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from psfleet.core.base.errors import DeadlineExceeded, PsfleetError, ServerUnavailable
from psfleet.core.net.connections.access import Access, is_tcp
from psfleet.core.net.connections.channel import GRACE, HANDSHAKE, KEY, error_named
from psfleet.core.net.connections.tls_sockets import connects
from psfleet.core.net.frame import MAX_MESSAGE
from psfleet.core.net.http2.frames import CallFailed, ConnectionBroken, DeadlinePassed
from psfleet.core.net.http2.http2_client import ClientConnection, Http2Client
from psfleet.core.net.v1 import shard_pb2

if TYPE_CHECKING:
    pass


_METHODS = "Shard/Push", "Shard/Pull", "Shard/Exchange"
PATHS = {method: f"/psfleet.v1.{method}" for method in _METHODS}
_PROBE = 10.0  # seconds in which a server that has not ended says so
_MOST_FAILURES = 3  # then the way is closed, by a firewall perhaps
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class TensorCalls:
    """Calls to one server. Where it offers nothing, or cannot be reached there, calls go as others do.

    Args:
        endpoint: Returns its present endpoint for all methods.
        ask: Asks where the server listens (`Shard/Transport`) over the other transport, within so many
            seconds; raises PsfleetError.

    Attributes:
        client: Makes the calls; None: they go as others do.
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
        self._found = endpoint()  # where it listened when it was asked
        self._asks = True
        self._closed = False
        self._failures = 0  # connections one after the other that could not be made

    def carries(self, method: str, seconds: float) -> bool:
        """Return whether this call is to be made over this connection.

        `seconds`: How long the call may take, and the question where the server listens.

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
        """Make a call that `carries` has accepted.

        Raises:
            PsfleetError: The call failed.
        """
        return self.begin(method, request, seconds).finish()

    def begin(self, method: str, request: bytes, seconds: float) -> ClientConnection:
        """Send such a call.

        Raises:
            ServerUnavailable: There is no connection to be had, or it is lost.
        """
        client = self.client
        if client is None:
            raise ServerUnavailable(f"the connection to {self._name} is closed")
        try:
            return client.begin(PATHS[method], request, max(seconds, 0) + GRACE)
        except Exception as error:
            raise self.failed(client, error, seconds) from None

    def failed(self, client: Http2Client, error: Exception, seconds: float) -> Exception:
        """Return the error of a call that could not be sent."""
        match error:
            case DeadlinePassed():  # of the connection: the call has time to be made again
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
        """Let calls to where the server was fail, if it has moved; the next one goes to where it is."""
        client = self.client
        if client is not None and self._endpoint() != self._found:
            client.close()

    def close(self) -> None:
        """Let go of the connections; calls under way fail. Safe to call twice."""
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
                silent = isinstance(error, DeadlinePassed)  # another try would take as long
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
            pass  # it may be stopped, or have no processor: a call has its own deadline
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
