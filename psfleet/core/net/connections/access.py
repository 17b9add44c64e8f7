"""Access to other processes of a job over TCP: mutual TLS with the job's certificates, and its token.

Plain TCP is refused unless PSFLEET_INSECURE allows it. Unix sockets need neither TLS nor token: the kernel
admits only users who may enter the folder of the socket. This is the only module that opens gRPC channels
and ports, so the rule cannot be bypassed by accident.
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
# Held while a channel is opened: the first channel starts gRPC's core, and only one thread may do that.
_opening = threading.Lock()


def is_tcp(endpoint: str) -> bool:
    """Return whether the endpoint is a TCP address, as opposed to a Unix socket."""
    return not endpoint.startswith("unix:")


@dataclass(frozen=True)
class Access:
    """Credentials and settings that this process needs to connect to other processes.

    Attributes:
        credentials: Certificates and token. None means no TLS: TCP is then used only if `insecure`.
        insecure: True if the user explicitly allows plain TCP.
        relocations: Path of the file that lists the new endpoints of moved servers. Empty if servers do not
            move.
    """

    credentials: Credentials | None = None
    insecure: bool = False
    relocations: str = ""

    @classmethod
    def of(cls, environment: Environment) -> "Access":
        """Return the access that environment variables configure (PSFLEET_TLS, PSFLEET_INSECURE).

        Raises:
            ConfigError: The credentials cannot be read.
        """
        folder = environment.tls
        credentials = Credentials.read(folder) if folder else None
        return cls(credentials, environment.insecure, environment.relocations)

    @cached_property
    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """Headers to pass with every gRPC call: the job's token. None if there are no credentials.

        gRPC's own call credentials would send the token too, but cost 150 microseconds a call.
        """
        if self.credentials is None:
            return None
        return ((TOKEN_KEY, self.credentials.bearer),)

    def channel(self, endpoint: str, options: list[tuple[str, Any]]) -> grpc.Channel:
        """Open a gRPC channel to a server, with TLS if there are credentials.

        Args:
            endpoint: Endpoint of the server. The channel connects to its control address.

        Raises:
            ConfigError: The endpoint is TCP, there are no credentials, and `insecure` is False.
        """
        plain = not is_tcp(endpoint) or self._is_plain(endpoint, "connect to")
        address = addresses_of(endpoint).control
        with _opening:
            if plain:
                return grpc.insecure_channel(address, options)
            assert self.credentials is not None
            channel_credentials = grpc.ssl_channel_credentials(
                self.credentials.ca, self.credentials.key, self.credentials.certificate
            )
            # Certificates name a role and not a host, so the name to be verified is always the same.
            name_override = ("grpc.ssl_target_name_override", SERVER_NAME)
            return grpc.secure_channel(address, channel_credentials, [*options, name_override])

    def listen(self, server: grpc.Server, address: str) -> int:
        """Bind a gRPC server to an address, with TLS if there are credentials. Returns the port.

        Raises:
            ConfigError: The address is TCP, there are no credentials, and `insecure` is False.
            RuntimeError: gRPC cannot bind the address.
        """
        if not is_tcp(address) or self._is_plain(address, "listen on"):
            return server.add_insecure_port(address)
        assert self.credentials is not None
        pair = (self.credentials.key, self.credentials.certificate)
        server_credentials = grpc.ssl_server_credentials(
            [pair], self.credentials.ca, require_client_auth=True
        )
        return server.add_secure_port(address, server_credentials)

    def _is_plain(self, endpoint: str, action: str) -> bool:
        if self.credentials is None and not self.insecure:
            raise ConfigError(
                f"cannot {action} {endpoint!r}: TCP needs credentials; name their folder in PSFLEET_TLS "
                "(psfleet-launch does, or `psfleet certs` makes one), or say PSFLEET_INSECURE=1 "
                "where every host on the network is trusted"
            )
        return self.credentials is None
