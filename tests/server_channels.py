"""Clients of grpcio for both addresses of a server, for tests that call any of its methods.

psfleet's own clients make each call where its method is answered. So does this channel, with grpcio's stock
client at both ends: the address for tensors speaks ordinary gRPC too.
"""

from typing import Any, Self

from psfleet.core.base.settings.server_endpoints import addresses_of
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.channel import open_channel
from psfleet_worker.connection.tensor_calls import PATHS


class ServerChannel:
    """Makes the stubs of grpc.Channel, each at the address where its method is answered."""

    def __init__(self, endpoint: str, access: Access | None = None) -> None:
        self._control = open_channel(endpoint, access)
        self._tensors = open_channel(addresses_of(endpoint).tensors, access)

    def unary_unary(self, method: str, *coders: Any, **named: Any) -> Any:
        """Return a stub of a method, as grpc.Channel does."""
        return self._of(method).unary_unary(method, *coders, **named)

    def stream_unary(self, method: str, *coders: Any) -> Any:
        """Return a stub of a method, as grpc.Channel does."""
        return self._of(method).stream_unary(method, *coders)

    def close(self) -> None:
        """Close both connections."""
        self._control.close()
        self._tensors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _of(self, method: str) -> Any:
        return self._tensors if method in PATHS.values() else self._control
