"""Calls that carry tensors, over psfleet's own HTTP/2 where the server offers it."""

import threading
from collections.abc import Callable

import grpc

from psfleet.errors import DeadlineExceeded, PsfleetError, ServerUnavailable
from psfleet.http2.call_errors import CallFailed, ConnectionBroken, DeadlinePassed
from psfleet.http2.http2_client import Http2Client, OutgoingCall
from psfleet.wire.access import Access, is_tcp
from psfleet.wire.channel import GRACE
from psfleet.wire.error_status import KEY, error_named
from psfleet.wire.frame import MAX_MESSAGE
from psfleet.wire.http2_access import connects
from psfleet.wire.v1 import shard_pb2

__all__ = ["TensorCalls"]

_METHODS = "Shard/Push", "Shard/Pull", "Shard/Exchange"
_PATHS = {method: f"/psfleet.v1.{method}" for method in _METHODS}
_PATIENCE = 10.0  # seconds for the server to say where, or whether it is there
_MOST_FAILURES = 3  # then the way is closed, by a firewall perhaps
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class TensorCalls:
    """Calls to one server. Where it offers nothing, or cannot be reached there, calls go as others do.

    Args:
        name: Of the server, for messages.
        endpoint: Says where it listens for all methods now.
        access: With what this process proves itself over TCP.
        ask: Makes the call `Shard/Transport` over the other transport, within so many seconds; raises
            PsfleetError.
    """

    def __init__(
        self, name: str, endpoint: Callable[[], str], access: Access, ask: Callable[[float], bytes]
    ) -> None:
        self._name = name
        self._endpoint = endpoint
        self._access = access
        self._ask = ask
        self._lock = threading.Lock()
        self._client: Http2Client | None = None
        self._found = endpoint()  # where it listened when it was asked
        self._asks = True
        self._closed = False
        self._failures = 0  # connections one after the other that could not be made

    @property
    def is_connected(self) -> bool:
        """Whether calls are made here now."""
        return self._client is not None

    def carries(self, method: str) -> bool:
        """Whether this call is to be made here.

        Raises:
            PsfleetError: The server cannot be asked where it listens.
        """
        if method not in _PATHS:
            return False
        if self._endpoint() != self._found:
            self._follow()
        if self._client is None and self._asks:
            self._connect()
        return self._client is not None

    @property
    def is_ready(self) -> bool:
        """Whether a call would leave here at once."""
        client = self._client
        return client is not None and client.is_ready and self._endpoint() == self._found

    def call(self, method: str, request: bytes, seconds: float) -> bytes:
        """Make a call that `carries` has accepted.

        Raises:
            PsfleetError: What it ended with.
        """
        return self.begin(method, request, seconds).finish()

    def begin(self, method: str, request: bytes, seconds: float) -> OutgoingCall:
        """Send such a call.

        Raises:
            ServerUnavailable: The connection is lost, or closed meanwhile.
        """
        client = self._client
        if client is None:
            raise ServerUnavailable(f"the connection to {self._name} is closed")
        seconds = max(seconds, 0) + GRACE
        try:
            return client.begin(_PATHS[method], request, seconds)
        except (ConnectionBroken, DeadlinePassed) as error:
            raise self._failed(client, error, seconds) from None

    def _failed(self, client: Http2Client, error: Exception, seconds: float) -> PsfleetError:
        """What a call ends with that its client has ended with this error."""
        match error:
            case CallFailed():
                code = _CODES.get(error.code, grpc.StatusCode.UNKNOWN)
                return error_named(error.metadata.get(KEY, ""), code, error.details, self._name)
            case DeadlinePassed():
                said = f"no answer within {seconds:.1f} seconds"
                return DeadlineExceeded(f"{self._name} does not answer: {said}")
        self._lose(client)
        return ServerUnavailable(f"{self._name} does not answer: {error}")

    def interrupt(self) -> None:
        """The server may have moved: calls to where it was fail, and the next one goes to where it is."""
        client = self._client
        if client is not None and self._endpoint() != self._found:
            client.close()

    def close(self) -> None:
        """Let go of the connections; calls under way fail. Safe to call twice."""
        with self._lock:
            client, self._client, self._closed = self._client, None, True
        if client is not None:
            client.close()

    def _connect(self) -> None:
        offer = shard_pb2.TransportReply.FromString(self._ask(_PATIENCE))
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
            kept = not self._closed
            if kept:
                self._client, self._asks, self._failures = client, False, 0
        if client is not None and not kept:  # closed meanwhile
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
            self._ask(_PATIENCE)
        except PsfleetError as error:
            raise ConnectionBroken(str(error)) from None

    def _follow(self) -> None:
        """The server has moved; where it is now it is asked anew."""
        with self._lock:
            client, self._client = self._client, None
            self._found, self._asks, self._failures = self._endpoint(), True, 0
        if client is not None:
            client.close()

    def _lose(self, client: Http2Client) -> None:
        """The server may have ended; the next one at its endpoint is asked anew."""
        with self._lock:
            if self._client is client:
                self._client, self._asks = None, True
        client.close()
