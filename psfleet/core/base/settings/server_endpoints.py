"""Endpoints of servers: a single text for the two addresses that a server listens on.

A server listens with gRPC for control calls, and with psfleet's own HTTP/2 for calls that carry tensors
(docs/decisions/0016-http2.md). Settings, files and messages contain the endpoint as one text, so a process
that knows a server knows both addresses:

    host:9000/9001    gRPC on port 9000, tensors on port 9001
    host:9000         gRPC on port 9000, tensors on port 11000, which is 2000 above
    host:0            two free ports; the server writes them to its ready file when it has started
    unix:/path        gRPC on unix:/path, tensors on unix:/path.h2
"""

from typing import NamedTuple

from psfleet.core.base.errors import ConfigError

TENSOR_OFFSET = 2000
"""Difference between the tensor port and the gRPC port, if an endpoint names only the latter.

Servers on one host usually have adjacent gRPC ports. The difference is larger than the number of servers of
a job (at most 1024), so that the two ranges of ports do not overlap."""

SUFFIX = ".h2"
"""Suffix of a Unix socket's path for tensors."""

_PORTS = 65536


class Addresses(NamedTuple):
    """Both addresses of a server, each as `unix:/path` or `host:port`.

    Attributes:
        control: Address for gRPC calls.
        tensors: Address for pushes and pulls.
    """

    control: str
    tensors: str


def addresses_of(endpoint: str) -> Addresses:
    """Return the two addresses of an endpoint that `check_endpoint` has accepted."""
    if endpoint.startswith("unix:"):
        return Addresses(endpoint, endpoint + SUFFIX)
    host, _, ports = endpoint.rpartition(":")
    control, slash, tensors = ports.partition("/")
    if not slash and control.isdecimal():
        tensors = str(int(control) and int(control) + TENSOR_OFFSET)
    return Addresses(f"{host}:{control}", f"{host}:{tensors}")


def check_endpoint(endpoint: str) -> None:
    """Raise ConfigError if the text is not an endpoint of a server."""
    control, tensors = addresses_of(endpoint)
    has_control, has_tensors = _is_address(control), _is_address(tensors)
    if control == endpoint and has_control and not has_tensors:
        raise ConfigError(
            f"endpoint {endpoint!r} leaves no port for tensors, {TENSOR_OFFSET} above; choose a lower "
            f"one, or name both: {endpoint}/PORT"
        )
    if not (has_control and has_tensors) or (control != endpoint and _is_free(control, tensors)):
        raise ConfigError(
            f"endpoint {endpoint!r} is neither unix:/path nor host:port nor host:port/port"
        )


def check_address(address: str) -> None:
    """Raise ConfigError if the text is not a single address, `unix:/path` or `host:port`."""
    if not _is_address(address):
        raise ConfigError(f"endpoint {address!r} is neither unix:/path nor host:port")


def has_ports(first: int, servers: int) -> bool:
    """Return whether `servers` adjacent gRPC ports from `first` on have valid tensor ports too."""
    return first + servers + TENSOR_OFFSET <= _PORTS


def _is_address(text: str) -> bool:
    """Return whether the text is `unix:/path` or `host:port`."""
    if text.startswith("unix:/"):
        return True
    host, colon, port = text.rpartition(":")
    return bool(colon and host) and port.isdecimal() and int(port) < _PORTS


def _is_free(*addresses: str) -> bool:
    """Return whether one of the ports is 0, which means any free port. Both ports must be 0, or neither."""
    return any(int(address.rpartition(":")[2]) == 0 for address in addresses)
