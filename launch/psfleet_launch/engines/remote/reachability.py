"""Test of whether a machine can be reached, however busy its processes are.

A process that is stopped, or gets no processor, says nothing; its kernel acknowledges what comes for it all
the same. So a machine whose agent is quiet is sent something, and is out of reach only if its kernel
acknowledges nothing for a while: it has no power, or the network between is cut.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Callable

QUIET = 0.5
"""Seconds without a message after which a machine is asked."""

_SILENT = 1.0  # seconds without an acknowledgement after which it cannot be reached
_STEP = 0.25  # seconds between looks
_MOST_SECONDS = (
    2 * _STEP
)  # seconds that count between two looks: this machine may have been stopped itself
_COARSE = 0.05  # seconds by which the kernel's clock may be off
_UNACKED, _LAST_ACK, _SIZE = 24, 56, 60  # offsets in struct tcp_info of linux/tcp.h


class Reachability:
    """Reachability of one machine. Pure.

    Attributes:
        can_be_reached: The machine can be reached, as far as is known.
    """

    def __init__(self) -> None:
        self.can_be_reached = True
        self._looked = 0.0
        self._asked_at: float | None = None
        self._waited = 0.0

    def look(self, at: float, last_message: float, unanswered: Callable[[], float]) -> bool:
        """It is `at`, in seconds of any clock; return whether to send the machine something now.

        Args:
            unanswered: Seconds for which its kernel has acknowledged nothing though there is something to
                acknowledge; 0: there is nothing, or it is not known.
        """
        if at - last_message < QUIET:
            self.can_be_reached, self._asked_at = True, None
            return False
        if at - self._looked < _STEP:
            return False
        step, self._looked = min(at - self._looked, _MOST_SECONDS), at
        if self._asked_at is None or unanswered() < at - self._asked_at - _COARSE:
            self.can_be_reached, self._asked_at, self._waited = True, at, 0.0
        else:
            self._waited += step
            self.can_be_reached = self._waited < _SILENT
        return True


class PeerSocket:
    """The other end of a TCP connection of this process, as the kernel knows it.

    gRPC does not show its sockets, so this looks for the one that has the address of its peer.

    Args:
        peer: Peer as gRPC names it: "ipv4:192.0.2.1:50000" or "ipv6:%5B2001:db8::1%5D:50000".
    """

    def __init__(self, peer: str) -> None:
        host, _, port = peer.partition(":")[2].rpartition(":")
        self._peer = (host.removeprefix("%5B").removesuffix("%5D"), port)
        self._socket: socket.socket | None = None

    def unanswered(self) -> float:
        """Return the seconds without an acknowledgement, as for Reachability.look; 0 if there is no such
        socket.
        """
        self._socket = self._socket or self._find()
        if self._socket is None:
            return 0.0
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
        (waiting,) = struct.unpack_from("I", info, _UNACKED)
        (milliseconds,) = struct.unpack_from("I", info, _LAST_ACK)
        return milliseconds / 1000 if waiting else 0.0

    def close(self) -> None:
        """Let go of it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _find(self) -> socket.socket | None:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    peer = socket.socket(fileno=os.dup(int(name)))
                    if _address(peer) == self._peer:
                        return peer
                    peer.close()
        return None


def _address(connected: socket.socket) -> tuple[str, str]:
    """Host and port of the other end; empty: it is none of TCP."""
    with contextlib.suppress(OSError):  # it listens
        if connected.family in (socket.AF_INET, socket.AF_INET6):
            host, port = connected.getpeername()[:2]
            return str(host).removeprefix("::ffff:"), str(port)
    return "", ""
