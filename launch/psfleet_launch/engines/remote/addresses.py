"""The addresses by which machines of a job reach each other."""

import socket

from psfleet.errors import ConfigError

__all__ = ["address_towards", "own_address", "why_unreachable"]

_CONNECT = 5.0  # seconds; the kernel asks again after 1 and 3


def address_towards(host: str, port: int = 1) -> str:
    """This machine's address on the route to a host. Nothing is sent: a datagram socket only looks.

    Raises:
        ConfigError: The host has no address, or there is no route.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"host {host}: there is no way to it ({error.strerror})") from None


def own_address() -> str:
    """The address of this machine's name.

    Raises:
        ConfigError: It has none that other machines could reach.
    """
    name = socket.gethostname()
    try:
        found = str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    except OSError:
        found = ""
    if not found or found.startswith("127."):
        raise ConfigError(
            f"the name of this machine, {name!r}, has no address that others could reach; name one with "
            "--listen"
        )
    return found


def why_unreachable(endpoint: str) -> str:
    """Why this machine cannot connect to an endpoint on another one; empty: it can."""
    from psfleet.wire.client_socket import connected  # loads gRPC

    try:
        connected(endpoint, _CONNECT).close()
    except TimeoutError:
        return f"no answer within {_CONNECT:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""
