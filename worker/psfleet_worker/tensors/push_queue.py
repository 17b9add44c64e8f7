"""Pulls and pushes under way: pushes in order, a few at a time, in company of the next pull if it can be.

A call costs as much CPU as half a megabyte of tensors. So a push waits a moment for the pull that mostly
follows it, and travels in the same call; not in sync mode, unless there is one server. If none comes it
leaves alone. Behind a pull that is read ahead it waits for the answer too: it could not leave before that,
and whoever has read ahead will do so again.
"""

import contextlib
import itertools
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import PsfleetError, UsageError
from psfleet.core.base.threads import ServiceThread, deferred
from psfleet.core.engine.schema.table import TableSpec
from psfleet_worker.connection.call import replies_of, wait_all
from psfleet_worker.connection.request import ServerRequest, Values
from psfleet_worker.connection.server_client import ServerClient
from psfleet_worker.tensors.splitting import DenseRead, SparseRead

Floats = NDArray[np.float32]


_bytes_of, _reply_of = operator.attrgetter("bytes"), operator.attrgetter("reply")

LINGER = 0.005
"""Seconds that a push which could leave waits for company, at most."""


class FleetPull:
    """Implements psfleet.core.engine.interface.PendingPull.

    Args:
        requests: One per server; those that are called have begun.
        servers: The servers that are called; the push before the pull may be in the calls.
        masks: Mask of the servers that have a part, for each read.
        settle: Waits for all pushes; raises what a server has refused one with.

    Attributes:
        view: The newest view of the fleet that the answers tell of, once they are here.
    """

    def __init__(
        self,
        requests: Sequence[ServerRequest],
        servers: Sequence[int],
        split_reads: Sequence[DenseRead | SparseRead],
        masks: Sequence[Sequence[bool]],
        spec_of: Callable[[int], TableSpec],
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._requests = requests
        self._servers = servers
        self._split_reads = split_reads
        self._masks = masks
        self._spec_of = spec_of
        self._settle = settle
        self.view = 0
        self._found: list[list[Values | None]] | None = None  # of each read what each server gave
        self.joined: list[Floats] | None = None

    @deferred()
    def wait(self) -> list[Floats]:
        """Wait for the values."""
        return self.join()

    def join(self) -> list[Floats]:
        """Wait for the values; the caller handles interrupts.

        Gives the places of the answers back, so it comes before they are reused.
        """
        if self.joined is None:
            if self._found is None:
                self.arrive()
            assert self._found is not None
            self.joined = arrays = []
            for read, values in zip(self._split_reads, self._found, strict=True):
                arrays.append(read.join(values))
            self._found = None
            for request in self._requests:
                request.close()
        return self.joined

    def arrive(self) -> None:
        """Wait until the answers are here, which are not joined yet."""
        if self._found is not None or self.joined is not None:
            return
        requests = self._requests
        try:
            replies = replies_of([*map(requests.__getitem__, self._servers)])
        except (PsfleetError, KeyboardInterrupt) as error:
            for request in requests:
                request.lose()
            if isinstance(error, UsageError):  # perhaps of the push that came with it
                self._settle()
            raise
        by_read: list[list[Values | None]] = []
        for _ in self._split_reads:
            by_read.append([None] * len(requests))
        for server, reply in zip(self._servers, replies, strict=True):
            request = requests[server]
            values = iter(request.values_of(reply, self._spec_of))
            self.view = max(self.view, request.view)
            for of_read, has_part in zip(by_read, self._masks, strict=True):
                if has_part[server]:
                    of_read[server] = next(values)
        self._found = by_read

    @property
    def is_under_way(self) -> bool:
        """A server has not replied yet."""
        return not all(self._requests[server].ended for server in self._servers)


class FleetPush:
    """A push under way or about to leave: a request for each server, and whether it goes there."""

    def __init__(
        self,
        pushes: "PushQueue",
        requests: Sequence[ServerRequest],
        goes_to: Sequence[bool],
        is_held: bool,
    ) -> None:
        self.requests = requests
        self.goes_to = goes_to
        self.is_held = is_held
        self.is_refusal_known = False
        self.bytes = sum(map(_bytes_of, requests))
        self.calls: Sequence[ServerRequest] = ()
        self._pushes = pushes

    @deferred()
    def wait(self, timeout: float | None = None) -> None:
        """Wait until the push is applied."""
        self._pushes.check_process()
        self._pushes.send()
        try:
            replies_of(self.calls, timeout)
        except UsageError as error:
            self.is_refusal_known = True
            raise self.refusal(error) from None

    def settle(self, deadline: float | None) -> UsageError | None:
        """Wait until no server is at work on it; with what one has refused it, if one has.

        Servers that hold it for a round let go of it then: none takes a part of it.
        """
        try:
            replies_of(self.calls, None if deadline is None else _left(deadline))
        except UsageError as error:
            for call in self.calls:
                with contextlib.suppress(UsageError):
                    wait_all([call], None if deadline is None else _left(deadline))
            if self.is_held:
                self._pushes.withdraw(self)
            return error
        return None

    def refusal(self, error: UsageError) -> UsageError:
        """Return the error as the caller of the push gets it."""
        number = self.requests[0].number
        addition = ""
        if sum(self.goes_to) > 1 and not self.is_held:
            addition = ", and servers that had room have taken their parts of it"
        return type(error)(f"push {number} was refused{addition}: {error}")


class PushQueue:
    """The pushes of one worker.

    Args:
        most: Bytes under way at most, unless there is only one push.

    Attributes:
        lock: Held while a push is put on its way; pulls take it to keep the order.
        check_process: Refuses to work in a fork of the worker's process, where nothing ever ends.
    """

    def __init__(self, clients: Sequence[ServerClient], most: int) -> None:
        self.lock = threading.RLock()
        self._most = most
        self._clients = clients
        self.check_process = clients[0].check_process
        self._changed = threading.Condition(self.lock)
        self._waiting: FleetPush | None = None
        self._behind: FleetPull | None = None  # what the push that waits follows
        self._due = 0.0
        self._came = False  # a push, since the thread last looked
        self._asleep = False  # the thread, until it is woken
        self._under_way: deque[FleetPush] = deque()
        self._bytes = 0  # of those under way
        self._closing = False
        self._thread: threading.Thread | None = None

    def add(
        self,
        requests: Sequence[ServerRequest],
        goes_to: Sequence[bool],
        *,
        linger: bool,
        is_held: bool = False,
        behind: FleetPull | None = None,
    ) -> FleetPush:
        """Send a push after those before it.

        Args:
            goes_to: For each server whether it is sent there.
            linger: It waits a moment for company.
            is_held: Servers hold it for a round.
            behind: The moment begins with the answers of this pull.
        """
        ticket = FleetPush(self, requests, goes_to, is_held)
        with self.lock:
            if self._waiting is not None:
                self.send()
            self._waiting, self._behind = ticket, behind
            if linger:
                for request in requests:
                    request.own()
                self._expect_company()
            else:
                self.send()
        return ticket

    def take(self) -> FleetPush | None:
        """Return the push that waits for a pull, if one does; the caller sends it and calls `sent`."""
        with self.lock:
            ticket, self._waiting, self._behind = self._waiting, None, None
            return ticket

    def sent(self, ticket: FleetPush) -> None:
        """Note that the requests of a push have left. The caller holds the lock."""
        ticket.calls = [*itertools.compress(ticket.requests, ticket.goes_to)]
        self._under_way.append(ticket)
        self._bytes += ticket.bytes

    def send(self) -> None:
        """Let the push that waits leave alone."""
        with self.lock:
            ticket, self._waiting, self._behind = self._waiting, None, None
            if ticket is not None:
                for client, request, goes in zip(
                    self._clients, ticket.requests, ticket.goes_to, strict=True
                ):
                    if goes:
                        client.send(request, "Shard/Push")
                self.sent(ticket)

    def settle(self, under_way: int = 0, timeout: float | None = None) -> None:
        """Wait until at most so many of those that have left are not acknowledged.

        And until one more, as large as the last one, keeps within the bytes that may be under way.

        Raises:
            UsageError: A server has refused one, and everything goes on: it is raised once, when all that are
                under way have ended.
            PsfleetError: The oldest push failed; from now on raised every time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        refusals: list[UsageError] = []
        # The last one has no more bytes than all of them.
        while len(self._under_way) > (0 if refusals else under_way) or (
            self._bytes * 2 > self._most and self._is_full
        ):
            oldest = self._under_way[0]
            error = None if all(map(_reply_of, oldest.calls)) else oldest.settle(deadline)
            if error is not None and not oldest.is_refusal_known:
                refusals.append(oldest.refusal(error))
            with self.lock:
                self._under_way.popleft()
                self._bytes -= oldest.bytes
            for request in oldest.requests:
                request.close()
        if refusals:
            first, others = refusals[0], len(refusals) - 1
            more = f" (so were {others} pushes after it)" if others else ""
            raise type(first)(f"{first}{more}")

    def withdraw(self, push: FleetPush) -> None:
        """Have all servers take back a push that they hold for a round."""
        wait_all(
            [
                client.start("Shard/Push", request.withdrawal())
                for client, request in zip(self._clients, push.requests, strict=True)
            ]
        )

    @property
    def _is_full(self) -> bool:
        with self.lock:
            return bool(self._under_way) and self._bytes + self._under_way[-1].bytes > self._most

    def close(self) -> None:
        """Stop waiting for company. What has not left is dropped. Safe to call twice."""
        with self.lock:
            self._closing = True
            self._waiting = None
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _expect_company(self) -> None:
        self._due = time.monotonic() + LINGER
        if self._thread is None:
            self._thread = ServiceThread(self._run, "pushes")
            self._thread.start()
        self._came = True
        if self._asleep:
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._closing:
                if self._waiting is None:
                    # As long as pushes come it looks by itself, rather than be woken by each of them.
                    self._asleep, self._came = not self._came, False
                    self._changed.wait(None if self._asleep else LINGER)
                    self._asleep = False
                elif (rest := self._due - time.monotonic()) > 0:
                    self._changed.wait(rest)
                elif self._behind is not None:
                    if not self._behind.is_under_way:
                        self._behind = None
                    self._due = time.monotonic() + LINGER
                else:
                    self.send()


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
