"""Access to the other processes of a job over TCP: mutual TLS and a token, or plain text if so set.

Unix sockets need none of this: the kernel lets in only who may enter their folder.
"""

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import grpc

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.server_endpoints import addresses_of
from psfleet.core.net.connections.credentials import SERVER_NAME, Credentials

TOKEN_KEY = "authorization"
# The first channel begins gRPC's core, so one thread at a time opens a channel.
_opening = threading.Lock()


def is_tcp(endpoint: str) -> bool:
    """Return whether the endpoint is reachable over the network."""
    return not endpoint.startswith("unix:")


@dataclass(frozen=True)
class Access:
    """This process's access to others over TCP.

    Attributes:
        credentials: None: it has none, and does not use TCP unless `insecure`.
        insecure: True if plain TCP is allowed explicitly.
        relocations: The file that says where servers have moved to; empty: they do not move.
    """

    credentials: Credentials | None = None
    insecure: bool = False
    relocations: str = ""

    @classmethod
    def of(cls, environment: Environment) -> "Access":
        """Return the access that the environment configures.

        Raises:
            ConfigError: The credentials cannot be read.
        """
        folder = environment.tls
        credentials = Credentials.read(folder) if folder else None
        return cls(credentials, environment.insecure, environment.relocations)

    @cached_property
    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """Metadata of every call. (gRPC's own call credentials cost 150 microseconds a call.)"""
        if self.credentials is None:
            return None
        return ((TOKEN_KEY, self.credentials.bearer),)

    def channel(self, endpoint: str, options: list[tuple[str, Any]]) -> grpc.Channel:
        """Return a channel with these options to the control address of an endpoint.

        Raises:
            ConfigError: The endpoint is TCP and there are no credentials.
        """
        plain = not is_tcp(endpoint) or self._is_plain(endpoint, "connect to")
        address = addresses_of(endpoint).control
        with _opening:
            if plain:
                return grpc.insecure_channel(address, options)
            assert self.credentials is not None
            own = grpc.ssl_channel_credentials(
                self.credentials.ca, self.credentials.key, self.credentials.certificate
            )
            name_override = ("grpc.ssl_target_name_override", SERVER_NAME)
            return grpc.secure_channel(address, own, [*options, name_override])

    def listen(self, server: grpc.Server, address: str) -> int:
        """Let gRPC's server listen at an address, and return the port.

        Raises:
            ConfigError: The endpoint is TCP and there are no credentials.
            RuntimeError: gRPC cannot have the address.
        """
        if not is_tcp(address) or self._is_plain(address, "listen on"):
            return server.add_insecure_port(address)
        assert self.credentials is not None
        pair = (self.credentials.key, self.credentials.certificate)
        own = grpc.ssl_server_credentials([pair], self.credentials.ca, require_client_auth=True)
        return server.add_secure_port(address, own)

    def _is_plain(self, endpoint: str, what: str) -> bool:
        if self.credentials is None and not self.insecure:
            raise ConfigError(
                f"cannot {what} {endpoint!r}: TCP needs credentials; name their folder in PSFLEET_TLS "
                "(psfleet-launch does, or `psfleet certs` makes one), or say PSFLEET_INSECURE=1 "
                "where every host on the network is trusted"
            )
        return self.credentials is None
