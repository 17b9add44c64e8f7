"""Sockets that are connected to an endpoint."""

import socket

from psfleet.wire.access import is_tcp

__all__ = ["connected"]


def connected(endpoint: str, seconds: float) -> socket.socket:
    """A socket connected to `unix:/path` or `host:port`; its timeout is `seconds`.

    Raises:
        OSError: It cannot be reached in time.
    """
    if is_tcp(endpoint):
        host, _, port = endpoint.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), seconds)
    made = socket.socket(socket.AF_UNIX)
    try:
        made.settimeout(seconds)
        made.connect(endpoint.removeprefix("unix:"))
    except BaseException:
        made.close()
        raise
    return made
