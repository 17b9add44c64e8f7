"""The door of a server that listens on TCP: closes connections of strangers when they are too many.

gRPC ends a handshake that takes too long, but counts no handshakes: whoever opens connections faster
than they time out takes all that there may be, and members find the server full. It does not give an
accepted socket to anybody either. So a thread looks at the sockets of this process, and shuts down
those that psfleet_server.rpc.connection_eviction names. gRPC sees that as the other end hanging up.

Which connection has proved itself is known from its calls (`proved`), or from its age: gRPC has ended
all that did not complete a handshake in time, and over TLS only members can.
"""

import contextlib
import os
import socket
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from urllib.parse import unquote

from psfleet.platform.service_thread import ServiceThread
from psfleet.settings.limits import ServerLimits
from psfleet.wire.channel import HANDSHAKE
from psfleet_server.rpc.connection_eviction import UnauthenticatedConnection, network_of, surplus
from psfleet_server.rpc.rate_limited_log import RateLimitedLog

__all__ = ["ConnectionLimit"]

_CALM, _BUSY = 0.5, 0.1  # seconds between two looks; _BUSY when strangers are many
_RECEIVED = struct.Struct("128xQ")  # bytes received: in tcp_info of linux/tcp.h, since Linux 4.1
_MAPPED = "::ffff:"  # an IPv4 address as IPv6 sockets see it


@dataclass(slots=True)
class _AcceptedConnection:
    """An accepted connection; `peer` is its other end, as gRPC names it but without the family."""

    peer: str
    stranger: UnauthenticatedConnection
    proved: bool = False


class ConnectionLimit:
    """Watches the connections that this process has accepted on a port, from `start` to `stop`."""

    def __init__(self, limits: ServerLimits) -> None:
        self._port = 0
        self._limits = limits
        self._connections: dict[
            int, _AcceptedConnection | None
        ] = {}  # by inode; None: another socket
        self._proved: set[str] = set()
        self._log = RateLimitedLog()
        self._over = threading.Event()
        self._thread = ServiceThread(self._run, "door")

    @property
    def open(self) -> int:
        """Connections that are open, as of the last look."""
        return sum(one is not None for one in [*self._connections.values()])

    def proved(self, peer: str) -> None:
        """A call of a member has come over the connection of this peer (ServicerContext.peer)."""
        self._proved.add(peer)

    def start(self, endpoint: str) -> None:
        """Begin to watch the connections to this endpoint."""
        self._port = int(endpoint.rpartition(":")[2])
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        pause = _CALM
        while not self._over.wait(pause):
            pause = _BUSY if self._look() else _CALM

    def _look(self) -> bool:
        """Close what is too much; whether there are so many strangers that it soon may be again."""
        proved, self._proved = self._proved, set()  # before the sockets: theirs are among those
        descriptors = _sockets()
        self._meet(descriptors)
        self._recognize({unquote(peer).partition(":")[2] for peer in tuple(proved)})
        members = [one for one in self._connections.values() if one is not None and one.proved]
        strangers = [
            replace(one.stranger, silent=_is_silent(descriptors[inode], inode))
            for inode, one in self._connections.items()
            if one is not None and not one.proved
        ]
        each = self._limits.handshakes
        room = max((self._limits.connections - len(members)) // 2, 1)
        closing = surplus(strangers, each, room)
        for stranger in closing:
            _shut(descriptors[stranger.inode], stranger.inode)
        if closing:
            self._tell(closing)
        return bool(closing) or len(strangers) > min(each, room) // 2

    def _meet(self, descriptors: dict[int, int]) -> None:
        """Forget sockets that are closed and look at new ones."""
        for inode in self._connections.keys() - descriptors.keys():
            del self._connections[inode]
        for inode in descriptors.keys() - self._connections.keys():
            self._connections[inode] = self._connection(descriptors[inode], inode)

    def _connection(self, descriptor: int, inode: int) -> _AcceptedConnection | None:
        with contextlib.suppress(OSError), _opened(descriptor, inode) as end:
            if end.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            if end.getsockname()[1] != self._port:
                return None
            host, port = end.getpeername()[:2]
            host = host.removeprefix(_MAPPED)
            peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            return _AcceptedConnection(
                peer, UnauthenticatedConnection(inode, network_of(host), time.monotonic(), True)
            )
        return None

    def _recognize(self, peers: set[str]) -> None:
        old = time.monotonic() - HANDSHAKE - 2 * _CALM
        for one in self._connections.values():
            if one is not None and not one.proved:
                one.proved = one.peer in peers or one.stranger.since < old

    def _tell(self, closing: list[UnauthenticatedConnection]) -> None:
        address, count = Counter(one.address for one in closing).most_common(1)[0]
        self._log.say(
            f"closed {len(closing)} unauthenticated connections, {count} of them from {address}"
        )


def _sockets() -> dict[int, int]:
    """The descriptors of this process's sockets, by inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


@contextlib.contextmanager
def _opened(descriptor: int, inode: int) -> Iterator[socket.socket]:
    """A socket of gRPC's. It may close it at any time, and the number be another's: see that it is it.

    Raises:
        OSError: It is closed by now.
    """
    with socket.socket(fileno=os.dup(descriptor)) as end:
        if os.fstat(end.fileno()).st_ino != inode:
            raise OSError("closed meanwhile")
        yield end


def _is_silent(descriptor: int, inode: int) -> bool:
    """Whether nothing was received from the other end."""
    with contextlib.suppress(OSError, struct.error), _opened(descriptor, inode) as end:
        known = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
        return _RECEIVED.unpack(known) == (0,)
    return False


def _shut(descriptor: int, inode: int) -> None:
    with contextlib.suppress(OSError), _opened(descriptor, inode) as end:
        end.shutdown(socket.SHUT_RDWR)
