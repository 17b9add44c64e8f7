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

from psfleet.core.net.http2.frames import ConnectionBroken

Part = bytes | memoryview
Tick = Callable[[], None]

_MOST_PARTS = 512  # of one sendmsg; Linux takes 1024
_TICK = 0.5  # seconds
_STALLED = 60.0  # seconds in which the other end must take some bytes
_TIMEVAL = int(_TICK).to_bytes(8, "little") + int(_TICK % 1 * 1e6).to_bytes(8, "little")
_RECORD = 16 << 10  # bytes of a TLS record


_BUFFER = 64 << 10
_UNREAD = 32 << 10  # bytes that are passed over at once


class Transport(Protocol):
    """Socket as a connection uses it."""

    def fileno(self) -> int:
        """Return the descriptor of the socket."""

    def handshake(self, tick: Tick) -> None:
        """Shake hands, if the transport does; see `receive`."""

    def go_on_with_handshake(self) -> int:
        """Shake hands without waiting; the events of select.poll to wait for, 0: it is done.

        Raises:
            ConnectionBroken: The other end cannot be trusted, or the connection has ended.
        """

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

    def send_some(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Write what the socket takes without waiting; what is left, to be sent next.

        Raises:
            ConnectionBroken: The connection has ended.
        """

    def shut(self) -> None:
        """End the connection; pending reads and writes fail. Any thread may call, also twice."""

    def close(self) -> None:
        """Close the socket. It must not be used any more."""


class PlainTransport:
    """A socket without TLS."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        _keep_alive(sock)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL)

    def fileno(self) -> int:
        return self._socket.fileno()

    def handshake(self, tick: Tick) -> None:
        pass

    def go_on_with_handshake(self) -> int:
        return 0

    def receive(self, into: memoryview, tick: Tick) -> int:
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
        if len(parts) <= _MOST_PARTS:  # mostly all of them leave at once
            try:
                size = self._socket.sendmsg(parts)
            except (BlockingIOError, InterruptedError):
                size = 0
            except OSError as error:
                raise ConnectionBroken(f"connection lost: {error.strerror}") from None
            if size != sum(map(len, parts)):
                self._send_rest([memoryview(part) for part in parts], size)
            return
        for start in range(0, len(parts), _MOST_PARTS):
            self.send(parts[start : start + _MOST_PARTS])

    def _send_rest(self, views: list[memoryview], size: int) -> None:
        """Go on when so many bytes of these have left."""
        deadline = time.monotonic() + _STALLED
        while True:
            if size:
                deadline = time.monotonic() + _STALLED
            while views and size >= len(views[0]):
                size -= len(views.pop(0))
            if not views:
                return
            views[0] = views[0][size:]
            size = self._try_send(views)
            if not size:
                _check_stalled(deadline)

    def send_some(self, parts: Sequence[Part]) -> Sequence[Part]:
        try:
            size = self._socket.sendmsg(parts[:_MOST_PARTS], (), socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return parts
        except OSError as error:
            raise ConnectionBroken(f"connection lost: {error.strerror}") from None
        for index, part in enumerate(parts):
            if size < len(part):
                return [memoryview(part)[size:], *parts[index + 1 :]]
            size -= len(part)
        return ()

    def _try_send(self, parts: Sequence[Part]) -> int:
        """Send for half a second at most; return the number of bytes that the socket has taken."""
        try:
            return self._socket.sendmsg(parts)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise ConnectionBroken(f"connection lost: {error.strerror}") from None

    def shut(self) -> None:
        _shut(self._socket)

    def close(self) -> None:
        self._socket.close()


class TlsTransport:
    """A socket under TLS.

    OpenSSL takes one call at a time for a connection, so no thread waits inside of one: the socket does not
    block, and a thread that has to wait does so beside it.

    Args:
        sock: The socket.
        needs_http2: The other end must say that it speaks HTTP/2.
    """

    def __init__(self, sock: ssl.SSLSocket, *, needs_http2: bool = True) -> None:
        self._socket = sock
        self._needs_http2 = needs_http2
        self._lock = threading.Lock()
        _keep_alive(sock)
        sock.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def handshake(self, tick: Tick) -> None:
        while event := self.go_on_with_handshake():
            self._await(event, tick)

    def go_on_with_handshake(self) -> int:
        try:
            with self._lock:
                self._socket.do_handshake()
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        except (OSError, ValueError) as error:
            raise ConnectionBroken(f"TLS cannot be agreed on: {error}") from None
        if self._needs_http2 and self._socket.selected_alpn_protocol() != "h2":
            raise ConnectionBroken("the other end does not speak HTTP/2 (ALPN h2)")
        return 0

    def _await(self, events: int, tick: Tick) -> None:
        if not self._wait(events):
            tick()

    def receive(self, into: memoryview, tick: Tick) -> int:
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
        for part in _records(parts):
            view, deadline = memoryview(part), time.monotonic() + _STALLED
            while len(view):
                size, event = self._try_send(view)
                if size:
                    view, deadline = view[size:], time.monotonic() + _STALLED
                elif not self._wait(event):
                    _check_stalled(deadline)

    def send_some(self, parts: Sequence[Part]) -> Sequence[Part]:
        records = _records(parts)
        for index, part in enumerate(records):
            view = memoryview(part)
            while len(view):
                size, _ = self._try_send(view)
                if not size:
                    return [view, *records[index + 1 :]]
                view = view[size:]
        return ()

    def _try_send(self, view: memoryview) -> tuple[int, int]:
        """Send what the socket takes; return the number of bytes and, if it is 0, the event to wait for."""
        try:
            with self._lock:
                return self._socket.send(view), 0
        except ssl.SSLWantWriteError:
            return 0, select.POLLOUT
        except ssl.SSLWantReadError:
            return 0, select.POLLIN
        except (OSError, ValueError) as error:
            raise ConnectionBroken(f"connection lost: {error}") from None

    def _wait(self, events: int) -> bool:
        """Wait for a tick until the socket is ready."""
        descriptor = self._socket.fileno()
        if descriptor < 0:
            raise ConnectionBroken("the connection is closed")
        waits = select.poll()
        waits.register(descriptor, events)
        return bool(waits.poll(_TICK * 1000))

    def shut(self) -> None:
        _shut(self._socket)

    def close(self) -> None:
        with self._lock:
            self._socket.close()


def _records(parts: Sequence[Part]) -> list[Part]:
    """Join short parts in a row, which then go into one record."""
    records: list[Part] = []
    small: list[Part] = []
    for part in parts:
        if len(part) < _RECORD:
            small.append(part)
            continue
        records += [b"".join(small), part]
        small.clear()
    return [*records, b"".join(small)]


def _check_stalled(deadline: float) -> None:
    if time.monotonic() > deadline:
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


class BufferedReader:
    """Reads from a transport; one thread may.

    Args:
        transport: Its bytes.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0

    def tick(self) -> None:
        """Called about twice a second while nothing comes; raises when the wait is over."""

    def read_bytes(self, size: int) -> bytes:
        """Return the next bytes, as many as a small frame has at most."""
        while self._end - self._start < size:
            self._fill(size)
        start = self._start
        self._start = end = start + size
        return bytes(self._view[start:end])

    def arrived(self, most: int) -> bytes:
        """Return the received bytes that are not read yet, at least one, which stay; empty if over `most`."""
        if self._start == self._end:
            self._start = self._end = 0
            self._end = self.transport.receive(self._view, self.tick)
        return b"" if self._end - self._start > most else bytes(self._view[self._start : self._end])

    def read_into(self, target: memoryview) -> None:
        """Return the next bytes, as many as the target holds."""
        here = min(len(target), self._end - self._start)
        target[:here] = self._view[self._start : self._start + here]
        self._start += here
        while here < len(target):
            if len(target) - here < _BUFFER // 4:  # with what follows it, in one call
                self._fill(len(target) - here)
                self.read_into(target[here:])
                return
            here += self.transport.receive(target[here:], self.tick)

    def _fill(self, size: int) -> None:
        """Read more into the buffer, in which there is to be room for `size` bytes."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start + size > _BUFFER:
            rest = self._end - self._start
            self._view[:rest] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, rest
        self._end += self.transport.receive(self._view[self._end :], self.tick)

    def pass_over(self, size: int) -> None:
        """Read and drop bytes."""
        while size:
            size -= len(self.read_bytes(min(size, _UNREAD)))
