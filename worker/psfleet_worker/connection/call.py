"""Calls under way, and how their callers wait for them."""

import functools
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from psfleet.errors import DeadlineExceeded, PsfleetError
from psfleet.platform.interrupts import deferred, wait_for

__all__ = ["Call", "CallOwner", "CallTensors", "SentCall", "wait_all"]

_MOMENT = 0.1  # seconds for which a caller reads answers itself; a longer wait is worth a thread


class CallTensors(Protocol):
    """Tensors of a call that may lie in shared memory rather than in its request."""

    def request(self) -> bytes:
        """The request once more, for a server that has answered the one before."""

    def fallback(self) -> bytes:
        """The same request with the tensors in it."""

    def lose(self) -> None:
        """The call has failed: the server may still be using the memory."""


class SentCall(Protocol):
    """A call whose request has left."""

    def fileno(self) -> int:
        """Where its answer comes in."""

    def arrives(self, seconds: float) -> bool:
        """Whether its answer comes in within so many seconds; waits for it."""

    def finish(self) -> bytes:
        """Read the answer; raises PsfleetError."""


class CallOwner(Protocol):
    """Who goes on with a call that nobody holds."""

    def end(
        self, call: "Call", answer: bytes | None = None, error: PsfleetError | None = None
    ) -> None:
        """The call has ended."""

    def resume(self, call: "Call") -> None:
        """Read its answer, or make it again after its failure."""


class Call:
    """A call under way. `changed` is shared by all calls that may be waited for together.

    Attributes:
        sent: It has left, and its answer is still to be read.
        held: A thread sends it or reads its answer; no other thread does.
        failure: What its first attempt has ended with.
        answer, error: How it has ended.
        awaited: Whether those who wait for it have all they want.
    """

    def __init__(
        self,
        owner: CallOwner,
        method: str,
        request: bytes,
        seconds: float,
        outage: float,
        changed: threading.Condition,
        cargo: CallTensors | None,
    ) -> None:
        self.owner = owner
        self.method = method
        self.request = request
        self.seconds = seconds
        self.outage = outage
        self.changed = changed
        self.cargo = cargo
        self.sent: SentCall | None = None
        self.held = False
        self.failure: Exception | None = None
        self.answer: bytes | None = None
        self.error: PsfleetError | None = None
        self.awaited: list[Callable[[], bool]] = []

    @property
    def ended(self) -> bool:
        """Whether there is an answer or an error."""
        return self.answer is not None or self.error is not None

    def fall_back(self) -> None:
        """From now on send the tensors in the request."""
        if self.cargo is not None:
            self.request, self.cargo = self.cargo.fallback(), None

    def renew(self) -> None:
        """The server has answered and wants the same again."""
        if self.cargo is not None:
            self.request = self.cargo.request()

    def fileno(self) -> int:
        """See SentCall."""
        assert self.sent is not None
        return self.sent.fileno()

    def arrives(self, seconds: float) -> bool:
        """See SentCall."""
        assert self.sent is not None
        return self.sent.arrives(seconds)

    def read(self) -> None:
        """Read the answer. The caller holds the call."""
        assert self.sent is not None
        try:
            answer = self.sent.finish()
        except Exception as error:
            self.release(failure=error)
        else:
            self.owner.end(self, answer)

    def release(self, sent: SentCall | None = None, failure: Exception | None = None) -> None:
        """Let another thread go on with the call.

        Args:
            sent: It has just left.
            failure: Its first attempt has ended with this; None: its answer is still to be read.
        """
        with self.changed:
            self.held = False
            self.sent = None if failure else sent or self.sent
            self.failure = failure
            if self.awaited:
                self.changed.notify_all()
        if sent is None:
            self.owner.resume(self)

    def end(self, answer: bytes | None = None, error: PsfleetError | None = None) -> None:
        """Give the result to the waiting caller. Whoever calls has `changed`."""
        if error is not None and self.cargo is not None:
            self.cargo.lose()
        self.answer, self.error = answer, error
        # Let go of the gradients, which frames of a failure hold too.
        self.request, self.cargo, self.sent, self.failure = b"", None, None, None
        if self.awaited:
            if any(settled() for settled in self.awaited):
                self.changed.notify_all()
            self.awaited.clear()


def wait_all(calls: Sequence[Call], timeout: float | None = None) -> list[bytes]:
    """The answers of all calls; raises the first error as soon as there is one.

    What is still under way then goes on without anybody waiting for it.

    Raises:
        DeadlineExceeded: They have not all ended within `timeout` seconds; they stay under way.
    """
    if not _settled(calls):
        with deferred():
            _read_all(calls, _MOMENT if timeout is None else min(timeout, _MOMENT))
            if not _settled(calls):
                with calls[0].changed:
                    settled = functools.partial(_settled, calls)
                    for call in calls:  # they wake this thread once, not each for itself
                        if not call.ended:
                            call.awaited.append(settled)
                    wait_for(calls[0].changed, settled, timeout)
    answers = []
    for call in calls:
        if call.error is not None:
            raise call.error
        if call.answer is not None:
            answers.append(call.answer)
    if len(answers) < len(calls):
        raise DeadlineExceeded(
            f"{calls[0].method} was not answered by {len(calls) - len(answers)} "
            f"of {len(calls)} servers within {timeout:g} seconds"
        )
    return answers


def _settled(calls: Sequence[Call]) -> bool:
    """Whether all have been answered, or one has an error."""
    ended = True
    for call in calls:
        if call.error is not None:
            return True
        ended = ended and call.answer is not None
    return ended


def _read_all(calls: Sequence[Call], seconds: float) -> None:
    """Read answers that no thread reads yet, as they come; after so many seconds their owners do."""
    mine: list[Call] = []
    with calls[0].changed:
        for call in calls:
            if call.sent is not None and not call.held:
                call.held = True
                mine.append(call)
    try:
        if len(mine) == 1 and mine[0].arrives(seconds):
            mine.pop().read()
        elif len(mine) > 1:
            _read_several(mine, seconds)
    finally:
        for call in mine:
            call.release()


def _read_several(mine: list[Call], seconds: float) -> None:
    """Read the answers that come within so many seconds; what is left of `mine` has none."""
    by_descriptor = {call.fileno(): call for call in mine}
    incoming = select.poll()
    for descriptor in by_descriptor:
        incoming.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + seconds
    while mine and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in incoming.poll(left * 1000):
            incoming.unregister(descriptor)
            call = by_descriptor[descriptor]
            mine.remove(call)
            call.read()
