"""Calls under way, and how threads wait for their replies.

Two threads can work on a call to one server: the thread that made it, and the thread of its `ServerClient`,
which makes calls one after the other. For a small call the handover between threads would cost more than the
call, so its caller sends it and reads the reply without the client's thread:

    caller: ServerClient.send --sends--> release(connection) --replies_of, up to 0.1 s--> read --> end
                                              |                        |
    thread: <--------- take_unread, before the next call is queued ----+-- no reply by then: resume
            every other call: queue --> send, read, retry ---------------------------------------> end

`is_busy` is True while one thread works on the call. A thread that wants to continue a call sets `is_busy`
under the lock `client.changed`, and gives the call up with `release` or `end`. Clients share that condition
if their calls are awaited together. Calls with tensors are `ServerRequest`s (request.py). tensor_calls.py
decides which address of the server a call goes to, and retry_policy.py when to try again.
"""

import functools
import operator
import select
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from psfleet.core.base.errors import DeadlineExceeded, PsfleetError
from psfleet.core.base.threads import deferred, wait_for
from psfleet.core.net.http2.http2_client import ClientConnection

if TYPE_CHECKING:
    from psfleet_worker.connection.server_client import ServerClient


# Seconds for which a caller reads replies itself. For a longer wait, the handover to the clients' threads is
# worth its cost.
_MOMENT = 0.1
_has_ended = operator.attrgetter("ended")


class Call:
    """A call to one server, from its message to its reply or error. `ServerRequest` is a call with tensors.

    Attributes:
        client: Client of the server, set when the call is sent.
        method: "Service/Method", such as "Shard/Push".
        message: Bytes of the request, dropped when the call ends.
        seconds: Time in seconds for the server to reply.
        outage: Time in seconds for which the server may be unreachable.
        is_inline: True if the message contains all tensors, False if some are in shared memory.
        is_small: True if message and reply fit into the buffers of a socket and a caller is about to wait, so
            that the caller can send it without blocking.
        sent: Connection from which the reply must still be read, or None.
        is_busy: True while one thread sends the call or reads its reply. Other threads must not touch it
            then.
        ended: True once `reply` or `error` is set.
        failure: Error of a first attempt by the caller, or None. The client's thread then retries the call.
        awaited: Predicates of the waiting threads. A predicate returns True if its thread can stop waiting.
        span: Span of a traced call, or None. It ends with the call.
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
        """Return the message of the next attempt."""
        return self.message

    def fall_back(self) -> None:
        """Send the tensors in the message, not in shared memory, from the next attempt on."""

    def lose(self) -> None:
        """Stop using the shared memory of a failed call, because its server may still read and write it."""

    def read(self) -> None:
        """Wait for the reply and end the call with it. The calling thread has set `is_busy`."""
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
        """Stop working on the call and let another thread continue.

        Args:
            connection: Connection over which the call was just sent, or None. The caller is expected to read
                the reply from it. Without a connection, the client's thread continues at once.
            failure: Error of the first attempt, or None if the reply must still be read.
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
        """Set the result of the call and wake the threads that wait for it."""
        client = self.client
        with client.changed:
            # Before `ended` is set: a caller that sees the end at once may send its next call without the
            # thread, or share new memory, only if the client has no open call.
            client.open_calls -= 1
            if client.unread is self:
                client.unread = None
            if error is not None:
                self.lose()
            self.reply, self.error, self.ended = reply, error, True
            # Free the gradients now. A failure references them too, through the frames of its traceback.
            self.message, self.sent, self.failure = b"", None, None
            if self.span is not None:
                self.span.called(error)
            # The clients of all servers share the condition. A thread that waits for ten of them is woken
            # once, by the call that makes its predicate true.
            if self.awaited:
                if any(is_over() for is_over in self.awaited):
                    client.changed.notify_all()
                self.awaited = ()


def replies_of(calls: Sequence[Call], timeout: float | None = None) -> list[bytes]:
    """Return the replies of all calls, as `wait_all` does, for a caller that already defers interrupts.

    This thread reads the replies itself for up to 0.1 s. Later replies are read by the clients' threads.
    psfleet.core.base.threads explains deferred interrupts.
    """
    if not all(map(_has_ended, calls)) and not _settled(calls):
        _read_all(calls, _MOMENT if timeout is None else min(timeout, _MOMENT))
        if not all(map(_has_ended, calls)):
            condition = calls[0].client.changed
            with condition:
                is_over = functools.partial(_settled, calls)
                for call in calls:
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
    """Return the replies of all calls, in their order. Raises the first error as soon as there is one.

    Other calls continue after an error, but no thread waits for them.

    Args:
        calls: Calls of clients that share a condition.
        timeout: Limit of the wait in seconds, or None for no limit besides those of the calls.

    Raises:
        DeadlineExceeded: A call has not ended within `timeout` seconds. The calls stay under way.
        PsfleetError: A call failed.
    """
    return replies_of(calls, timeout)


def _settled(calls: Sequence[Call]) -> bool:
    """Return whether all calls have a reply, or one call has an error."""
    ended = True
    for call in calls:
        if call.error is not None:
            return True
        ended = ended and call.reply is not None
    return ended


def _read_all(calls: Sequence[Call], seconds: float) -> None:
    """Read the replies of calls that no thread works on, in the order in which they arrive.

    Calls without a reply after `seconds` are released, and the threads of their clients continue with them.
    """
    own_calls: list[Call] = []
    with calls[0].client.changed:
        for call in calls:
            if call.sent is not None and not call.is_busy:
                call.is_busy = True
                own_calls.append(call)
    try:
        # Each connection has its own poll object, so the common case of one call creates none.
        if (
            len(own_calls) == 1
            and (connection := own_calls[0].sent) is not None
            and connection.incoming.poll(seconds * 1000)
        ):
            own_calls.pop().read()
        elif len(own_calls) > 1:
            _read_several(own_calls, seconds)
    finally:
        for call in own_calls:
            call.release()


def _read_several(calls: list[Call], seconds: float) -> None:
    """Read the replies that arrive within `seconds`, and remove their calls from `calls`."""
    by_descriptor = {call.sent.fileno(): call for call in calls if call.sent is not None}
    incoming = select.poll()
    for descriptor in by_descriptor:
        incoming.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + seconds
    while calls and (remaining_seconds := deadline - time.monotonic()) > 0:
        for descriptor, _ in incoming.poll(remaining_seconds * 1000):
            incoming.unregister(descriptor)
            call = by_descriptor[descriptor]
            calls.remove(call)
            call.read()
