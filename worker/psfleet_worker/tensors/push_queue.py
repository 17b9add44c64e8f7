"""Outstanding pushes and pulls of one worker.

Pushes are sent in order, and the queue merges a push with the next pull if one follows within LINGER seconds.
A call costs as much CPU as half a megabyte of tensors, and a step mostly pushes and then pulls, so one call
for both saves half of the calls. The life of a push:

    add --linger--> waiting --take, by a pull-------------> under way --all replies, settle--> closed
      |                +------5 ms are over, or send-----------^
      +--no linger---------------------------------------------^

At most one push waits. In sync mode with several servers no push waits, because a pull may commit a round
only when every server has the push. If a prefetched pull is under way, the 5 ms begin with its reply: calls
to a server are sent in order, so the push could not have overtaken it, and a script that prefetches mostly
prefetches again right after the reply.

The training thread adds, settles and closes. A thread of the queue sends a push that has waited long enough.
The error of a push is raised by its handle (`FleetPush`) or by the next `settle`. `Transfers` decides what a
push contains, and `Stream` (psfleet_worker.session.worker_session) decides when to settle.
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

from psfleet.core.base.errors import PsfleetError, UsageError, joined_refusals
from psfleet.core.base.threads import ServiceThread, deferred
from psfleet.core.engine.schema.table import TableSpec
from psfleet_worker.connection.call import replies_of, wait_all
from psfleet_worker.connection.request import ServerRequest, Values
from psfleet_worker.connection.server_client import ServerClient
from psfleet_worker.tensors.splitting import DenseRead, SparseRead

Floats = NDArray[np.float32]


# Getters in C for `map`, as `__getitem__` and `compress` below: they run for each request of each push, where
# a Python function would take longer.
_bytes_of, _reply_of = operator.attrgetter("bytes"), operator.attrgetter("reply")

LINGER = 0.005
"""Longest time in seconds that a push waits for a pull to share its call, if nothing else delays it.

Other workers see the push this much later (decision 14).
"""


class FleetPull:
    """A pull whose calls are sent. Implements psfleet.core.engine.runtime_interface.PendingPull.

    A pull passes through two states. `arrive` waits for the replies, whose values are still in shared memory
    or in the messages. `join` then copies them into one array per read and frees the shared memory.

    Args:
        requests: One request per server, sent or not.
        servers: Numbers of the servers whose requests were sent. A request may carry a push besides reads, or
            only a push.
        split_reads: The reads of the caller, which join the values of all servers.
        masks: For each read a list with True for each server that must return a part of it.
        spec_of: Returns a table's definition for its key.
        settle: Waits for all pushes, and raises the error if a server has refused one.

    Attributes:
        view: Newest view number (membership) in the replies, or 0 until they arrive.
        joined: Values of each read, or None until they are joined.
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
        # values[read][server], between `arrive` and `join`; None for a server without a part
        self._found: list[list[Values | None]] | None = None
        self.joined: list[Floats] | None = None

    @deferred()
    def wait(self) -> list[Floats]:
        """Wait for the values and return one array per read."""
        return self.join()

    def join(self) -> list[Floats]:
        """Wait for the values and join them. The caller defers interrupts.

        This frees the shared memory of the calls, so the values must be joined here before another call gets
        that memory.
        """
        if self.joined is None:
            if self._found is None:
                self.arrive()
            assert self._found is not None
            parts = zip(self._split_reads, self._found, strict=True)
            # Set once all are joined: after a MemoryError the caller may try again.
            self.joined = [read.join(values) for read, values in parts]
            self._found = None
            # In reverse: freed places are taken last in, first out, so that the next step's request to each
            # server gets the same place again, and its segments have the same bytes.
            for request in reversed(self._requests):
                request.close()
        return self.joined

    def arrive(self) -> None:
        """Wait for the replies, and leave their values where they are until `join`."""
        if self._found is not None or self.joined is not None:
            return
        requests = self._requests
        try:
            replies = replies_of([*map(requests.__getitem__, self._servers)])
        except (PsfleetError, KeyboardInterrupt) as error:
            # Servers that have not replied may still read and write the shared memory, so it is no longer
            # used.
            for request in requests:
                request.lose()
            # A call may carry a push too. If the server refused the push, settling raises an error that names
            # the push. Otherwise the caller would look for a mistake in its pull.
            if isinstance(error, UsageError):
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
        """True while a server has not replied."""
        return not all(self._requests[server].ended for server in self._servers)


class FleetPush:
    """Handle of one push, which waits in the queue or is under way.

    Args:
        pushes: The queue.
        requests: One request per server.
        goes_to: For each server True if the push is sent there.
        is_held: True if servers keep the push unapplied until its round closes (modes with rounds).

    Attributes:
        bytes: Bytes of its tensors, over all servers.
        calls: The requests that were sent, or empty until the push is sent.
        is_refusal_known: True if `wait` has raised the refusal, so that `settle` does not raise it again.
    """

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
        """Wait until the push is applied.

        Raises:
            UsageError: A server has refused the push.
        """
        self._pushes.check_process()
        # This push may still wait for a pull, which the caller of `wait` cannot make meanwhile. A newer push
        # goes on waiting.
        if not self.calls:
            self._pushes.send()
        try:
            replies_of(self.calls, timeout)
        except UsageError as error:
            self.is_refusal_known = True
            raise self.refusal(error) from None

    def settle(self, deadline: float | None) -> UsageError | None:
        """Wait until no server works on the push, and return the error if a server has refused it.

        If servers hold the push for a round, a refused push is withdrawn from all servers, so that no server
        applies only its own part.

        Args:
            deadline: Limit of the wait on the monotonic clock, or None for no limit.

        Raises:
            PsfleetError: The push failed for another reason.
        """
        try:
            replies_of(self.calls, None if deadline is None else _left(deadline))
        except UsageError as error:
            # The wait ended with the first refusal. Wait for all calls, because a withdrawal must not
            # overtake calls still under way.
            for call in self.calls:
                with contextlib.suppress(UsageError):
                    wait_all([call], None if deadline is None else _left(deadline))
            if self.is_held:
                self._pushes.withdraw(self)
            return error
        return None

    def refusal(self, error: UsageError) -> UsageError:
        """Add to a refusal the number of the push, and whether other servers have applied their parts."""
        number = self.requests[0].number  # all requests of a push have its number
        addition = ""
        if sum(self.goes_to) > 1 and not self.is_held:
            addition = ", and servers that had room have taken their parts of it"
        return type(error)(f"push {number} was refused{addition}: {error}")


class PushQueue:
    """The pushes of one worker: at most one that waits, and those under way.

    Args:
        clients: One client per server.
        most: Maximum number of bytes under way at once. A single push may have more.

    Attributes:
        lock: Held while a push is sent. A pull holds it from taking the waiting push until its own calls are
            sent. Otherwise the queue's thread could send the push in between and reorder calls.
        check_process: Raises UsageError in a fork of the worker's process. The fork has none of the threads,
            so a wait there would never end.
    """

    def __init__(self, clients: Sequence[ServerClient], most: int) -> None:
        # Reentrant, because a pull holds it while it calls `take`, and `add` while it calls `send`.
        self.lock = threading.RLock()
        self._most = most
        self._clients = clients
        self.check_process = clients[0].check_process
        self._changed = threading.Condition(self.lock)
        self._waiting: FleetPush | None = None
        self._behind: FleetPull | None = None  # prefetched pull whose reply the waiting push awaits
        self._due = 0.0  # monotonic time at which the waiting push leaves alone
        self._came = False  # True if a push came since the thread last looked
        self._asleep = False  # True while the thread sleeps without a time limit
        self._under_way: deque[FleetPush] = deque()  # oldest first
        self._bytes = 0  # of the pushes under way
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
        """Send a push, now or with the next pull, and return its handle. A waiting push is sent first.

        Args:
            requests: One request per server.
            goes_to: For each server True if the push is sent there.
            linger: If True, the push waits up to LINGER seconds for a pull to share its calls.
            is_held: True if servers keep the push unapplied until its round closes.
            behind: Prefetched pull whose reply must arrive before the LINGER seconds begin, or None.
        """
        ticket = FleetPush(self, requests, goes_to, is_held)
        with self.lock:
            if self._waiting is not None:
                self.send()
            self._waiting, self._behind = ticket, behind
            if linger:
                # The caller may change its gradients as soon as this returns, so a push that is sent later
                # needs copies of them.
                for request in requests:
                    request.own()
                self._expect_company()
            else:
                self.send()
        return ticket

    def take(self) -> FleetPush | None:
        """Return the waiting push to a pull, or None. The caller sends the push and then calls `sent`."""
        with self.lock:
            ticket, self._waiting, self._behind = self._waiting, None, None
            return ticket

    def sent(self, ticket: FleetPush) -> None:
        """Note that the requests of a push are sent, so the push is under way. The caller holds the lock."""
        ticket.calls = [*itertools.compress(ticket.requests, ticket.goes_to)]
        self._under_way.append(ticket)
        self._bytes += ticket.bytes

    def send(self) -> None:
        """Send the waiting push, if there is one, without a pull."""
        with self.lock:
            ticket, self._waiting, self._behind = self._waiting, None, None
            if ticket is not None:
                # Errors of a call come with its reply, so `send` raises only for a message that is too long.
                # Training cannot go on after that: servers refuse later pushes, whose numbers leave a gap.
                for client, request, goes in zip(
                    self._clients, ticket.requests, ticket.goes_to, strict=True
                ):
                    if goes:
                        client.send(request, "Shard/Push")
                self.sent(ticket)

    def settle(self, under_way: int = 0, timeout: float | None = None) -> None:
        """Wait until at most `under_way` pushes are unacknowledged.

        Also waits until another push of the size of the last one fits into the byte limit.

        Args:
            under_way: Number of pushes that may remain under way.
            timeout: Limit of the wait in seconds, or None for no limit.

        Raises:
            UsageError: A server has refused a push. The error is raised once, when all pushes under way have
                ended. Later pushes continue.
            PsfleetError: The oldest push failed. Every later call raises the error again.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        refusals: list[UsageError] = []
        # `_bytes * 2 > _most` decides most calls without the lock: the last push has no more bytes than all
        # pushes together, so up to half of the limit there is space for another push. After a refusal the
        # loop drains the queue, so that a caller who catches the error knows the outcome of every push. A
        # push with another failure stays at the head, and so raises again next time. Only this method removes
        # pushes, in the training thread, so the head may be read without the lock.
        while len(self._under_way) > (0 if refusals else under_way) or (
            self._bytes * 2 > self._most and self._is_full
        ):
            oldest = self._under_way[0]
            # Mostly all replies are here already. Then there is no error to look for and nothing to wait for.
            error = None if all(map(_reply_of, oldest.calls)) else oldest.settle(deadline)
            if error is not None and not oldest.is_refusal_known:
                refusals.append(oldest.refusal(error))
            # The queue's thread adds to both (`sent`).
            with self.lock:
                self._under_way.popleft()
                self._bytes -= oldest.bytes
            # Only now, when no server reads the shared memory of the push any longer. In reverse as in
            # FleetPull.join.
            for request in reversed(oldest.requests):
                request.close()
        if refusals:
            raise joined_refusals(refusals)

    def withdraw(self, push: FleetPush) -> None:
        """Make all servers drop a push that they hold for a round, and wait until they have dropped it."""
        # All, because with rounds every server gets every push (`goes_to` is True for each), to count it.
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
        """Stop the queue's thread. A push that is not sent is dropped. Safe to call twice."""
        with self.lock:
            self._closing = True
            self._waiting = None
            self._changed.notify()
        # Without the lock, which the thread needs to end.
        if self._thread is not None:
            self._thread.join()

    def _expect_company(self) -> None:
        """Begin to wait for a pull to share calls with the added push. The caller holds the lock."""
        self._due = time.monotonic() + LINGER
        # Made by the first push that waits: with rounds and several servers none ever does.
        if self._thread is None:
            self._thread = ServiceThread(self._run, "pushes")
            self._thread.start()
        self._came = True
        if self._asleep:
            self._changed.notify()

    def _run(self) -> None:
        """Send each push that no pull has taken in time."""
        with self._changed:
            while not self._closing:
                if self._waiting is None:
                    # To avoid waking the thread for each push, it polls every LINGER seconds while pushes
                    # come, and sleeps once a whole period brought none. The next poll is early enough for any
                    # push: it comes at most LINGER seconds after `add`, and then waits until `_due`.
                    self._asleep, self._came = not self._came, False
                    self._changed.wait(None if self._asleep else LINGER)
                    self._asleep = False
                elif (remaining_seconds := self._due - time.monotonic()) > 0:
                    self._changed.wait(remaining_seconds)
                elif self._behind is not None:
                    # The wait begins with the pull's reply, and is repeated until the reply arrives: the
                    # thread that reads the reply does not know this queue.
                    if not self._behind.is_under_way:
                        self._behind = None
                    self._due = time.monotonic() + LINGER
                else:
                    self.send()


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
