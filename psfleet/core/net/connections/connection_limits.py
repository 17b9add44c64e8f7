"""Limits of connections: how many a process may have, and how long they may take.

Both kinds of endpoints (gRPC and HTTP/2) and their clients use the same limits.
"""

import resource

from psfleet.core.base.settings.declared_settings import ServerLimits

GRACE = 1.0
"""Seconds that a client adds to the time it asks a server to wait, to get the timeout of its call.

So the server gives up first, with a message that names the processes it waited for. A timeout of gRPC would
only have a status code."""
HANDSHAKE = 10.0
"""Seconds that a new connection has to authenticate itself. After that, either end closes the connection."""
# File descriptors left for files, logs, connections to other servers, and connections about to be closed.
_RESERVED = 200


def connection_limit(limits: ServerLimits) -> int:
    """Return the number of connections that each of this process's two endpoints (gRPC and HTTP/2) may have.

    Leaves some file descriptors free. A process without a free descriptor could not open its log, and could
    not even accept a surplus connection to close it.
    """
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return limits.connections
    return min(limits.connections, max((soft_limit - _RESERVED) // 2, 1))


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open files as far as the system allows: each connection needs one."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
