"""Measurements and joins and leaves of workers, which a server collects and logs for displays."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from psfleet.core.base.logs import log_of
from psfleet.core.base.observability.exposition import LatencyHistogram
from psfleet.core.engine.shard.membership_view import InstallView
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.net.v1 import shard_pb2

_log = log_of(__name__)

_WATCHED = 60.0  # seconds after a look during which workers send their metrics
_LONGEST = 256 << 10  # bytes of one worker's metrics; longer ones are dropped
_LONGEST_SENTENCE = 500  # characters
_SILENT = 5.0  # seconds after which a worker that is not heard is not waited for


@dataclass(frozen=True)
class ShownLatency:
    """Times as metrics show them.

    Attributes:
        help: Help text of the metrics.
        by_mode: With the consistency mode as their label.
    """

    times: LatencyHistogram
    help: str
    by_mode: bool


class CallLatencies:
    """Times from the arrival of a call; psfleet_server.services.method_handlers declares those of a method.

    Attributes:
        shown: By name NAME what metrics call psfleet_NAME_seconds.
        push: Latencies of pushes, alone or combined with a pull.
        waited: Latencies of pulls that waited.
    """

    def __init__(self) -> None:
        self.shown: dict[str, ShownLatency] = {}
        self.push = self.of(
            "push", "Time to take a push; in an exchange, until the pull behind it may begin"
        )
        self.waited = self.of("waited", "Time of pulls that waited", by_mode=True)

    def of(self, name: str, help: str, *, by_mode: bool = False) -> LatencyHistogram:
        """The times of this name, which metrics show from now on."""
        new = ShownLatency(LatencyHistogram(name=name), help, by_mode)
        return self.shown.setdefault(name, new).times


@dataclass
class CallBytes:
    """Bytes of the calls of the training, in messages and in shared memory.

    Attributes:
        push, pull, exchange: That came with each kind of call.
        values: That were sent.
        saved: By which the values would have been longer in float32.
        plain: Number of calls that PlainCalls has taken.
    """

    push: int = 0
    pull: int = 0
    exchange: int = 0
    values: int = 0
    saved: int = 0
    plain: int = 0

    @property
    def received(self) -> int:
        """All that came."""
        return self.push + self.pull + self.exchange


class WorkerReports:
    """Workers' reports of themselves that came with heartbeats. Thread-safe.

    Attributes:
        nonfinite: Finds the first value that was not finite.
        tell: Takes a line for people, which the launcher shows.
    """

    def __init__(self) -> None:
        self.nonfinite = FirstNonFinite()
        self.tell: Callable[[str], None] = _log.warning
        self._lock = threading.Lock()
        self._until = 0.0
        self._texts: dict[int, tuple[float, bytes]] = {}

    def look(self) -> dict[int, tuple[float, bytes]]:
        """Return, by seat, when a worker's last metrics came, and their text.

        Workers send more for a minute.
        """
        with self._lock:
            self._until = time.monotonic() + _WATCHED
            return dict(self._texts)

    def take(self, worker: int, text: bytes) -> bool:
        """A worker has sent this, or nothing; whether it is to send its metrics next time."""
        with self._lock:
            if text and len(text) <= _LONGEST:
                self._texts[worker] = time.time(), text
            return time.monotonic() < self._until


class FirstNonFinite:
    """Finds the worker that had the first value that was not finite.

    From the weights a NaN reaches every worker within a step, and each tells of its own first one with its
    next heartbeat. So the earliest is named once all workers have been heard since, or after some seconds.
    """

    def __init__(self) -> None:
        self._earliest: tuple[float, str] | None = None
        self._since = 0.0
        self._is_told = False

    @property
    def is_pending(self) -> bool:
        """True if a value was not finite and the worker that had the first one is not named yet."""
        return self._earliest is not None and not self._is_told

    def take(self, sentence: str, at: float, now: float, oldest: float) -> str:
        """A worker has sent a heartbeat; what is to be told now, once.

        Args:
            sentence: Description of the worker's first value that was not finite; empty: all were.
            at: Time of that, by the clock of the worker's machine: a heartbeat may be late.
            now: Time by this process's monotonic clock.
            oldest: Likewise, when the worker was heard that has been silent for longest.
        """
        if sentence:
            self._since = now if self._earliest is None else self._since
            reported = at, sentence[:_LONGEST_SENTENCE]
            self._earliest = min(self._earliest or reported, reported)
        if self._earliest is None or self._is_told:
            return ""
        self._is_told = oldest >= self._since or now - self._since >= _SILENT
        return self._earliest[1] if self._is_told else ""


def log_view(before: Mapping[int, int], event: InstallView) -> None:
    """Log who has joined or lost a seat with this view; `before`: by seat its incarnation until now."""
    now = {
        worker: seat.incarnation.incarnation
        for worker, seat in event.seats.items()
        if seat.incarnation is not None and seat.incarnation.incarnation
    }
    for worker in sorted(before.keys() | now.keys()):
        old, new = before.get(worker, 0), now.get(worker, 0)
        if old == new:
            continue
        fields = {
            "worker": worker,
            "incarnation": new or old,
            "view": event.view,
            "round": event.closed,
        }
        end = f"incarnation {old} of worker {worker} has ended and is fenced"
        start = f"worker {worker} has joined as incarnation {new}"
        text = "; ".join([*([end] if old else []), *([start] if new else [])])
        _log.info(text, extra=fields)


def table_status(table: Any) -> shard_pb2.TableStatus:
    """Counts of a table for displays."""
    count = table.count if isinstance(table, DenseTable) else len(table)
    return shard_pb2.TableStatus(
        name=table.spec.name,
        kind=table.spec.kind,
        count=count,
        bytes=table.bytes,
        step=table.step,
        device_bytes=table.device_bytes,
    )
