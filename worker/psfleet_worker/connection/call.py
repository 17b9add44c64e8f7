"""Calls under way, how their callers wait for them, and those that carry tensors."""

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
