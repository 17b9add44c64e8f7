"""Calls under way, how their callers wait for them, and those that carry tensors."""

import functools
import operator
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from psfleet.core.base.errors import DeadlineExceeded, PsfleetError, ServerUnavailable
from psfleet.core.base.threads import deferred, wait_for
from psfleet.core.net.connections.access import Access, is_tcp
from psfleet.core.net.connections.channel import GRACE, HANDSHAKE, KEY, error_named
from psfleet.core.net.connections.tls_sockets import connects
from psfleet.core.net.frame import MAX_MESSAGE
from psfleet.core.net.http2.frames import CallFailed, ConnectionBroken, DeadlinePassed
from psfleet.core.net.http2.http2_client import ClientConnection, Http2Client
from psfleet.core.net.v1 import shard_pb2

if TYPE_CHECKING:
    from psfleet_worker.connection.server_client import ServerClient

_METHODS = "Shard/Push", "Shard/Pull", "Shard/Exchange"
PATHS = {method: f"/psfleet.v1.{method}" for method in _METHODS}
_PROBE = 10.0  # seconds in which a server that has not ended says so
_MOST_FAILURES = 3  # then the way is closed, by a firewall perhaps
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class TensorCalls:
    """Calls to one server. Where it offers nothing, or cannot be reached there, calls go as others do.

    Args:
        endpoint: Returns its present endpoint for all methods.
        ask: Asks where the server listens (`Shard/Transport`) over the other transport, within so many
            seconds; raises PsfleetError.

    Attributes:
        client: Makes the calls; None: they go as others do.
    """

    def __init__(
        self, name: str, endpoint: Callable[[], str], access: Access, ask: Callable[[float], bytes]
    ) -> None:
        self._name = name
        self._endpoint = endpoint
        self._access = access
        self._ask = ask
        self._lock = threading.Lock()
        self.client: Http2Client | None = None
        self._found = endpoint()  # where it listened when it was asked
        self._asks = True
        self._closed = False
        self._failures = 0  # connections one after the other that could not be made

    def carries(self, method: str, seconds: float) -> bool:
        """Return whether this call is to be made over this connection.

        `seconds`: How long the call may take, and the question where the server listens.

        Raises:
            PsfleetError: The server cannot be asked.
        """
        if method not in PATHS:
            return False
        if self._endpoint() != self._found:
            self._follow()
        if self.client is None and self._asks:
            self._connect(seconds)
        return self.client is not None

    def call(self, method: str, request: bytes, seconds: float) -> bytes:
        """Make a call that `carries` has accepted.

        Raises:
            PsfleetError: The call failed.
        """
        return self.begin(method, request, seconds).finish()

    def begin(self, method: str, request: bytes, seconds: float) -> ClientConnection:
        """Send such a call.

        Raises:
            ServerUnavailable: There is no connection to be had, or it is lost.
        """
        client = self.client
        if client is None:
            raise ServerUnavailable(f"the connection to {self._name} is closed")
        try:
            return client.begin(PATHS[method], request, max(seconds, 0) + GRACE)
        except Exception as error:
            raise self.failed(client, error, seconds) from None

    def failed(self, client: Http2Client, error: Exception, seconds: float) -> Exception:
        """Return the error of a call that could not be sent."""
        match error:
            case DeadlinePassed():  # of the connection: the call has time to be made again
                failure = ConnectionBroken(f"no connection within {HANDSHAKE:g} seconds")
                return self._failed(client, failure, seconds)
            case ConnectionBroken():
                return self._failed(client, error, seconds)
        return error

    def _failed(self, client: Http2Client, error: Exception, seconds: float) -> PsfleetError:
        """Return the error of a call whose client failed with `error`."""
        match error:
            case CallFailed():
                code = _CODES.get(error.code, grpc.StatusCode.UNKNOWN)
                return error_named(error.metadata.get(KEY, ""), code, error.details, self._name)
            case DeadlinePassed():
                details = f"no answer within {seconds:.1f} seconds"
                return DeadlineExceeded(f"{self._name} does not answer: {details}")
        self._lose(client)
        return ServerUnavailable(f"{self._name} does not answer: {error}")

    def interrupt(self) -> None:
        """Let calls to where the server was fail, if it has moved; the next one goes to where it is."""
        client = self.client
        if client is not None and self._endpoint() != self._found:
            client.close()

    def close(self) -> None:
        """Let go of the connections; calls under way fail. Safe to call twice."""
        with self._lock:
            client, self.client, self._closed = self.client, None, True
        if client is not None:
            client.close()

    def _connect(self, seconds: float) -> None:
        offer = shard_pb2.TransportReply.FromString(self._ask(seconds))
        client = self._made(offer) if offer.port or offer.path else None
        if client is not None:
            try:
                client.connect()
            except (ConnectionBroken, DeadlinePassed) as error:
                client.close()
                self._failures += 1
                silent = isinstance(error, DeadlinePassed)  # another try would take as long
                self._asks = not silent and self._failures < _MOST_FAILURES
                return
        with self._lock:
            is_open = not self._closed
            if is_open:
                self.client, self._asks, self._failures = client, False, 0
        if client is not None and not is_open:  # closed meanwhile
            client.close()

    def _made(self, offer: shard_pb2.TransportReply) -> Http2Client:
        endpoint = f"unix:{offer.path}"
        if offer.port:
            endpoint = f"{self._found.rpartition(':')[0]}:{offer.port}"
        return Http2Client(
            connects(self._access, endpoint),
            "psfleet",
            is_tcp(endpoint) and self._access.credentials is not None,
            MAX_MESSAGE,
            self._access.metadata or (),
            self._probe,
            self._failed,
        )

    def _probe(self) -> None:
        try:
            self._ask(_PROBE)
        except DeadlineExceeded:
            pass  # it may be stopped, or have no processor: a call has its own deadline
        except PsfleetError as error:
            raise ConnectionBroken(str(error)) from None

    def _follow(self) -> None:
        """Note that the server has moved; its transport is looked up again at the new endpoint."""
        with self._lock:
            client, self.client = self.client, None
            self._found, self._asks, self._failures = self._endpoint(), True, 0
        if client is not None:
            client.close()

    def _lose(self, client: Http2Client) -> None:
        """Note that the server may have ended; the transport of the next one there is looked up again."""
        with self._lock:
            if self.client is client:
                self.client, self._asks = None, True
        client.close()


_MOMENT = 0.1  # seconds for which a caller reads answers itself; a longer wait is worth a thread
_has_ended = operator.attrgetter("ended")


class Call:
    """A call to one server, from its message to its end. See ServerRequest for one with tensors.

    Attributes:
        method: "Service/Method".
        seconds: Time for the server to reply.
        outage: Time for which the server may be out of reach.
        is_inline: The message holds all tensors.
        is_small: Message and reply fit into the buffers of a socket, and a caller is about to wait.
        sent: It has left, and its answer is still to be read from this.
        is_busy: A thread sends it or reads its answer; no other thread does.
        awaited: Conditions of the waiting threads; one returns True if its thread needs no more.
        span: Its span, if it is traced; it ends with the call.
    """

    client: "ServerClient"
    method = ""
    message = b""
    seconds = outage = 0.0
    is_inline = True
    is_small = False
    sent: ClientConnection | None = None
    is_busy = ended = False
    failure: Exception | None = None
    reply: bytes | None = None
    error: PsfleetError | None = None
    awaited: tuple[Callable[[], bool], ...] = ()
    span: Any = None

    def encode(self) -> bytes:
        """Return the message, once more for a server that has answered the one before."""
        return self.message

    def fall_back(self) -> None:
        """From now on send the tensors in the message."""

    def lose(self) -> None:
        """Give up the shared memory of a call that failed, which the server may still be using."""

    def read(self) -> None:
        """Read the answer. The caller holds the call."""
        assert self.sent is not None
        try:
            reply = self.sent.finish()
        except Exception as error:
            self.release(failure=error)
        else:
            self.end(reply)

    def release(
        self, connection: ClientConnection | None = None, failure: Exception | None = None
    ) -> None:
        """Let another thread go on with the call.

        Args:
            failure: Its first attempt has ended with this; None: its answer is still to be read.
        """
        with self.client.changed:
            self.is_busy = False
            self.sent = None if failure else connection or self.sent
            self.failure = failure
            if self.awaited:
                self.client.changed.notify_all()
        if connection is None:
            self.client.resume(self)

    def end(self, reply: bytes | None = None, error: PsfleetError | None = None) -> None:
        """Give the result to the waiting caller."""
        client = self.client
        with client.changed:  # whoever hears of the end finds the client idle
            client.open_calls -= 1
            if client.unread is self:
                client.unread = None
            if error is not None:
                self.lose()
            self.reply, self.error, self.ended = reply, error, True
            # Let go of the gradients, which frames of a failure hold too.
            self.message, self.sent, self.failure = b"", None, None
            if self.span is not None:
                self.span.called(error)
            if self.awaited:
                if any(is_over() for is_over in self.awaited):
                    client.changed.notify_all()
                self.awaited = ()


def replies_of(calls: Sequence[Call], timeout: float | None = None) -> list[bytes]:
    """Wait as `wait_all` does; the caller defers interrupts (psfleet.core.base.threads)."""
    if not all(map(_has_ended, calls)) and not _settled(calls):
        _read_all(calls, _MOMENT if timeout is None else min(timeout, _MOMENT))
        if not all(map(_has_ended, calls)):
            condition = calls[0].client.changed
            with condition:
                is_over = functools.partial(_settled, calls)
                for call in calls:  # they wake this thread once, not each for itself
                    if not call.ended:
                        call.awaited += (is_over,)
                wait_for(condition, is_over, timeout)
    replies = []
    for call in calls:
        if call.error is not None:
            raise call.error
        if call.reply is not None:
            replies.append(call.reply)
    if len(replies) < len(calls):
        raise DeadlineExceeded(
            f"{calls[0].method} was not answered by {len(calls) - len(replies)} "
            f"of {len(calls)} servers within {timeout:g} seconds"
        )
    return replies


@deferred()
def wait_all(calls: Sequence[Call], timeout: float | None = None) -> list[bytes]:
    """Return the answers of all calls; raises the first error as soon as there is one.

    What is still under way then goes on without anybody waiting for it.

    Raises:
        DeadlineExceeded: They have not all ended within `timeout` seconds; they stay under way.
    """
    return replies_of(calls, timeout)


def _settled(calls: Sequence[Call]) -> bool:
    """Return whether all have a reply, or one has an error."""
    ended = True
    for call in calls:
        if call.error is not None:
            return True
        ended = ended and call.reply is not None
    return ended


def _read_all(calls: Sequence[Call], seconds: float) -> None:
    """Read answers that no thread reads yet, as they come; after so many seconds their owners do."""
    mine: list[Call] = []
    with calls[0].client.changed:
        for call in calls:
            if call.sent is not None and not call.is_busy:
                call.is_busy = True
                mine.append(call)
    try:
        if (
            len(mine) == 1
            and (connection := mine[0].sent) is not None
            and connection.incoming.poll(seconds * 1000)
        ):
            mine.pop().read()
        elif len(mine) > 1:
            _read_several(mine, seconds)
    finally:
        for call in mine:
            call.release()


def _read_several(mine: list[Call], seconds: float) -> None:
    """Read the answers that come within so many seconds; what is left of `mine` has none."""
    by_descriptor = {call.sent.fileno(): call for call in mine if call.sent is not None}
    incoming = select.poll()
    for descriptor in by_descriptor:
        incoming.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + seconds
    while mine and (rest := deadline - time.monotonic()) > 0:
        for descriptor, _ in incoming.poll(rest * 1000):
            incoming.unregister(descriptor)
            call = by_descriptor[descriptor]
            mine.remove(call)
            call.read()
