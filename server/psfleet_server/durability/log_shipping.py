"""Sends a primary's records to its standby, and delays replies until the standby has the records.

States of one attachment (a standby process that follows, identified by a number):

    attach             records are collected and sent, after a copy of the tables
    took(>= copy)      the standby has the whole copy: it is *required*, and replies wait for it
    lose               the stream broke. A required standby stays required, because it may have taken over
    release            the launcher has decided that the standby never takes over: replies no longer wait

While a standby is required, the primary sends no reply before the standby has the records that the reply
depends on (R1 and R10 of the protocol). Only the launcher, which decides takeovers, can end that. Two
conditions share one lock: `_more` wakes the stream that sends, and `_less` wakes threads that wait for the
standby.
"""

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from psfleet.core.base import crash_points
from psfleet.core.base.errors import Fenced, ProtocolError
from psfleet.core.base.logs import log_of
from psfleet.core.net.body import flat
from psfleet.core.net.frame import Part

if TYPE_CHECKING:
    from psfleet.core.base.observability.tracing import Tracing

_log = log_of(__name__)

DEPOSED = 5
"""Exit code of a primary process whose standby has taken over."""

_MOST = 256 << 20  # bytes of unsent records beyond which pushes wait for the standby


@dataclass(frozen=True, slots=True)
class ShippedRecord:
    """Log record on its way to the standby, or a message to the standby if `kind` is 0.

    A message with neither `complete` nor `wants_metrics` notifies the standby that replies wait for it.

    Attributes:
        number: Number of the record. In a message that replies wait, a number that the standby must confirm
            if it still follows, or 0.
        kind: Kind of the record (`RecordKind`), or 0 for a message.
        body: Body of the record.
        complete: In a message: number of a snapshot that is complete, or 0.
        wants_metrics: In a message: True to request the standby's metrics.
    """

    number: int
    kind: int
    body: bytes
    complete: int = 0
    wants_metrics: bool = False


class LogShipping:
    """Queue of records for a server's standby. Any thread may call.

    Attributes:
        end: Number of the last record.
        required: True if replies wait for the standby.
        enabled: True if the job has standbys, so that the server queues its records here.
        shipped: Number of bytes of records queued for standbys so far.
        tracing: Records spans within those of pushes, or None if pushes are not traced.
        metrics: Last metrics of the standby, as text, or empty before the first.
    """

    def __init__(self) -> None:
        self.end = 0
        self.required = False
        self.enabled = False
        self.shipped = 0
        self.metrics = b""
        self.tracing: Tracing | None = None
        self._lock = threading.Lock()
        self._more = threading.Condition(
            self._lock
        )  # there is a record to send, or the stream has ended
        self._less = threading.Condition(
            self._lock
        )  # the standby has taken records, or is not waited for
        self._attach = 0  # attachment that has a stream or is required, or 0 if there is none
        self._connected = False  # the attachment has a stream
        self._floor = 0  # attachments up to this number are released
        self._taken = 0  # last record that the standby has
        self._copied = 0  # number of the copy's last record
        self._waiting: deque[ShippedRecord] = deque()  # not sent yet
        self._bytes = 0  # of `_waiting`
        self._over = False  # the server ends in order
        self._asked = False  # the standby was asked for metrics and has not replied

    @property
    def attached(self) -> bool:
        """True if a standby is attached and records are collected for it."""
        return self._attach != 0

    @property
    def lag(self) -> int:
        """Number of records that the standby does not have yet, or 0 without a standby."""
        return max(self.end - self._taken, 0) if self._attach else 0

    @property
    def queued(self) -> int:
        """Number of bytes of records that are not sent yet."""
        return self._bytes

    def attach(self, number: int) -> int:
        """Begin to collect records for a new standby. Call it while no record can be appended.

        The caller copies the state at the same moment, so that there is no gap between the copy and the
        records.

        Args:
            number: Number that identifies the standby process. The launcher assigns rising numbers.

        Returns:
            Number of the record that ends the copy.

        Raises:
            Fenced: The launcher has decided that this standby never takes over.
            ProtocolError: Another standby follows this server already.
        """
        with self._lock:
            if number <= self._floor:
                raise Fenced(f"attachment {number} is over; those after {self._floor} may follow")
            if self._attach:
                raise ProtocolError(
                    f"standby {self._attach} follows, so standby {number} cannot; release it first"
                )
            self._attach, self._connected = number, True
            self.end += 1
            self._copied = self.end
            return self.end

    def append(self, kind: int, parts: Sequence[Part]) -> None:
        """Queue a record for the standby. Call it before the record takes effect.

        Waits while more than `_MOST` bytes are unsent, so that a slow standby cannot fill the memory.
        """
        if not self._attach:
            return
        crash_points.reach("feed")
        body = joined(parts)
        with self._lock:
            self._less.wait_for(lambda: self._bytes < _MOST or not self._connected)
            # Without a stream the record is dropped, but it still gets its number. A required standby then
            # never confirms that number, so replies wait until the launcher decides about the standby.
            if self._connected:
                self._waiting.append(ShippedRecord(self.end + 1, kind, body))
                self._bytes += len(body)
                self.shipped += len(body)
            self.end += 1
            self._more.notify()
        crash_points.reach("fed")

    def confirm(self) -> int:
        """Make the standby confirm that it still follows. Returns the number to wait for with `settle`.

        A reply that depends on no new record needs this too: if the standby has taken over, this process's
        state is out of date, and the confirmation never comes.
        """
        with self._lock:
            if self.required:
                self.end += 1
                if self._connected:
                    self._waiting.append(ShippedRecord(self.end, 0, b""))
                    self._more.notify()
            return self.end

    def complete(self, snapshot: int) -> None:
        """Notify the standby that a snapshot is complete. Its log may then drop the records before it."""
        with self._lock:
            if self._connected:
                self._waiting.append(ShippedRecord(0, 0, b"", snapshot))
                self._more.notify()

    def look(self) -> bytes:
        """Return the standby's last metrics as text, and request newer ones for the next call."""
        with self._lock:
            if self._connected and not self._asked:
                self._asked = True
                self._waiting.append(ShippedRecord(0, 0, b"", wants_metrics=True))
                self._more.notify()
            return self.metrics

    def told(self, attach: int, metrics: bytes) -> None:
        """Keep the metrics that standby number `attach` has sent."""
        with self._lock:
            if self._follows(attach):
                self.metrics, self._asked = metrics, False

    def records(self, attach: int) -> Iterator[ShippedRecord]:
        """Yield the records for standby number `attach` as they arrive.

        Ends when the connection to that standby is lost or the server ends.
        """
        while True:
            with self._lock:
                self._more.wait_for(
                    lambda: self._waiting or self._over or not self._follows(attach)
                )
                if not self._follows(attach) or not self._waiting:
                    return
                record = self._waiting.popleft()
                self._bytes -= len(record.body)
                # Pushes wait only at the limit, so it is enough to wake them when the size falls below the
                # limit.
                if self._bytes < _MOST <= self._bytes + len(record.body):
                    self._less.notify_all()
            yield record

    def took(self, attach: int, number: int) -> None:
        """Note that standby number `attach` has all records up to `number`.

        Once the standby has the whole copy of the tables, replies wait for it.
        """
        with self._lock:
            if not self._follows(attach):
                return
            self._taken = max(self._taken, number)
            # The standby is required from here on, even before it is notified. Once it is notified it may be
            # promoted, and it must then have the records of every reply sent since.
            if not self.required and number >= self._copied and not self._over:
                self.required = True
                self._waiting.append(ShippedRecord(0, 0, b""))
                self._more.notify()
            self._less.notify_all()

    def lose(self, attach: int) -> None:
        """Note that the connection to standby number `attach` is broken.

        If replies wait for this standby, they continue to wait, because it may have taken over.
        """
        with self._lock:
            if not self._follows(attach):
                return
            self._disconnect()
            if not self.required:
                self._attach = 0
            self._more.notify()
            self._less.notify_all()

    def release(self, attach: int) -> None:
        """Stop waiting for standbys up to number `attach`.

        The launcher has decided that these standbys never take over.
        """
        with self._lock:
            self._floor = max(self._floor, attach)
            if self._attach and self._attach <= self._floor:
                self._attach, self.required = 0, False
                self._disconnect()
            self._more.notify()
            self._less.notify_all()

    def renew(self) -> None:
        """Stop waiting for the present standby, whose state is out of date. A later standby may follow."""
        self.release(self._attach)

    def depose(self, term: int) -> None:
        """End this process at once, because its standby has taken over (in takeover number `term`)."""
        _log.warning(f"deposed: its standby has taken over with term {term}")
        os._exit(DEPOSED)

    def is_settled(self, end: int) -> bool:
        """Return whether `settle` would return at once."""
        return not self.required or self._taken >= end

    def settle(self, end: int, seconds: float | None = None) -> bool:
        """Wait until replies that depend on the records up to `end` may be sent.

        Args:
            end: Number of the last record that the reply depends on.
            seconds: Limit of the wait, or None for no limit.

        Returns:
            False if the standby did not have the records within `seconds`.
        """
        if self.is_settled(end):
            return True
        span = None if self.tracing is None else self.tracing.child("standby")
        try:
            crash_points.reach("waiting")
            with self._lock:
                settled = self._less.wait_for(lambda: self.is_settled(end), seconds)
            crash_points.reach("followed")
        finally:
            if span is not None:
                span.end()
        return settled

    def close(self) -> None:
        """Make the standby end too.

        Call it when this server shuts down and no process continues from the server's state.
        """
        with self._lock:
            self._over, self.required = True, False
            self._more.notify()
            self._less.notify_all()

    def _disconnect(self) -> None:
        self._connected = self._asked = False
        self._waiting.clear()
        self._bytes = 0
        self.metrics = b""

    def _follows(self, attach: int) -> bool:
        return self._connected and self._attach == attach


def joined(parts: Sequence[Part]) -> bytes:
    """Return the buffers of a record's body as one bytes object."""
    return b"".join(map(flat, parts))
