"""The door of a server that listens on TCP: closes connections of strangers when they are too many.

gRPC ends a handshake that takes too long, but counts no handshakes: a client that opens connections faster
than they time out takes all that there may be, and members find the server full. It does not give an
accepted socket to anybody either. So a thread looks at the sockets of this process, and shuts down
those that psfleet.http2.connection_admission names. gRPC sees that as the other end hanging up.

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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from urllib.parse import unquote

from psfleet.http2.connection_admission import (
    UnauthenticatedConnection,
    closing_notice,
    network_of,
    room,
    surplus,
)
from psfleet.platform.threads import ServiceThread
from psfleet.settings.declared_settings import ServerLimits
from psfleet.wire.connections.channel import HANDSHAKE
from psfleet_server.rpc.rate_limited_log import RateLimitedLog

_CALM, _BUSY = 0.1, 0.02  # seconds between two looks; _BUSY when strangers are many
_LATE = 1.0  # seconds by which gRPC may end a handshake too late

BACKLOG = 128
"""Connections that the system holds until they are accepted; one beyond them is tried again by the
other end's system. gRPC's own backlog is 4,096: it accepts all at once, and calls wait until it has."""

_RECEIVED = struct.Struct("128xQ")  # bytes received: in tcp_info of linux/tcp.h, since Linux 4.1
_MAPPED = "::ffff:"  # an IPv4 address as IPv6 sockets see it


@dataclass(slots=True)
class _AcceptedConnection:
    """An accepted connection; `peer` is its other end, as gRPC names it but without the family."""

    peer: str
    stranger: UnauthenticatedConnection
    proved: bool = False


class GrpcioAdmission:
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
        self._thread = ServiceThread(self._run, "grpcio_admission")

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
        for inode, descriptor in _sockets().items():
            with contextlib.suppress(OSError), _opened(descriptor, inode) as end:
                if self._is_listener(end):
                    end.listen(BACKLOG)
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
        peers, self._proved = self._proved, set()  # before the sockets: theirs are among those
        descriptors = _sockets()
        self._meet(descriptors)
        self._recognize({unquote(peer).partition(":")[2] for peer in tuple(peers)})
        members = [one for one in self._connections.values() if one is not None and one.proved]
        strangers = [
            replace(one.stranger, silent=_is_silent(descriptors[inode], inode))
            for inode, one in self._connections.items()
            if one is not None and not one.proved
        ]
        each = self._limits.handshakes
        in_all = room(self._limits.connections, len(members), each)
        closing = surplus(strangers, each, in_all)
        for stranger in closing:
            _shut(descriptors[stranger.number], stranger.number)
        if closing:
            self._log.say(closing_notice(closing))
        return bool(closing) or len(strangers) > min(each, in_all) // 2

    def _meet(self, descriptors: dict[int, int]) -> None:
        """Forget sockets that are closed and look at new ones."""
        for inode in self._connections.keys() - descriptors.keys():
            del self._connections[inode]
        for inode in descriptors.keys() - self._connections.keys():
            self._connections[inode] = self._connection(descriptors[inode], inode)

    def _is_listener(self, end: socket.socket) -> bool:
        return (
            end.family in (socket.AF_INET, socket.AF_INET6)
            and end.getsockname()[1] == self._port
            and bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        )

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
        old = time.monotonic() - HANDSHAKE - _LATE
        for one in self._connections.values():
            if one is not None and not one.proved:
                one.proved = one.peer in peers or one.stranger.since < old


def _sockets() -> dict[int, int]:
    """The descriptors of this process's sockets, by inode."""
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                descriptors[status.st_ino] = int(name)
    return descriptors


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
    """Return whether nothing was received from the other end."""
    with contextlib.suppress(OSError, struct.error), _opened(descriptor, inode) as end:
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
        return _RECEIVED.unpack(info) == (0,)
    return False


def _shut(descriptor: int, inode: int) -> None:
    with contextlib.suppress(OSError), _opened(descriptor, inode) as end:
        end.shutdown(socket.SHUT_RDWR)
