"""Server of unary gRPC calls over HTTP/2, with one thread per connection.

A connection's thread reads a call and runs its handler. The handler replies now, or keeps the call and
replies later from any thread. So a call that waits for other workers does not occupy a thread.
connection_admission.py accepts connections, server_connection.py serves a connection, and this module starts
and stops their threads.

A server's handlers reply under its lock. Therefore a reply must never wait for a client that reads slowly:
DeferredSending keeps the bytes that the socket does not accept at once, and sends them later.
"""

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

_LOOK = 0.02  # seconds between checks, during `stop`, whether calls are still open


class Http2Server:
    """Serves calls on a listening socket from `start` to `stop`.

    Args:
        listener: Listening socket, which the server closes.
        wrap: Makes a transport from an accepted socket. The transport performs the TLS handshake, if any.
        behaviors: Handlers by path of the method.
        settings: Settings of the server.
        say: Writes a line to the log. Called when connections were closed because there were too many.
        messages: Limit on partly received messages, to share it with other servers of the process. None gives
            this server a limit of its own.
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
        """Begin to accept connections."""
        self._thread.start()

    def stop(self, grace: float) -> None:
        """Accept no more connections, wait up to `grace` seconds for open calls, then close everything."""
        self._admission.stop()
        self._thread.join()
        # Send GOAWAY twice, as RFC 9113 (section 6.8) advises. The first one allows any stream number,
        # because calls that clients have already sent are still served. The second one names the last
        # served call.
        self._say_goodbye(frames.LARGEST_WINDOW)
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
        """Tell each client the number of the last stream that the server still serves.

        `newest`: Number to send to all clients, or None to send to each the last stream that it has used.
        """
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
        """Start the thread that serves a connection."""
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
        except RuntimeError:  # the system cannot start another thread
            with self._lock:
                self._peers.discard(peer)
            transport.close()

    def _connection(self, transport: Transport, since: float) -> ServedConnection:
        """Return the server's end of a connection that was accepted at the time `since`."""
        return ServerConnection(transport, since, self._behaviors, self._settings, self._messages)

    def _serve(self, peer: "_PeerThread") -> None:
        try:
            peer.transport.handshake(peer.connection.tick)
            peer.connection.run()
        except ConnectionBroken:
            pass  # an ordinary end, or a violation that the client was told about
        except Exception:
            _log.exception("a connection has failed; others go on")  # a defect of psfleet
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
    """Transport whose `send` never waits: bytes that the socket does not accept at once are kept for later.

    If the connection's own thread was the sender, it sends the kept bytes before it waits for input again.
    So a client that does not read its replies cannot send more calls, and replies cannot accumulate. If
    another thread was the sender, a helper thread sends the kept bytes, and ends when none are left. Bytes
    are sent in the order of the calls of `send`, which the connection makes one at a time.

    Two locks guard the kept bytes. `_sending` is taken first and held during the blocking write. `_lock` is
    held only briefly, so that `send` can append while a write is in progress.

    Args:
        inner: Transport that sends and receives.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._own = 0  # ident of the thread that serves the connection
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # held while kept bytes leave; always taken before `_lock`
        self._unsent: list[Part] = []
        self._thread: ServiceThread | None = None

    @property
    def is_behind(self) -> bool:
        """True if bytes are waiting to be sent."""
        return bool(self._unsent)

    def fileno(self) -> int:
        return self._inner.fileno()

    def handshake(self, tick: Tick) -> None:
        """Complete the handshake. The calling thread becomes the connection's own thread."""
        self._own = threading.get_ident()
        self._inner.handshake(tick)

    def go_on_with_handshake(self) -> int:
        return self._inner.go_on_with_handshake()

    def receive(self, into: memoryview, tick: Tick) -> int:
        if self._unsent:
            self._send_unsent()
        return self._inner.receive(into, tick)

    def send_some(self, parts: Sequence[Part]) -> list[Part]:
        """Send the parts now or later. Returns an empty list, because no part is refused."""
        self.send(parts)
        return []

    def send(self, parts: Sequence[Part]) -> None:
        """Send the parts, or keep what the socket does not accept now. Never waits for the other end."""
        with self._lock:
            # Once bytes are kept, later parts must queue behind them, or bytes would be sent out of order.
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
            self._inner.shut()  # the reading thread notices, and ends the connection

    def _send_unsent(self, *, apart: bool = False) -> bool:
        """Send the kept bytes, waiting for the socket. Returns False if there were none.

        Args:
            apart: True if the helper thread calls. If it finds nothing to send, it also clears
                `self._thread`, under the same lock. So a `send` that keeps bytes later sees that no helper
                thread runs, and starts one.
        """
        with self._sending:
            with self._lock:
                parts = self._unsent[:]
                if not parts:
                    self._thread = None if apart else self._thread
                    return False
            self._inner.send(parts)
            with self._lock:
                # Delete them only now: while the list is not empty, `send` appends to it and cannot
                # overtake this write.
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
