"""Pushes on their way: in order, a few at a time, each in company of the next pull where it can be.

A call costs as much CPU as half a megabyte of tensors. In every mode but sync a push therefore waits
a moment for the pull that mostly follows it, and travels in the same call. If none comes it leaves
alone. Behind a pull that is read ahead it waits for the answer too: it could not leave before that,
and whoever has read ahead will do so again.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence

from psfleet.platform.interrupts import deferred
from psfleet.platform.service_thread import ServiceThread
from psfleet_worker.connection.call import Call, wait_all
from psfleet_worker.connection.request import ServerRequest
from psfleet_worker.connection.server_client import ServerClient
from psfleet_worker.stream.pulls import FleetPull

__all__ = ["FleetPush", "PushQueue"]

LINGER = 0.005
"""Seconds that a push which could leave waits for company, at most."""


class FleetPush:
    """A push under way or about to leave: a parcel for each server, and whether it goes there."""

    def __init__(
        self, pushes: "PushQueue", parcels: Sequence[ServerRequest], goes_to: Sequence[bool]
    ) -> None:
        self.parcels = parcels
        self.goes_to = goes_to
        self.bytes = sum(parcel.bytes for parcel in parcels)
        self.calls: list[Call] = []
        self._pushes = pushes

    @deferred()
    def wait(self, timeout: float | None = None) -> None:
        """See Ticket.wait."""
        self._pushes.send()
        wait_all(self.calls, timeout)


class PushQueue:
    """The pushes of one worker.

    Args:
        clients: The servers.
        most: Bytes under way at most, unless there is only one push.

    Attributes:
        lock: Held while a push is put on its way; pulls take it to keep the order.
    """

    def __init__(self, clients: Sequence[ServerClient], most: int) -> None:
        self.lock = threading.RLock()
        self._most = most
        self._clients = clients
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
        parcels: Sequence[ServerRequest],
        goes_to: Sequence[bool],
        *,
        linger: bool,
        behind: FleetPull | None = None,
    ) -> FleetPush:
        """Send a push after those before it.

        Args:
            parcels: One for each server.
            goes_to: Whether it is sent there.
            linger: It waits a moment for company.
            behind: The moment begins with the answers of this pull.
        """
        ticket = FleetPush(self, parcels, goes_to)
        with self.lock:
            self.send()
            self._waiting, self._behind = ticket, behind
            if linger:
                for parcel in parcels:
                    parcel.own()
                self._expect_company()
            else:
                self.send()
        return ticket

    def take(self) -> FleetPush | None:
        """The push that waits for company, if one does; the caller sends it and says so (`sent`)."""
        with self.lock:
            ticket, self._waiting, self._behind = self._waiting, None, None
            return ticket

    def sent(self, ticket: FleetPush, calls: Sequence[Call]) -> None:
        """The push is in these calls. The caller holds the lock."""
        ticket.calls = list(calls)
        self._under_way.append(ticket)
        self._bytes += ticket.bytes

    def send(self) -> None:
        """Let the push that waits leave alone."""
        with self.lock:
            ticket = self.take()
            if ticket is not None:
                self.sent(
                    ticket,
                    [
                        client.start(
                            "Shard/Push", parcel.request(), cargo=parcel, small=parcel.is_small
                        )
                        for client, parcel, sent in zip(
                            self._clients, ticket.parcels, ticket.goes_to, strict=True
                        )
                        if sent
                    ],
                )

    def settle(self, under_way: int = 0, timeout: float | None = None) -> None:
        """Wait until at most so many of those that have left are not acknowledged.

        And until one more, as large as the last one, keeps within the bytes that may be under way.

        Raises:
            PsfleetError: What the oldest one failed with; from now on every time.
            UsageError: In a fork of the worker's process nothing that is under way ever ends.
        """
        self._clients[0].check_process()
        deadline = None if timeout is None else time.monotonic() + timeout
        while len(self._under_way) > under_way or self._is_full:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            oldest = self._under_way[0]
            wait_all(oldest.calls, left)
            with self.lock:
                self._under_way.popleft()
                self._bytes -= oldest.bytes
            for parcel in oldest.parcels:
                parcel.close()

    @property
    def _is_full(self) -> bool:
        if self._bytes * 2 <= self._most:  # the last one has no more than all of them
            return False
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
                elif (left := self._due - time.monotonic()) > 0:
                    self._changed.wait(left)
                elif self._behind is not None:
                    if not self._behind.is_under_way:
                        self._behind = None
                    self._due = time.monotonic() + LINGER
                else:
                    self.send()
