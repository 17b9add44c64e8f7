"""Accepts connections for an HTTP/2 server, and limits those that have not yet made a permitted call.

One thread accepts all connections and runs their TLS handshakes without blocking. A connection gets a thread
of its own only after its handshake. Until it has made a permitted call, a connection is called a *stranger*.
A stranger is closed at its deadline, no matter how slowly or how much it sends. If there are too many
strangers, `surplus` chooses which to close at once: more from an address that has many, and silent ones
first. So a flood from one address cannot lock out the job's own processes.

The thread works in turns: it waits for events, handles them, and closes connections. Each turn accepts only
a few connections, so that new ones cannot displace those whose handshake is still running. A connection
accepted in the present turn had no time to send anything, so it is not treated as silent.

An exception must not escape from this thread, because a service thread that fails ends the process.
Anything that arrives from outside may only close its own connection.
"""

import contextlib
import select
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Network
from typing import Protocol

from psfleet.core.base.logs import log_of
from psfleet.core.net.http2.frames import ConnectionBroken, ErrorCode
from psfleet.core.net.http2.server_connection import ServerSettings
from psfleet.core.net.http2.socket_transport import Transport

_log = log_of(__name__)

_LOOK = 0.02  # seconds between turns while something has to be retried
_BATCH = 4  # a turn accepts at most a 4th of the allowed strangers: 32 of 128
_REST = 3  # pause after closing strangers, as a multiple of the CPU time that the turn took


_ADDRESSES = 4  # all addresses together may have this many times the strangers of one address
_MAPPED = "::ffff:"  # an IPv4 address as IPv6 sockets see it


class ServedConnection(Protocol):
    """The server's end of a connection that is served by a thread.

    Attributes:
        transport: Transport of the connection.
        is_authenticated: True once the client has made a permitted call.
    """

    transport: Transport
    is_authenticated: bool

    @property
    def is_busy(self) -> bool:
        """True if a call waits for its reply."""

    def run(self) -> None:
        """Serve calls until the connection ends; then raise ConnectionBroken."""

    def tick(self) -> None:
        """Called about twice a second while no bytes arrive, so that no wait is endless.

        It may raise an error, which ends the wait and the connection.
        """

    def newest(self) -> int:
        """Return the stream number of the client's latest call."""

    def say_goodbye(self, newest: int, code: ErrorCode, details: str) -> None:
        """Tell the client that no streams after `newest` are served (GOAWAY)."""


@dataclass(eq=False)
class OpenConnection:
    """An accepted connection, from its first byte to its end.

    Attributes:
        end: Accepted socket. Used only until `transport` is set.
        descriptor: File descriptor of the socket.
        address: Address of the other end, as `network_of` returns it.
        since: Time at which the connection was accepted (time.monotonic).
        transport: Transport over the socket, or None until the other end has sent a byte.
        connection: The connection as its thread serves it, or None until the handshake is over.
        is_shut: True if the connection is being closed.
    """

    end: socket.socket
    descriptor: int
    address: str
    since: float
    transport: Transport | None = None
    connection: ServedConnection | None = None
    is_shut: bool = False

    @property
    def is_authenticated(self) -> bool:
        """True once the client has made a permitted call."""
        return self.connection is not None and self.connection.is_authenticated


class ConnectionAdmission:
    """Accepts connections, completes their handshakes, and hands them to threads, until `stop` is called.

    Args:
        listener: Listening socket, which is closed at the end.
        wrap: Makes a transport from an accepted socket.
        settings: Settings of the server.
        connections: Returns the connections that have a thread.
        serve: Starts a thread for a connection.
        say: Writes a line to the log. Called when connections were closed because there were too many.
    """

    def __init__(
        self,
        listener: socket.socket,
        wrap: Callable[[socket.socket], Transport],
        settings: ServerSettings,
        connections: Callable[[], Collection[OpenConnection]],
        serve: Callable[[OpenConnection], None],
        say: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self._wrap = wrap
        self._settings = settings
        self._served = connections
        self._serve = serve
        self._say = say
        self._over = threading.Event()
        # Connections whose handshake is running, by descriptor.
        self._arrivals: dict[int, OpenConnection] = {}
        self._ready: list[OpenConnection] = []  # handshake is over, waiting for a thread
        self._events = select.epoll()
        self._turn = 0.0  # time at which the present turn of `run` began

    def stop(self) -> None:
        """Make `run` return. Any thread may call."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Accept and close connections in turns until `stop`."""
        self._listener.setblocking(False)
        self._events.register(self._listener, select.EPOLLIN)
        pause: float | None = None
        while not self._over.is_set():
            events = self._events.poll(pause)
            began, self._turn = time.thread_time(), time.monotonic()
            for descriptor, _ in events:
                if descriptor == self._listener.fileno():
                    if not self._accept():
                        self._over.wait(_LOOK)  # out of descriptors: wait until a connection closes
                elif (arrival := self._arrivals.get(descriptor)) is not None:
                    self._go_on(arrival)
            if self._look():
                # Under a flood, leave three quarters of this thread's time to the threads that serve the
                # job.
                self._over.wait(_REST * (time.thread_time() - began))
            pause = self._pause()
        for connection in self._strangers():
            self._close(connection)
        self._listener.close()
        self._events.close()

    def _pause(self) -> float | None:
        """Return the seconds to wait for an event before the next turn, or None to wait without a limit."""
        if self._ready:
            return _LOOK
        first = min((stranger.since for stranger in self._strangers()), default=None)
        if first is None:
            return None
        # Wait slightly longer than the deadline of the oldest stranger, so that the next turn finds it
        # overdue.
        return max(first + self._settings.handshake - time.monotonic(), 0.0) + _LOOK

    def _strangers(self) -> list[OpenConnection]:
        """Return the open connections that have not made a permitted call."""
        strangers = [
            connection
            for connection in self._served()
            if not connection.is_authenticated and not connection.is_shut
        ]
        return [*self._arrivals.values(), *self._ready, *strangers]

    def _accept(self) -> bool:
        """Accept a batch of waiting connections. Returns False if the process has no free file descriptor."""
        free = self._settings.connections - len(self._arrivals) - len(self._ready)
        free -= len(self._served())
        for _ in range(max(min(self._settings.handshakes, self._in_all()) // _BATCH, 1)):
            try:
                end, address = self._listener.accept()
            except BlockingIOError:
                return True
            except OSError:
                return self._over.is_set()
            try:
                if free > 0:
                    self._events.register(end, select.EPOLLIN)
            except OSError:  # the kernel has no memory for it
                free = 0
            if free <= 0:
                end.close()
                continue
            free -= 1
            host = network_of(address[0]) if isinstance(address, tuple) else ""
            arrival = OpenConnection(end, end.fileno(), host, time.monotonic())
            self._arrivals[arrival.descriptor] = arrival
        return True

    def _go_on(self, arrival: OpenConnection) -> None:
        """Continue the TLS handshake of a connection with the bytes that have arrived."""
        try:
            if arrival.transport is None:
                # Peek first: a transport is made only for a connection that has sent something.
                if not arrival.end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    raise ConnectionBroken("the other end has closed the connection")
                arrival.transport = self._wrap(arrival.end)
            event = arrival.transport.go_on_with_handshake()
            if event:
                self._events.modify(arrival.descriptor, event)
                return
            self._events.unregister(arrival.descriptor)
        except (OSError, ConnectionBroken):
            self._close(arrival)
        except Exception:
            _log.exception("a connection has failed; others go on")  # a defect of psfleet
            self._close(arrival)
        else:
            self._ready.append(self._arrivals.pop(arrival.descriptor))

    def _in_all(self) -> int:
        """Return the number of strangers that all addresses together may have now."""
        members = sum(connection.is_authenticated for connection in self._served())
        return room(self._settings.connections, members, self._settings.handshakes)

    def _look(self) -> bool:
        """Close overdue and surplus strangers, and start threads. Returns True if there was a surplus."""
        self._end_late()
        in_all = self._in_all()
        closing = self._surplus(in_all)
        threads = sum(not connection.is_authenticated for connection in self._served())
        # A stranger with a thread costs more than one without. So strangers beyond the limit wait in
        # `_ready`, where they are limited and closed too.
        while self._ready and threads < in_all:
            self._serve(self._ready.pop(0))
            threads += 1
        if closing:
            self._say(closing_notice(closing))
        return bool(closing)

    def _end_late(self) -> None:
        late = time.monotonic() - self._settings.handshake
        for connection in self._strangers():
            if connection.since < late:
                self._close(connection)

    def _surplus(self, in_all: int) -> "list[UnauthenticatedConnection]":
        """Close strangers beyond the limits, and return them."""
        strangers, per_address = self._strangers(), self._settings.handshakes
        if len(strangers) <= min(per_address, in_all):
            return []
        # Connections accepted in this turn, or just before it, have had no chance to send a byte yet.
        latest_silent = self._turn - _LOOK
        unproven = (
            UnauthenticatedConnection(
                number,
                stranger.address,
                stranger.since,
                stranger.transport is None and stranger.since < latest_silent,
            )
            for number, stranger in enumerate(strangers)
        )
        closing = surplus(unproven, per_address, in_all)
        for stranger in closing:
            self._close(strangers[stranger.number])
        return closing

    def _close(self, accepted: OpenConnection) -> None:
        # A connection with a thread is only shut down here: its thread notices, and closes the socket.
        if accepted.connection is not None:
            accepted.is_shut = True
            accepted.connection.transport.shut()
            return
        if accepted in self._ready:
            self._ready.remove(accepted)
        else:
            del self._arrivals[accepted.descriptor]
            # Closing the socket is not enough: if a forked child has a copy of it, its events would still
            # arrive.
            with contextlib.suppress(OSError):  # TLS has closed it already
                self._events.unregister(accepted.descriptor)
        (accepted.transport or accepted.end).close()


@dataclass(frozen=True, slots=True)
class UnauthenticatedConnection:
    """A connection that has made no permitted call yet (a *stranger*), described for `surplus`.

    Attributes:
        number: Index of the connection in the caller's list.
        address: Address of the other end, as `network_of` returns it.
        since: Time at which the connection was accepted (time.monotonic).
        silent: True if the other end has sent nothing although it had the time to.
    """

    number: int
    address: str
    since: float
    silent: bool


def network_of(host: str) -> str:
    """Return the part of an address that the limits apply to: an IPv4 address, or an IPv6 /64 network.

    A host with IPv6 usually owns a whole /64 network, so it could otherwise appear as many addresses.
    """
    host = host.removeprefix(_MAPPED)
    if ":" not in host:
        return host
    return str(IPv6Network(f"{host.partition('%')[0]}/64", strict=False))


def room(connections: int, members: int, each: int) -> int:
    """Return the number of connections that may be open without having made a permitted call (*strangers*).

    Strangers get at most half of the connections that authenticated clients leave free, so they can never
    fill the server. They also get at most four times the limit of one address.

    Args:
        connections: Largest number of connections of the server.
        members: Number of authenticated connections.
        each: Largest number of strangers of one address.
    """
    return min(max((connections - members) // 2, 1), _ADDRESSES * each)


def closing_notice(closing: Sequence[UnauthenticatedConnection]) -> str:
    """Return the log line about connections that were closed because too many had made no permitted call."""
    address, count = Counter(connection.address for connection in closing).most_common(1)[0]
    return f"closed {len(closing)} unauthenticated connections, {count} of them from {address}"


def surplus(
    strangers: Iterable[UnauthenticatedConnection], each: int, in_all: int
) -> list[UnauthenticatedConnection]:
    """Return the strangers to close so that the limits per address and in total are met.

    A *stranger* is a connection that has made no permitted call yet.

    Within an address, silent strangers are chosen first, then the oldest. If all addresses together have too
    many, the limit per address is lowered for all. So the address with the most strangers loses first.

    Args:
        strangers: All connections that have not made a permitted call.
        each: Strangers that one address may keep.
        in_all: Strangers that all addresses together may keep.
    """
    groups: defaultdict[str, list[UnauthenticatedConnection]] = defaultdict(list)
    for stranger in sorted(
        strangers, key=lambda connection: (not connection.silent, connection.since)
    ):
        groups[stranger.address].append(stranger)
    # Each group is sorted: first the silent strangers, then by age. The front of each group is closed.
    level = _level([len(group) for group in groups.values()], each, in_all)
    closing = [
        connection
        for group in groups.values()
        for connection in group[: max(len(group) - level, 0)]
    ]
    remaining = [
        connection
        for group in groups.values()
        for connection in group[max(len(group) - level, 0) :]
    ]
    remaining.sort(key=lambda connection: (not connection.silent, connection.since))
    # `level` is at least 1, so very many addresses can still have too many strangers in total.
    return closing + remaining[: max(len(remaining) - in_all, 0)]


def _level(sizes: Sequence[int], group_limit: int, in_all: int) -> int:
    """Return the largest limit per group, up to `group_limit`, that keeps the total within `in_all`."""
    level = group_limit
    while level > 1 and sum(min(size, level) for size in sizes) > in_all:
        level -= 1
    return level
