"""Accepting connections, in one thread for all that have not proved themselves.

It shakes hands with them and gives a connection to a thread of its own only then. However long that
takes and whatever it sends, a connection without an authenticated call is closed at its deadline; when there
are too many, `surplus` says which are closed at once. Nothing that comes over a connection may raise in this
thread: its end is that of the process.

A connection that was accepted in this turn has had no time to speak, so it never counts as silent in the same
turn. Few are accepted in one turn: new ones cannot displace those that shake hands before they are done.
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

_LOOK = 0.02  # seconds
_BATCH = 4  # a turn accepts this part of the strangers that there may be: 32 of 128
_REST = 3  # while strangers are too many: as many times what was just spent on them, in seconds


_ADDRESSES = 4  # how many may have as many strangers as one address may
_MAPPED = "::ffff:"  # an IPv4 address as IPv6 sockets see it


class ServedConnection(Protocol):
    """The server's end of a connection, as a thread serves it.

    Attributes:
        transport: Its bytes.
        is_authenticated: True if a permitted call has come.
    """

    transport: Transport
    is_authenticated: bool

    @property
    def is_busy(self) -> bool:
        """True if a call waits for its answer."""

    def run(self) -> None:
        """Serve until the connection ends, which is a ConnectionBroken."""

    def tick(self) -> None:
        """Called about twice a second while nothing comes; ends the connection by raising."""

    def newest(self) -> int:
        """Return the number of the last call."""

    def say_goodbye(self, newest: int, code: ErrorCode, details: str) -> None:
        """Tell the client that calls up to this one are taken, and no more."""


@dataclass(eq=False)
class OpenConnection:
    """An accepted connection.

    Attributes:
        end: Its socket, until it has a transport.
        descriptor: Descriptor of the socket.
        address: Address of the other end, as `network_of` gives it.
        since: Time at which it was accepted, by time.monotonic.
        transport: Its bytes; None: it has sent nothing yet.
        connection: Connection that a thread of its own serves; None: its handshake is not over.
        is_shut: True if it is being closed.
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
        """True if a permitted call has come."""
        return self.connection is not None and self.connection.is_authenticated


class ConnectionAdmission:
    """Accepts connections until `stop`.

    Args:
        listener: The socket; it is closed at the end.
        wrap: Makes a transport of an accepted socket.
        settings: Settings of the server.
        connections: Those that have threads.
        serve: Gives a connection a thread.
        say: Gets a line for the log when strangers were closed.
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
        self._arrivals: dict[int, OpenConnection] = {}  # whose handshake is not over, by descriptor
        self._ready: list[OpenConnection] = []  # whose handshake is over, until they have a thread
        self._events = select.epoll()
        self._turn = 0.0  # time at which the present turn began

    def stop(self) -> None:
        """Let `run` return."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Accept connections."""
        self._listener.setblocking(False)
        self._events.register(self._listener, select.EPOLLIN)
        pause: float | None = None
        while not self._over.is_set():
            events = self._events.poll(pause)
            began, self._turn = time.thread_time(), time.monotonic()
            for descriptor, _ in events:
                if descriptor == self._listener.fileno():
                    if not self._accept():
                        self._over.wait(_LOOK)  # no descriptor is left
                elif (arrival := self._arrivals.get(descriptor)) is not None:
                    self._go_on(arrival)
            if self._look():
                self._over.wait(_REST * (time.thread_time() - began))
            pause = self._pause()
        for connection in self._strangers():
            self._close(connection)
        self._listener.close()
        self._events.close()

    def _pause(self) -> float | None:
        """Return seconds until something is to be done even if nothing happens."""
        if self._ready:
            return _LOOK
        first = min((one.since for one in self._strangers()), default=None)
        if first is None:
            return None
        return max(first + self._settings.handshake - time.monotonic(), 0.0) + _LOOK

    def _strangers(self) -> list[OpenConnection]:
        """Return the open connections that are not authenticated."""
        strangers = [one for one in self._served() if not one.is_authenticated and not one.is_shut]
        return [*self._arrivals.values(), *self._ready, *strangers]

    def _accept(self) -> bool:
        """Accept what has come; False: this process can have no more descriptors."""
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

    def _go_on(self, one: OpenConnection) -> None:
        """Read what has come from a connection."""
        try:
            if one.transport is None:
                if not one.end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    raise ConnectionBroken("the other end has closed the connection")
                one.transport = self._wrap(one.end)
            event = one.transport.go_on_with_handshake()
            if event:
                self._events.modify(one.descriptor, event)
                return
            self._events.unregister(one.descriptor)
        except (OSError, ConnectionBroken):
            self._close(one)
        except Exception:
            _log.exception("a connection has failed; others go on")  # a defect
            self._close(one)
        else:
            self._ready.append(self._arrivals.pop(one.descriptor))

    def _in_all(self) -> int:
        """Return the most strangers that there may be now."""
        members = sum(one.is_authenticated for one in self._served())
        return room(self._settings.connections, members, self._settings.handshakes)

    def _look(self) -> bool:
        """Close what is late or too much and start threads; whether something was too much."""
        self._end_late()
        in_all = self._in_all()
        closing = self._surplus(in_all)
        threads = sum(not one.is_authenticated for one in self._served())
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
        """Close those that are too many, and say which they were."""
        strangers, each = self._strangers(), self._settings.handshakes
        if len(strangers) <= min(each, in_all):
            return []
        latest_silent = self._turn - _LOOK
        unproven = (
            UnauthenticatedConnection(
                number, one.address, one.since, one.transport is None and one.since < latest_silent
            )
            for number, one in enumerate(strangers)
        )
        closing = surplus(unproven, each, in_all)
        for one in closing:
            self._close(strangers[one.number])
        return closing

    def _close(self, one: OpenConnection) -> None:
        if one.connection is not None:
            one.is_shut = True
            one.connection.transport.shut()
            return
        if one in self._ready:
            self._ready.remove(one)
        else:
            del self._arrivals[one.descriptor]
            # Closing does not suffice: a duplicate, as of a forked child, would keep the events coming.
            with contextlib.suppress(OSError):  # TLS has closed it already
                self._events.unregister(one.descriptor)
        (one.transport or one.end).close()


@dataclass(frozen=True, slots=True)
class UnauthenticatedConnection:
    """A connection that has not proved itself.

    Attributes:
        number: Number of its socket.
        address: Address of the other end, as `network_of` gives it.
        since: Time at which it was first seen.
        silent: It has sent nothing, though it had the time.
    """

    number: int
    address: str
    since: float
    silent: bool


def network_of(host: str) -> str:
    """Return the network that counts as one address: an IPv4 address, or the /64 of one IPv6 host."""
    host = host.removeprefix(_MAPPED)
    if ":" not in host:
        return host
    return str(IPv6Network(f"{host.partition('%')[0]}/64", strict=False))


def room(connections: int, members: int, each: int) -> int:
    """Return the most strangers allowed: half of the connections that members leave free, up to a limit."""
    return min(max((connections - members) // 2, 1), _ADDRESSES * each)


def closing_notice(closing: Sequence[UnauthenticatedConnection]) -> str:
    """Return the log line about the connections that were closed."""
    address, count = Counter(one.address for one in closing).most_common(1)[0]
    return f"closed {len(closing)} unauthenticated connections, {count} of them from {address}"


def surplus(
    strangers: Iterable[UnauthenticatedConnection], each: int, in_all: int
) -> list[UnauthenticatedConnection]:
    """Return those to close: afterwards an address has at most `each`, and all together have `in_all`."""
    groups: defaultdict[str, list[UnauthenticatedConnection]] = defaultdict(list)
    for stranger in sorted(strangers, key=lambda one: (not one.silent, one.since)):
        groups[stranger.address].append(stranger)
    most = _level([len(group) for group in groups.values()], each, in_all)
    closing = [one for group in groups.values() for one in group[: max(len(group) - most, 0)]]
    rest = [one for group in groups.values() for one in group[max(len(group) - most, 0) :]]
    rest.sort(key=lambda one: (not one.silent, one.since))
    return closing + rest[: max(len(rest) - in_all, 0)]


def _level(sizes: Sequence[int], each: int, in_all: int) -> int:
    """Return the most that each group may have, at least 1, so that all together have at most `in_all`."""
    level = each
    while level > 1 and sum(min(size, level) for size in sizes) > in_all:
        level -= 1
    return level
