"""Another server of the fleet, as this one calls it."""

from typing import Self

import grpc

from psfleet.errors import ServerUnavailable
from psfleet.wire.connections.access import Access
from psfleet.wire.connections.channel import await_connection, open_channel
from psfleet.wire.connections.error_status import error_of

_MOMENT = 0.5  # seconds


class Peer:
    """Calls to one server, made once each; it connects when it is first called.

    Args:
        name: Name for messages, as that of `Peer.server`.
        endpoint: Endpoint at which it listens.
        access: With what this process proves itself over TCP.
    """

    def __init__(self, name: str, endpoint: str, access: Access) -> None:
        self.name = name
        self._access = access
        self._channel = open_channel(endpoint, access)

    @classmethod
    def server(cls, index: int, endpoint: str, access: Access) -> Self:
        """Return a server of the fleet: "server 1 at host:port"."""
        return cls(f"server {index} at {endpoint}", endpoint, access)

    def call(self, method: str, request: bytes, seconds: float) -> bytes:
        """The answer to a call of "Service/Method".

        One that could not be made waits a moment for the connection, so that the next one finds it.

        Raises:
            PsfleetError: The call failed; ServerUnavailable if the server cannot be reached.
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
        """Let go of the connection; calls under way fail. Safe to call twice."""
        self._channel.close()
