"""A server of unary gRPC calls: one thread for each connection."""

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from psfleet.core.base.logs import log_of
from psfleet.core.base.threads import ServiceThread
from psfleet.core.net.http2 import frames
from psfleet.core.net.http2.calls import Behavior, InboundMessages, Streaming
from psfleet.core.net.http2.connection_admission import (
    ConnectionAdmission,
    OpenConnection,
    ServedConnection,
)
from psfleet.core.net.http2.frames import ConnectionBroken, ErrorCode
from psfleet.core.net.http2.server_connection import ServerConnection, ServerSettings
from psfleet.core.net.http2.socket_transport import Part, Tick, Transport

_log = log_of(__name__)

_LOOK = 0.02  # seconds between looks for the end of calls


class Http2Server:
    """Answers calls on a listening socket, from `start` to `stop`.

    Args:
        listener: The socket; the server closes it.
        wrap: Makes a transport of an accepted socket; with TLS it shakes hands.
        behaviors: Handlers of calls, by path.
        settings: Settings of the server.
        say: Gets a line for the log when connections were closed because they were too many.
        messages: Counts those that are on their way; None: they are those of this server alone.
    """

    def __init__(
        self,
        listener: socket.socket,
        wrap: Callable[[socket.socket], Transport],
        behaviors: Mapping[str, Behavior | Streaming],
        settings: ServerSettings,
        say: Callable[[str], None] = lambda _: None,
        messages: InboundMessages | None = None,
    ) -> None:
        self._behaviors = behaviors
        self._settings = settings
        self._messages = messages or InboundMessages(settings.incoming)
        self._lock = threading.Condition()
        self._peers: set[_PeerThread] = set()
        self._admission = ConnectionAdmission(
            listener, wrap, settings, self._served, self._begin, say
        )
        self._thread = ServiceThread(self._admission.run, "http2")

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self, grace: float) -> None:
        """Take no more connections; end those that are open when no call is, or after `grace` seconds."""
        self._admission.stop()
        self._thread.join()
        self._say_goodbye(frames.LARGEST_WINDOW)  # calls that are on their way are still taken
        deadline = time.monotonic() + grace
        with self._lock:
            while self._is_busy() and time.monotonic() < deadline:
                self._lock.wait(_LOOK)
            peers = [*self._peers]
        self._say_goodbye(None)
        for peer in peers:
            peer.transport.shut()
        for peer in peers:
            peer.thread.join()

    def _say_goodbye(self, newest: int | None) -> None:
        """Tell each client the last stream that is taken; None: that which it has used last."""
        with self._lock:
            for peer in self._peers:
                last = peer.connection.newest() if newest is None else newest
                peer.connection.say_goodbye(last, ErrorCode.NO_ERROR, "the server stops")

    def _is_busy(self) -> bool:
        return any(
            peer.connection.is_authenticated
            and (peer.connection.is_busy or peer.transport.is_behind)
            for peer in self._peers
        )

    def _served(self) -> list[OpenConnection]:
        with self._lock:
            return [peer.accepted for peer in self._peers]

    def _begin(self, arrival: OpenConnection) -> None:
        """Give a connection its thread."""
        assert arrival.transport is not None
        transport = DeferredSending(arrival.transport)
        connection = self._connection(transport, arrival.since)
        arrival.connection = connection
        peer = _PeerThread(arrival, transport, connection)
        peer.thread = ServiceThread(self._serve, "http2 connection", (peer,))
        with self._lock:
            self._peers.add(peer)
        try:
            peer.thread.start()
        except RuntimeError:  # the system has no thread for it
            with self._lock:
                self._peers.discard(peer)
            transport.close()

    def _connection(self, transport: Transport, since: float) -> ServedConnection:
        """Return the server's end of a connection that was accepted at this time."""
        return ServerConnection(transport, since, self._behaviors, self._settings, self._messages)

    def _serve(self, peer: "_PeerThread") -> None:
        try:
            peer.transport.handshake(peer.connection.tick)
            peer.connection.run()
        except ConnectionBroken:
            pass  # the other end sees it
        except Exception:
            _log.exception("a connection has failed; others go on")  # a defect
        finally:
            peer.transport.close()
            with self._lock:
                self._peers.discard(peer)
                self._lock.notify_all()


@dataclass(eq=False)
class _PeerThread:
    """A connection and the thread that reads it."""

    accepted: OpenConnection
    transport: "DeferredSending"
    connection: ServedConnection
    thread: threading.Thread = field(init=False)


class DeferredSending:
    """A transport whose `send` leaves what the socket does not take at once for later.

    The connection's own thread sends its part of that before it next waits for bytes, so a client that sends
    and does not read is not read either. What other threads leave is sent by a thread of the connection,
    which is there as long as something is unsent. Bytes leave in the order of the calls of `send`, of
    which there is one at a time.

    Args:
        inner: Sends and receives.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._own = 0  # the thread that serves the connection
        self._lock = threading.Lock()
        self._sending = (
            threading.Lock()
        )  # held while unsent bytes leave; taken before the other one
        self._unsent: list[Part] = []
        self._thread: ServiceThread | None = None

    @property
    def is_behind(self) -> bool:
        """True if something is unsent."""
        return bool(self._unsent)

    def fileno(self) -> int:
        return self._inner.fileno()

    def handshake(self, tick: Tick) -> None:
        """The thread that calls this is the connection's own."""
        self._own = threading.get_ident()
        self._inner.handshake(tick)

    def go_on_with_handshake(self) -> int:
        return self._inner.go_on_with_handshake()

    def receive(self, into: memoryview, tick: Tick) -> int:
        if self._unsent:
            self._send_unsent()
        return self._inner.receive(into, tick)

    def send_some(self, parts: Sequence[Part]) -> list[Part]:
        """Everything is taken, to be sent now or later."""
        self.send(parts)
        return []

    def send(self, parts: Sequence[Part]) -> None:
        """Does not wait for the other end."""
        with self._lock:
            self._unsent += parts if self._unsent else self._inner.send_some(parts)
            if self._unsent and self._thread is None and threading.get_ident() != self._own:
                thread = ServiceThread(self._send_apart, "http2 sending")
                try:
                    thread.start()
                except RuntimeError:
                    self._inner.shut()
                    raise ConnectionBroken("the system has no thread that could send") from None
                self._thread = thread

    def _send_apart(self) -> None:
        try:
            while self._send_unsent(apart=True):
                pass
        except ConnectionBroken:
            self._inner.shut()  # readers see it

    def _send_unsent(self, *, apart: bool = False) -> bool:
        """Send what is unsent; False: nothing was, and a thread for it alone is not needed any more."""
        with self._sending:
            with self._lock:
                parts = self._unsent[:]
                if not parts:
                    self._thread = None if apart else self._thread
                    return False
            self._inner.send(parts)
            with self._lock:
                del self._unsent[: len(parts)]
            return True

    def shut(self) -> None:
        self._inner.shut()

    def close(self) -> None:
        self._inner.shut()
        thread = self._thread
        if thread is not None:
            thread.join()
        self._inner.close()
