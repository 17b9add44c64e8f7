"""Sends the calls that carry tensors to one server's address for tensors, also after the server has moved.

Calls that carry values of tables go over psfleet's own HTTP/2 (psfleet.core.net.http2), which costs less CPU
than gRPC. Every other method goes over gRPC (server_client.py). This module knows the server's address for
tensors, connects when a call needs a connection, and converts errors of HTTP/2 to psfleet's errors.
"""

import threading
from collections.abc import Callable

import grpc

from psfleet.core.base.errors import DeadlineExceeded, PsfleetError, ServerUnavailable
from psfleet.core.base.settings.server_endpoints import addresses_of
from psfleet.core.net.connections.access import Access, is_tcp
from psfleet.core.net.connections.connection_limits import GRACE, HANDSHAKE
from psfleet.core.net.connections.error_statuses import KEY, error_named
from psfleet.core.net.connections.tls_sockets import connects
from psfleet.core.net.frame import MAX_MESSAGE
from psfleet.core.net.http2.frames import CallFailed, ConnectionBroken, DeadlinePassed
from psfleet.core.net.http2.http2_client import ClientConnection, Http2Client

PATHS = {
    f"Shard/{name}": f"/psfleet.v1.Shard/{name}"
    for name in ("Push", "Pull", "Exchange", "ReadState", "WriteState")
}
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class TensorCalls:
    """Tensor calls to one server.

    Args:
        name: Name of the server in error messages.
        endpoint: Returns the server's present endpoint, which changes when the server moves.
        access: Credentials of this process.

    Attributes:
        client: HTTP/2 client of the server's address for tensors. Replaced when the server moves.
    """

    def __init__(self, name: str, endpoint: Callable[[], str], access: Access) -> None:
        self._name = name
        self._find = endpoint
        self._access = access
        self._lock = threading.Lock()
        self._closed = False
        self._endpoint = endpoint()
        self.client = self._client()

    def call(self, method: str, request: bytes, seconds: float) -> bytes:
        """Make a call, which may last `seconds`, and return the reply.

        Raises:
            PsfleetError: The call failed.
        """
        return self.begin(method, request, seconds).finish()

    def begin(self, method: str, request: bytes, seconds: float) -> ClientConnection:
        """Send a call. `finish` of the result returns the reply.

        Raises:
            ServerUnavailable: No connection can be made, or the connection is lost.
        """
        client = self.client  # `follow` may replace it meanwhile
        try:
            # The server gives up after `seconds`. GRACE leaves the time for its error to arrive.
            return client.begin(PATHS[method], request, max(seconds, 0) + GRACE)
        except Exception as error:
            raise self.failed(client, error, seconds) from None

    def failed(self, client: Http2Client, error: Exception, seconds: float) -> Exception:
        """Return the error to raise for a call that could not be sent."""
        match error:
            # The time limit of the connection has passed, not the limit of the call, which may be tried
            # again.
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
        # The server may have ended, and then its other connections are broken too.
        client.forget_idle()
        return ServerUnavailable(f"{self._name} does not answer: {error}")

    def follow(self) -> None:
        """Continue at the server's present endpoint. If the server has moved, running calls fail."""
        with self._lock:
            endpoint = self._find()
            if self._closed or endpoint == self._endpoint:
                return
            former, self._endpoint = self.client, endpoint
            self.client = self._client()
        # Outside of the lock, and after the exchange: a call that fails here is repeated over the new client.
        former.close()

    def close(self) -> None:
        """Close the connections. Running calls fail. Safe to call twice."""
        with self._lock:
            self._closed = True
        self.client.close()

    def _client(self) -> Http2Client:
        address = addresses_of(self._endpoint).tensors
        return Http2Client(
            connects(self._access, address),
            "psfleet",
            is_tcp(address) and self._access.credentials is not None,
            MAX_MESSAGE,
            self._access.metadata or (),
            self._failed,
        )
