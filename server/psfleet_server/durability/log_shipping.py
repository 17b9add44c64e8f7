"""The records of a primary on their way to its standby.

A standby that has all of what the primary held when it attached is required from then on (R1, R10 of
the protocol): the primary answers no call before the standby has taken what the answer rests on. It
stays required when its connection is lost, for it may have taken over; only whoever decides about
takeovers can release the primary from it.
"""

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from psfleet.core.base import faults
from psfleet.core.base.errors import Fenced, ProtocolError
from psfleet.core.base.logs import log_of
from psfleet.core.net.body import flat
from psfleet.core.net.frame import Part

if TYPE_CHECKING:
    from psfleet.core.base.observability.spans import Tracing

_log = log_of(__name__)

DEPOSED = 5
"""Exit code of a primary whose standby has taken over."""

_MOST = 256 << 20  # bytes of records that may wait for the standby before pushes wait for it


@dataclass(frozen=True, slots=True)
class ShippedRecord:
    """A record for the standby, or with kind 0 a message.

    The message says that snapshot `complete` is complete, or asks for the standby's metrics. If it does
    neither, the standby is required from now on, and with a number it is to confirm that it still follows.
    """

    number: int
    kind: int
    body: bytes
    complete: int = 0
    wants_metrics: bool = False


class LogShipping:
    """Records on their way to a standby. Any thread may call.

    Attributes:
        end: Number of the last record.
        required: True if answers wait for the standby.
        enabled: True if there may be standbys, so that records come here and answers wait here.
        shipped: Bytes of records for standbys so far.
        tracing: Makes spans within those of pushes, or None if pushes are not traced.
        metrics: Metrics of the standby in its last reply, as text, or empty if none came yet.
    """

    def __init__(self) -> None:
        self.end = 0
        self.required = False
        self.enabled = False
        self.shipped = 0
        self.metrics = b""
        self.tracing: Tracing | None = None
        self._lock = threading.Lock()
        self._more = threading.Condition(self._lock)  # records, or no stream to send them on
        self._less = threading.Condition(self._lock)  # answers may go on
        self._attach = 0  # of the standby that has a stream or is required; 0: there is none
        self._connected = False
        self._floor = 0
        self._taken = 0
        self._copied = 0  # number of the last record of the copy
        self._waiting: deque[ShippedRecord] = deque()
        self._bytes = 0
        self._over = False
        self._asked = False  # for metrics

    @property
    def attached(self) -> bool:
        """Records are collected for a standby."""
        return self._attach != 0

    @property
    def lag(self) -> int:
        """Records that the standby has not taken yet; 0: there is none."""
        return max(self.end - self._taken, 0) if self._attach else 0

    @property
    def queued(self) -> int:
        """Bytes of records that are not on their way to the standby yet."""
        return self._bytes

    def attach(self, number: int) -> int:
        """A standby begins to follow; call with nothing changing. The number of the copy's last record.

        Raises:
            Fenced: The attachment is over.
            ProtocolError: There is a standby already.
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
        """A record is about to take effect."""
        if not self._attach:
            return
        faults.reach("feed")
        body = joined(parts)
        with self._lock:
            self._less.wait_for(lambda: self._bytes < _MOST or not self._connected)
            if self._connected:
                self._waiting.append(ShippedRecord(self.end + 1, kind, body))
                self._bytes += len(body)
                self.shipped += len(body)
            self.end += 1
            self._more.notify()
        faults.reach("fed")

    def confirm(self) -> int:
        """Ask the standby whether it follows still; `settle` with the result waits for its answer.

        It follows no more if it has taken over. What this process says then is out of date.
        """
        with self._lock:
            if self.required:
                self.end += 1
                if self._connected:
                    self._waiting.append(ShippedRecord(self.end, 0, b""))
                    self._more.notify()
            return self.end

    def complete(self, snapshot: int) -> None:
        """A snapshot is complete: the standby's log need not go back behind it."""
        with self._lock:
            if self._connected:
                self._waiting.append(ShippedRecord(0, 0, b"", snapshot))
                self._more.notify()

    def look(self) -> bytes:
        """The newest metrics of the standby as text; asks for newer ones, which the next look finds."""
        with self._lock:
            if self._connected and not self._asked:
                self._asked = True
                self._waiting.append(ShippedRecord(0, 0, b"", wants_metrics=True))
                self._more.notify()
            return self.metrics

    def told(self, attach: int, metrics: bytes) -> None:
        """The standby has given its metrics."""
        with self._lock:
            if self._follows(attach):
                self.metrics, self._asked = metrics, False

    def records(self, attach: int) -> Iterator[ShippedRecord]:
        """The records for this standby as they come; ends when it is lost, or all is over."""
        while True:
            with self._lock:
                self._more.wait_for(
                    lambda: self._waiting or self._over or not self._follows(attach)
                )
                if not self._follows(attach) or not self._waiting:
                    return
                record = self._waiting.popleft()
                self._bytes -= len(record.body)
                if self._bytes < _MOST <= self._bytes + len(record.body):
                    self._less.notify_all()
            yield record

    def took(self, attach: int, number: int) -> None:
        """The standby has taken all records up to this one."""
        with self._lock:
            if not self._follows(attach):
                return
            self._taken = max(self._taken, number)
            if not self.required and number >= self._copied and not self._over:
                self.required = True
                self._waiting.append(ShippedRecord(0, 0, b""))
                self._more.notify()
            self._less.notify_all()

    def lose(self, attach: int) -> None:
        """The stream is broken. A standby that was required remains so."""
        with self._lock:
            if not self._follows(attach):
                return
            self._disconnect()
            if not self.required:
                self._attach = 0
            self._more.notify()
            self._less.notify_all()

    def release(self, attach: int) -> None:
        """Stop waiting for standbys up to this attachment: no such standby will ever take over."""
        with self._lock:
            self._floor = max(self._floor, attach)
            if self._attach and self._attach <= self._floor:
                self._attach, self.required = 0, False
                self._disconnect()
            self._more.notify()
            self._less.notify_all()

    def renew(self) -> None:
        """Let the present standby go, because what it has is out of date. A later one may follow."""
        self.release(self._attach)

    def depose(self, term: int) -> None:
        """The standby has taken over: this process ends before it answers anybody."""
        _log.warning(f"deposed: its standby has taken over with term {term}")
        os._exit(DEPOSED)

    def is_settled(self, end: int) -> bool:
        """Return whether `settle` would return at once."""
        return not self.required or self._taken >= end

    def settle(self, end: int, seconds: float | None = None) -> bool:
        """Wait until calls that rest on the records up to `end` may be answered.

        Returns:
            False if that took longer than `seconds`.
        """
        if self.is_settled(end):
            return True
        span = None if self.tracing is None else self.tracing.child("standby")
        try:
            faults.reach("waiting")
            with self._lock:
                settled = self._less.wait_for(lambda: self.is_settled(end), seconds)
            faults.reach("followed")
        finally:
            if span is not None:
                span.end()
        return settled

    def close(self) -> None:
        """End the standby with its server, which ends in order: no process continues from their state."""
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
    """The body of a record in one piece."""
    return b"".join(map(flat, parts))
