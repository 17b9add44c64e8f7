"""Blocking sockets as byte transports for HTTP/2, plain or under TLS.

One thread reads. Any thread may write, but only one at a time; the connection's lock `sending` ensures that.
No wait is endless. While nothing arrives, `tick` is called twice a second and may raise an error to give up.
A write fails if the other end accepts no byte for a minute. The kernel closes a TCP connection about 30
seconds after its other host has vanished.
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

_MOST_PARTS = 512  # buffers of one sendmsg; Linux accepts 1024
_TICK = 0.5  # longest wait in seconds inside of one system call
_STALLED = 60.0  # seconds within which the other end must accept some bytes
# A `struct timeval` for SO_RCVTIMEO and SO_SNDTIMEO: seconds and microseconds, 8 bytes each.
_TIMEVAL = int(_TICK).to_bytes(8, "little") + int(_TICK % 1 * 1e6).to_bytes(8, "little")
_RECORD = 16 << 10  # longest content of a TLS record, in bytes


BUFFER = 64 << 10
"""Bytes of a reader's buffer, the most that `read_bytes` returns.

http2_connection.py asserts that each frame that it reads at once fits.
"""

_UNREAD = 32 << 10  # bytes skipped at a time; must fit into the buffer


class Transport(Protocol):
    """Byte stream that a connection uses: a socket, plain or under TLS."""

    def fileno(self) -> int:
        """Return the descriptor of the socket."""

    def handshake(self, tick: Tick) -> None:
        """Complete the handshake, if the transport has one. Calls `tick` about twice a second meanwhile."""

    def go_on_with_handshake(self) -> int:
        """Continue the handshake without waiting.

        Returns:
            Events (as of select.poll) to wait for before the next call, or 0 once the handshake is complete.

        Raises:
            ConnectionBroken: The other end cannot be trusted, or the connection has ended.
        """

    def receive(self, into: memoryview, tick: Tick) -> int:
        """Wait for bytes, write them to `into`, and return their number, which is at least 1.

        Args:
            into: Memory to write to.
            tick: Called about twice a second while nothing arrives. May raise an error to end the wait.

        Raises:
            ConnectionBroken: The connection has ended.
        """

    def send(self, parts: Sequence[Part]) -> None:
        """Write all parts. Waits until the socket has accepted them.

        Raises:
            ConnectionBroken: The connection has ended, or the other end accepts no byte for a minute.
        """

    def send_some(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Write as much as the socket accepts without waiting. Returns the parts that were not written.

        Raises:
            ConnectionBroken: The connection has ended.
        """

    def shut(self) -> None:
        """End the connection, so that waiting reads and writes fail. Any thread may call, also repeatedly."""

    def close(self) -> None:
        """Close the socket. The transport must not be used afterwards."""


class PlainTransport:
    """Transport over a socket without TLS.

    Each system call waits up to half a second itself, so mostly no extra call of `poll` is needed.

    Args:
        sock: The connected socket.
        mostly_waits: True if `receive` is mostly called before the bytes have arrived, as at a server.
    """

    def __init__(self, sock: socket.socket, *, mostly_waits: bool = False) -> None:
        self._socket = sock
        # A thread that waits in `recv` on a Unix socket is also woken when the other end reads what was sent
        # before (Linux: unix_write_space), only to wait again: each call to a server woke it twice. `poll`
        # wakes only for bytes to read, which saves more than it costs. TCP has no such wake-up.
        self._incoming: select.poll | None = None
        if mostly_waits and sock.family == socket.AF_UNIX:
            self._incoming = select.poll()
            self._incoming.register(sock.fileno(), select.POLLIN)
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
            if self._incoming is not None and not self._incoming.poll(_TICK * 1000):
                tick()
                continue
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
        if len(parts) <= _MOST_PARTS:  # usually one system call sends everything
            try:
                size = self._socket.sendmsg(parts)
            except (BlockingIOError, InterruptedError):
                size = 0
            except OSError as error:
                raise ConnectionBroken(f"connection lost: {error.strerror}") from None
            # SO_SNDTIMEO ends a call of sendmsg after half a second, even if only a part has been sent.
            if size != sum(map(len, parts)):
                self._send_rest([memoryview(part) for part in parts], size)
            return
        for start in range(0, len(parts), _MOST_PARTS):
            self.send(parts[start : start + _MOST_PARTS])

    def _send_rest(self, views: list[memoryview], size: int) -> None:
        """Send the rest of `views`, whose first `size` bytes have been sent."""
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
        """Try to send for at most half a second. Returns the number of bytes that the socket accepted."""
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
    """Transport over a socket under TLS.

    OpenSSL allows only one call at a time per connection. A thread that waited for bytes within OpenSSL
    would block every thread that wants to send. So the socket is non-blocking, and threads wait in `poll`,
    without the lock that guards OpenSSL.

    Args:
        sock: The socket.
        needs_http2: True to require that the other end agrees on HTTP/2 (ALPN `h2`).
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
            size, event = self._try_receive(into)
            if size:
                return size
            if not event:
                raise ConnectionBroken("the other end has closed the connection")
            self._await(event, tick)

    # OpenSSL reads or writes one TLS record in each call, so there are 122,000 calls for a gigabyte at both
    # ends, and the Python around each call counts. So both loops are short, and call `read` and `write` of
    # the socket, which `recv_into` and `send` call too.

    def _try_receive(self, into: memoryview) -> tuple[int, int]:
        """Receive the records that have arrived, up to the first that is not full.

        Returns the number of bytes, and if that is 0, the event to await, or 0 if the connection has ended.
        """
        read, size, part = self._socket.read, 0, _RECORD
        try:
            with self._lock:
                # A record that is not full mostly ends a message. To look for another would cost small
                # calls an exception.
                while part == _RECORD and size < len(into):
                    part = read(len(into) - size, into[size:])  # type: ignore[assignment]
                    size += part
        except ssl.SSLWantReadError:
            return size, select.POLLIN
        except ssl.SSLWantWriteError:
            return size, select.POLLOUT
        except (OSError, ValueError) as error:
            if not size:  # else the next call raises, after these bytes have been used
                raise ConnectionBroken(f"connection lost: {error}") from None
        return size, 0

    def send(self, parts: Sequence[Part]) -> None:
        for part in _records(parts):
            view, deadline = memoryview(part), time.monotonic() + _STALLED
            while True:
                size, event = self._try_send(view)
                if not event:
                    break
                if size:
                    view, deadline = view[size:], time.monotonic() + _STALLED
                if not self._wait(event):
                    _check_stalled(deadline)

    def send_some(self, parts: Sequence[Part]) -> Sequence[Part]:
        records = _records(parts)
        for index, part in enumerate(records):
            size, event = self._try_send(part)
            if event:
                return [memoryview(part)[size:], *records[index + 1 :]]
        return ()

    def _try_send(self, part: Part) -> tuple[int, int]:
        """Send as much as the socket accepts.

        Returns the number of bytes, and the event to await if these are not all.
        """
        write, size, view = self._socket.write, 0, memoryview(part)
        try:
            with self._lock:
                while size < len(view):
                    size += write(view[size:])
        except ssl.SSLWantWriteError:
            return size, select.POLLOUT
        except ssl.SSLWantReadError:
            return size, select.POLLIN
        except (OSError, ValueError) as error:
            raise ConnectionBroken(f"connection lost: {error}") from None
        return size, 0

    def _wait(self, events: int) -> bool:
        """Wait at most half a second for the events. Returns True if one has occurred."""
        descriptor = self._socket.fileno()
        if descriptor < 0:
            raise ConnectionBroken("the connection is closed")
        waits = select.poll()
        waits.register(descriptor, events)
        return bool(waits.poll(_TICK * 1000))

    def shut(self) -> None:
        _shut(self._socket)

    def close(self) -> None:
        with self._lock:  # no other thread may be within OpenSSL
            self._socket.close()


def _records(parts: Sequence[Part]) -> list[Part]:
    """Cut and join parts so that all TLS records but the last are full.

    Each record has its own encryption and overhead. Only records that consist of several parts are copied.
    """
    records: list[Part] = []
    open_record: list[Part] = []  # parts of the record that is not full yet
    missing = _RECORD
    for part in parts:
        view = memoryview(part)
        if len(view) >= missing:
            if open_record:
                records.append(b"".join([*open_record, view[:missing]]))
                view, open_record, missing = view[missing:], [], _RECORD
            if whole := len(view) // _RECORD * _RECORD:
                records.append(view[:whole])
                view = view[whole:]
        open_record.append(view)
        missing -= len(view)
    return [*records, b"".join(open_record)]


def _check_stalled(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise ConnectionBroken(f"the other end has taken no byte for {_STALLED:g} seconds")


def _shut(sock: socket.socket) -> None:
    # SSLSocket.shutdown is not used: it would disturb a thread that is reading.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _keep_alive(sock: socket.socket) -> None:
    """Make the kernel close the connection if the other host vanishes without closing it."""
    if sock.family == socket.AF_UNIX:
        return
    # Without TCP_NODELAY a small message may wait for the acknowledgement of the one before.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # An idle connection is probed after 20 s and given up after two probes 5 s apart: 30 s in all.
    # TCP_USER_TIMEOUT, in milliseconds, is the same limit for sent bytes that are not acknowledged.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


class BufferedReader:
    """Buffered reads from a transport. Only one thread may read.

        _buffer:   | read | unread bytes | free |
                          ^_start        ^_end

    Args:
        transport: Source of the bytes.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._buffer = bytearray(BUFFER)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0

    def tick(self) -> None:
        """Called about twice a second while nothing arrives.

        An override may raise an error to end the wait.
        """

    def read_bytes(self, size: int) -> bytes:
        """Return the next `size` bytes. `size` must not exceed BUFFER, 64 KiB."""
        while self._end - self._start < size:
            self._fill(size)
        start = self._start
        self._start = end = start + size
        return bytes(self._view[start:end])

    def arrived(self, most: int) -> bytes:
        """Return the unread bytes without consuming them, or b"" if there are more than `most`.

        Waits until there is at least one byte.
        """
        if self._start == self._end:
            self._start = self._end = 0
            self._end = self.transport.receive(self._view, self.tick)
        return b"" if self._end - self._start > most else bytes(self._view[self._start : self._end])

    def read_into(self, target: memoryview) -> None:
        """Fill the target, which may have any size, with the next bytes."""
        here = min(len(target), self._end - self._start)
        target[:here] = self._view[self._start : self._start + here]
        self._start += here
        while here < len(target):
            if len(target) - here < BUFFER // 4:  # a short end: read it together with what follows
                self._fill(len(target) - here)
                self.read_into(target[here:])
                return
            # Long content goes directly into the target, not through the buffer.
            here += self.transport.receive(target[here:], self.tick)

    def _fill(self, size: int) -> None:
        """Read more bytes into the buffer. Moves its content if `size` bytes do not fit after `_start`."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start + size > BUFFER:
            unread_bytes = self._end - self._start
            self._view[:unread_bytes] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, unread_bytes
        self._end += self.transport.receive(self._view[self._end :], self.tick)

    def pass_over(self, size: int) -> None:
        """Read and discard `size` bytes."""
        while size:
            size -= len(self.read_bytes(min(size, _UNREAD)))
