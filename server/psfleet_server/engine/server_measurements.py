"""Counters that a server keeps for metrics, and its knowledge of workers: reports, NaNs, joins and leaves.

Nothing here makes a decision. `ShardHost` and the services increment the counters,
`psfleet_server.server_metrics` reads them on request, and the launcher shows the lines that
`WorkerReports.tell` and `log_view` write.
"""

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

_WATCHED = 60.0  # seconds after a reader's request during which workers send their metrics
_LONGEST = 256 << 10  # most bytes of one worker's metrics; longer texts are dropped
_LONGEST_SENTENCE = 500  # characters
_SILENT = 5.0  # seconds to wait for the heartbeats of all workers after a first NaN


@dataclass(frozen=True)
class ShownLatency:
    """Latency histogram of one kind of call, with the help text and labels of its metric.

    Attributes:
        by_mode: True if the metric has the consistency mode as a label.
    """

    times: LatencyHistogram
    help: str
    by_mode: bool


class CallLatencies:
    """Histograms of the times from the arrival of a call to its reply.

    `psfleet_server.services.method_handlers` declares which methods have one.

    Attributes:
        shown: Maps NAME to the histogram that is shown as the metric psfleet_NAME_seconds.
        push: Latencies of pushes, alone or combined with a pull.
        waited: Latencies of pulls that waited for other workers.
    """

    def __init__(self) -> None:
        self.shown: dict[str, ShownLatency] = {}
        self.push = self.of(
            "push", "Time to take a push; in an exchange, until the pull behind it may begin"
        )
        self.waited = self.of("waited", "Time of pulls that waited", by_mode=True)

    def of(self, name: str, help: str, *, by_mode: bool = False) -> LatencyHistogram:
        """Return the histogram with this name. The first call creates it and adds it to the metrics."""
        new = ShownLatency(LatencyHistogram(name=name), help, by_mode)
        return self.shown.setdefault(name, new).times


@dataclass
class CallBytes:
    """Traffic of pushes and pulls at this server, in bytes, through messages and shared memory.

    Attributes:
        push: Bytes received in pushes, and of gradients in shared memory.
        pull: Bytes received in pulls.
        exchange: Bytes received in calls that combine a push and a pull.
        values: Bytes of parameter values sent in replies.
        saved: Bytes that 16-bit and 8-bit formats have saved compared with float32.
        plain: Number (not bytes) of calls that took the fast path `PlainCalls`.
    """

    push: int = 0
    pull: int = 0
    exchange: int = 0
    values: int = 0
    saved: int = 0
    plain: int = 0

    @property
    def received(self) -> int:
        """Total bytes received in pushes, pulls and exchanges."""
        return self.push + self.pull + self.exchange


class WorkerReports:
    """Metrics and NaN reports from workers' heartbeats. Thread-safe.

    Attributes:
        nonfinite: Finds the worker that had the first NaN or infinity.
        tell: Writes a line that the launcher shows.
    """

    def __init__(self) -> None:
        self.nonfinite = FirstNonFinite()
        self.tell: Callable[[str], None] = _log.warning
        self._lock = threading.Lock()
        self._until = 0.0
        self._texts: dict[int, tuple[float, bytes]] = {}

    def look(self) -> dict[int, tuple[float, bytes]]:
        """Return the time and the text of each worker's last metrics, by worker.

        A call also makes workers send their metrics with their heartbeats for the next minute.
        """
        with self._lock:
            self._until = time.monotonic() + _WATCHED
            return dict(self._texts)

    def take(self, worker: int, text: bytes) -> bool:
        """Keep the metrics that came with a worker's heartbeat, if there are any.

        Returns:
            True if the worker should send its metrics with the next heartbeat.
        """
        with self._lock:
            if text and len(text) <= _LONGEST:
                self._texts[worker] = time.time(), text
            return time.monotonic() < self._until


class FirstNonFinite:
    """Finds the worker that had the first value that was not finite.

    A NaN in the weights reaches every worker within a step, and each worker reports its own first NaN with
    its next heartbeat. So the earliest report is shown only once all workers have sent a heartbeat since the
    first report, or after five seconds.
    """

    def __init__(self) -> None:
        self._earliest: tuple[float, str] | None = None
        self._since = 0.0
        self._is_told = False

    @property
    def is_pending(self) -> bool:
        """True if a worker has reported a NaN or infinity, and the earliest report is not shown yet."""
        return self._earliest is not None and not self._is_told

    def take(self, sentence: str, at: float, now: float, oldest: float) -> str:
        """Note a heartbeat of a worker. Returns the sentence of the earliest report once, otherwise "".

        Args:
            sentence: Description of the worker's first value that was not finite, or empty if all were
                finite.
            at: Time of that value by the clock of the worker's machine. The order of the heartbeats does not
                show which value came first, because a heartbeat may be late.
            now: Present time by this process's monotonic clock.
            oldest: Time of the last heartbeat of the worker that has been silent for longest, by the clock of
                `now`.
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
    """Log which workers join or end with this view (numbered membership).

    `before` maps each worker to its incarnation (the number of its process) until now.
    """
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
    """Return the figures of a table for status displays."""
    count = table.count if isinstance(table, DenseTable) else len(table)
    return shard_pb2.TableStatus(
        name=table.spec.name,
        kind=table.spec.kind,
        count=count,
        bytes=table.bytes,
        step=table.step,
        device_bytes=table.device_bytes,
    )
