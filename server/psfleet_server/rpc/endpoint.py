"""Endpoints: checked before gRPC takes them, named as they are, and cleaned up afterwards.

gRPC says only "failed to bind", and takes a unix socket away from a server that still uses it.
"""

import contextlib
import os
import socket
from pathlib import Path

import grpc

from psfleet.errors import ConfigError
from psfleet.platform.sockets import LONGEST_PATH
from psfleet.wire.connections.access import Access


def bind(server: grpc.Server, endpoint: str, access: Access) -> str:
    """Let the server listen there; the endpoint as clients must name it (port 0 is replaced).

    Raises:
        ConfigError: The address is in use, not of this host, or no address; or it is TCP, and
            `access` has no credentials and is not insecure.
    """
    if endpoint.startswith("unix:"):
        _claim_socket(endpoint)
    else:
        _try_port(endpoint)
    try:
        port = access.listen(server, endpoint)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {endpoint!r}: {error}") from None
    if endpoint.startswith("unix:"):
        os.chmod(endpoint.removeprefix("unix:"), 0o600)
        return endpoint
    return f"{endpoint.rpartition(':')[0]}:{port}"


def release(endpoint: str) -> None:
    """Remove what `bind` may have left in the file system."""
    if endpoint.startswith("unix:"):
        Path(endpoint.removeprefix("unix:")).unlink(missing_ok=True)


def _claim_socket(endpoint: str) -> None:
    """Remove a dead server's socket; refuse a living one's."""
    path = endpoint.removeprefix("unix:")
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise ConfigError(
            f"the socket path {path!r} has {len(os.fsencode(path))} bytes; "
            f"the limit is {LONGEST_PATH}, choose a shorter folder"
        )
    if not os.path.isdir(os.path.dirname(path)):
        raise ConfigError(f"cannot listen on {endpoint!r}: its folder does not exist")
    if not os.path.exists(path):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as error:
            raise ConfigError(f"cannot listen on {endpoint!r}: {error.strerror}") from None
        else:
            raise ConfigError(f"cannot listen on {endpoint!r}: another server listens there")


def _try_port(endpoint: str) -> None:
    """Bind the port for a moment, because the system says more plainly what is wrong with it."""
    host, _, port = endpoint.rpartition(":")
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {endpoint!r}: {error.strerror}; choose another address or port 0"
        ) from None
