"""The bytes of a connection: a socket, plain or under TLS, that blocks.

One thread reads; any thread may write, one at a time (the caller sees to that).
"""

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from psfleet.http2.call_errors import ConnectionBroken

__all__ = ["Part", "PlainTransport", "Tick", "TlsTransport", "Transport"]

Part = bytes | memoryview
Tick = Callable[[], None]

_MOST_PARTS = 512  # of one sendmsg; Linux takes 1024
_TICK = 0.5  # seconds
_STALLED = 60.0  # seconds in which the other end must take some bytes
_TIMEVAL = int(_TICK).to_bytes(8, "little") + int(_TICK % 1 * 1e6).to_bytes(8, "little")
_RECORD = 16 << 10  # bytes of a TLS record


class Transport(Protocol):
    """What connections need of a socket."""

    def fileno(self) -> int:
        """Of the socket."""

    def handshake(self, tick: Tick) -> None:
        """Shake hands, if the transport does; see `receive`."""

    def receive(self, into: memoryview, tick: Tick) -> int:
        """Read what is there, at least one byte; how many.

        Args:
            into: The bytes that may be written.
            tick: Called about twice a second while nothing comes; ends the wait by raising.

        Raises:
            ConnectionBroken: The connection has ended.
        """

    def send(self, parts: Sequence[Part]) -> None:
        """Write all parts.

        Raises:
            ConnectionBroken: The connection has ended, or the other end takes nothing for a minute.
        """

    def shut(self) -> None:
        """End the connection; whoever reads or writes is told. Any thread may call, also twice."""

    def close(self) -> None:
        """Let go of the socket. Nobody may use it any more."""


class PlainTransport:
    """A socket without TLS."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        _keep_alive(sock)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL)

    def fileno(self) -> int:
        """See Transport."""
        return self._socket.fileno()

    def handshake(self, tick: Tick) -> None:
        """See Transport."""

    def receive(self, into: memoryview, tick: Tick) -> int:
        """See Transport."""
        while True:
            try:
                size = self._socket.recv_into(into)
            except (BlockingIOError, InterruptedError):
                tick()
                continue
            except OSError as error:
                raise ConnectionBroken(f"connection lost: {error.strerror}") from None
            if not size:
                raise ConnectionBroken("the other end has closed the connection")
            return size

    def send(self, parts: Sequence[Part]) -> None:
        """See Transport."""
        if len(parts) <= _MOST_PARTS:  # mostly all of them leave at once
            sent = self._try_send(parts)
            if sent != sum(map(len, parts)):
                self._send_rest([memoryview(part) for part in parts], sent)
            return
        for start in range(0, len(parts), _MOST_PARTS):
            self.send(parts[start : start + _MOST_PARTS])

    def _send_rest(self, views: list[memoryview], sent: int) -> None:
        """Go on when so many bytes of these have left."""
        stalled = time.monotonic() + _STALLED
        while True:
            if sent:
                stalled = time.monotonic() + _STALLED
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if not views:
                return
            views[0] = views[0][sent:]
            sent = self._try_send(views)
            if not sent:
                _check_stalled(stalled)

    def _try_send(self, parts: Sequence[Part]) -> int:
        """How many bytes the socket has taken, in half a second at most."""
        try:
            return self._socket.sendmsg(parts)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise ConnectionBroken(f"connection lost: {error.strerror}") from None

    def shut(self) -> None:
        """See Transport."""
        _shut(self._socket)

    def close(self) -> None:
        """See Transport."""
        self._socket.close()


class TlsTransport:
    """A socket under TLS.

    OpenSSL takes one call at a time for a connection, so nobody waits inside of one: the socket does not
    block, and whoever has to wait does so beside it.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        _keep_alive(sock)
        sock.setblocking(False)

    def fileno(self) -> int:
        """See Transport."""
        return self._socket.fileno()

    def handshake(self, tick: Tick) -> None:
        """See Transport."""
        while True:
            try:
                with self._lock:
                    self._socket.do_handshake()
            except ssl.SSLWantReadError:
                self._await(select.POLLIN, tick)
            except ssl.SSLWantWriteError:
                self._await(select.POLLOUT, tick)
            except (OSError, ValueError) as error:
                raise ConnectionBroken(f"TLS cannot be agreed on: {error}") from None
            else:
                if self._socket.selected_alpn_protocol() != "h2":
                    raise ConnectionBroken("the other end does not speak HTTP/2 (ALPN h2)")
                return

    def _await(self, events: int, tick: Tick) -> None:
        if not self._wait(events):
            tick()

    def receive(self, into: memoryview, tick: Tick) -> int:
        """See Transport."""
        while True:
            try:
                with self._lock:
                    size = self._socket.recv_into(into)
            except ssl.SSLWantReadError:
                self._await(select.POLLIN, tick)
                continue
            except ssl.SSLWantWriteError:
                self._await(select.POLLOUT, tick)
                continue
            except (OSError, ValueError) as error:
                raise ConnectionBroken(f"connection lost: {error}") from None
            if not size:
                raise ConnectionBroken("the other end has closed the connection")
            return size

    def send(self, parts: Sequence[Part]) -> None:
        """See Transport."""
        small: list[Part] = []
        for part in parts:
            if len(part) < _RECORD:  # several in one record
                small.append(part)
                continue
            self._send(memoryview(b"".join(small)))
            small.clear()
            self._send(memoryview(part))
        self._send(memoryview(b"".join(small)))

    def _send(self, view: memoryview) -> None:
        stalled = time.monotonic() + _STALLED
        while len(view):
            try:
                with self._lock:
                    sent = self._socket.send(view)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError) as error:
                wants_write = isinstance(error, ssl.SSLWantWriteError)
                if not self._wait(select.POLLOUT if wants_write else select.POLLIN):
                    _check_stalled(stalled)
                continue
            except (OSError, ValueError) as error:
                raise ConnectionBroken(f"connection lost: {error}") from None
            view = view[sent:]
            stalled = time.monotonic() + _STALLED

    def _wait(self, events: int) -> bool:
        """Wait for a tick until the socket is ready."""
        descriptor = self._socket.fileno()
        if descriptor < 0:
            raise ConnectionBroken("the connection is closed")
        waits = select.poll()
        waits.register(descriptor, events)
        return bool(waits.poll(_TICK * 1000))

    def shut(self) -> None:
        """See Transport."""
        _shut(self._socket)

    def close(self) -> None:
        """See Transport."""
        with self._lock:
            self._socket.close()


def _check_stalled(stalled: float) -> None:
    if time.monotonic() > stalled:
        raise ConnectionBroken(f"the other end has taken no byte for {_STALLED:g} seconds")


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the plain way: SSLSocket's own would break who reads
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _keep_alive(sock: socket.socket) -> None:
    """Notice a host that has vanished without a word."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
