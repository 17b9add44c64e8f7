"""What a look at a server's socket tells of why it does not answer."""

import socket

__all__ = ["closes_at_once"]

_MOMENT = 2.0  # seconds; every refusal over TLS waits as long


def closes_at_once(endpoint: str) -> bool:
    """Whether it takes a connection and closes it without a word, as a server with too many does.

    One that has a place speaks first, or with TLS waits to be spoken to.

    Args:
        endpoint: `unix:/path` or `host:port`.
    """
    try:
        with _connected(endpoint) as probe:
            return probe.recv(1) == b""
    except ConnectionResetError:
        return True
    except OSError:
        return False


def _connected(endpoint: str) -> socket.socket:
    if not endpoint.startswith("unix:"):
        host, _, port = endpoint.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), _MOMENT)
    probe = socket.socket(socket.AF_UNIX)
    try:
        probe.settimeout(_MOMENT)
        probe.connect(endpoint.removeprefix("unix:"))
    except OSError:
        probe.close()
        raise
    return probe
