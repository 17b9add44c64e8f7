"""Metrics of a server or standby in Prometheus' format. On server 0 also those of the workers.

A request collects the metrics from the counters of the server's parts, so without requests they cost nothing.
A standby sends its metrics to its primary, and workers send theirs to server 0 with their heartbeats. The
reply has one text per process. `psfleet_server.services.method_handlers` declares which methods have
latencies.
"""

import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import grpc

from psfleet.core.base.errors import LimitExceeded
from psfleet.core.base.memory import resident
from psfleet.core.base.observability.exposition import counter, encode, gauge, histogram, latency
from psfleet.core.engine.schema.table import OWN
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.memory_choice import KINDS
from psfleet.core.engine.tables.row_memory import DiskTraffic
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.net.body import parse
from psfleet.core.net.v1.metrics_pb2 import CollectReply, CollectRequest, ProcessMetrics
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.replies import DeferredReply, encoded, parkable
from psfleet_server.snapshots.snapshot_runner import SnapshotRunner
from psfleet_server.snapshots.snapshot_schedule import SnapshotSchedule
from psfleet_server.standby import Standby

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_LARGEST_AGE = 12  # staleness buckets: 0, 1, 2, 4, ..., 2**12
_TRAFFIC: tuple[tuple[str, str, Callable[[SparseTable], int]], ...] = (
    ("pulled_rows", "Rows that were read", lambda table: table.traffic.pulled),
    ("unknown_ids", "Ids without a row that were read", lambda table: table.traffic.unknown),
    ("updated_rows", "Rows that pushes have updated", lambda table: table.traffic.updated),
    ("admitted_rows", "Rows that pushes have added", lambda table: table.admitted),
)
_DISK: tuple[tuple[str, str, Callable[[DiskTraffic], float]], ...] = (
    ("disk_rows_used", "Rows of tables on disk that calls needed", lambda rows: rows.used),
    ("disk_rows_found", "Those of them that were in memory", lambda rows: rows.found),
    ("disk_rows_read", "Those of them that were read", lambda rows: rows.read),
    ("disk_rows_written", "Rows that went to the disk", lambda rows: rows.written),
    ("disk_wait_seconds", "Time in which calls waited for rows", lambda rows: rows.seconds),
)


# Maximum number of readers that wait for the last metrics of this server: a launcher, and readers that have
# disconnected since.
_MOST_WAITING = 8


class ServerMetrics:
    """Collects the metrics of a server.

    Args:
        snapshots: Runner of snapshots on server 0, else None.
        schedule: Schedule of snapshots, or None if they are taken on request only.
    """

    def __init__(
        self, host: ShardHost, snapshots: SnapshotRunner | None, schedule: SnapshotSchedule | None
    ) -> None:
        self._host = host
        self._snapshots = snapshots
        self._schedule = schedule

    def collect(self) -> "list[Metric]":
        """Return all metric families. The shard's families are consistent, because its lock is held."""
        with self._host.lock:
            shard = list(_shard(self._host.shard))
        return [*shard, *self._calls(), *process(), *self._durability(), *self._fleet()]

    def _calls(self) -> "Iterator[Metric]":
        host = self._host
        mode = host.shard.mode or "none"
        for name, shown in list(host.latencies.shown.items()):
            labels = {"mode": mode} if shown.by_mode else {}
            yield latency(f"{name}_seconds", shown.help, shown.times, **labels)
        yield gauge("waiting_calls", "Calls that wait for other workers", host.waiting_calls)
        yield gauge("waiting_calls_limit", "Calls that may wait at once", host.limits.waiting_calls)
        sizes = host.bytes
        yield counter("received_bytes", "Bytes of calls of the training that came", sizes.received)
        yield counter("push_bytes", "Bytes of pushes, and of gradients in memory", sizes.push)
        yield counter("pull_bytes", "Bytes of pulls, which name ids", sizes.pull)
        yield counter("exchange_bytes", "Bytes of pushes with a pull behind them", sizes.exchange)
        yield counter("sent_bytes", "Bytes of values that were sent", sizes.values)
        yield counter("saved_bytes", "By which values would be longer in float32", sizes.saved)

    def _durability(self) -> "Iterator[Metric]":
        yield from log(self._host)
        if self._host.feed.enabled:
            feed = self._host.feed
            yield gauge("standby_attached", "Whether a standby follows", float(feed.attached))
            yield gauge("standby_ready", "Whether a standby could take over", float(feed.required))
            yield gauge("standby_lag_records", "Records the standby lacks", feed.lag)
            yield gauge("standby_queued_bytes", "Bytes that wait for the standby", feed.queued)
            yield counter("standby_bytes", "Bytes of records for the standby", feed.shipped)

    def _fleet(self) -> "Iterator[Metric]":
        coordinator = self._host.coordinator
        if coordinator is None:
            return
        torn = len(coordinator.dispatch.torn)
        yield counter("torn_steps", "Steps that only some of the servers have", torn)
        with self._host.lock:
            samples = coordinator.dispatch.samples_left(self._host.shard.rounds.closed)
        if samples:  # 0 if there is no dataset, or one without an end
            yield gauge("samples_left", "Samples of fleet.dataset that nobody has had yet", samples)
        if self._snapshots is not None and self._snapshots.latest is not None:
            at, size = self._snapshots.latest
            yield gauge("snapshot_timestamp_seconds", "When the last snapshot was complete", at)
            yield gauge("snapshot_bytes", "Size of the last snapshot", size)
        if self._schedule is not None and self._schedule.seconds:
            yield gauge("snapshot_interval_seconds", "--snapshot-every", self._schedule.seconds)
            seconds = self._schedule.waited
            yield gauge("snapshot_wait_seconds", "Since a snapshot held all pushes", seconds)


def process() -> "Iterator[Metric]":
    """Yield the metrics that every kind of process has."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    yield counter("cpu_seconds", "CPU time of the process", usage.ru_utime + usage.ru_stime)
    yield gauge("resident_bytes", "Memory of the process", resident())


def log(host: ShardHost) -> "Iterator[Metric]":
    """Yield the metrics of a process's log, if it has one."""
    if host.journal is not None:
        log = host.journal.log
        yield counter("log_bytes", "Bytes written to the log", log.end)
        yield gauge("log_unsynced_bytes", "Bytes of the log not on the disk yet", log.unsynced)
        yield latency("log_sync_seconds", "Time for the disk to keep the log", log.syncs)


def _shard(shard: Shard) -> "Iterator[Metric]":
    counters, mode = shard.counters, shard.mode or "none"
    yield gauge("mode_info", "1 for the consistency mode of the fleet", {mode: 1}, "mode")
    yield gauge(
        "progress_steps", "Closed rounds, or pushes of the fastest worker", shard.progress()
    )
    yield counter("pushes", "Pushes that were applied or held", counters.pushes)
    yield counter("duplicate_pushes", "Pushes that came again and were ignored", counters.repeats)
    yield counter("samples", "Samples behind the pushes", sum(counters.samples.values()))
    yield _staleness(shard.staleness.counts, mode)
    leading_steps = shard.consistency.gate.leading_steps
    yield gauge(
        "ssp_lead_steps", "How far a worker was ahead of the slowest at most", leading_steps
    )
    yield from _tables(shard)


def _tables(shard: Shard) -> "Iterator[Metric]":
    all_tables = [*shard.tables.values()]
    tables = {table.spec.name: table for table in all_tables if not table.spec.name.startswith(OWN)}
    sparse = {name: table for name, table in tables.items() if isinstance(table, SparseTable)}
    on_device = {n: t.device_bytes for n, t in tables.items() if not KINDS[t.device].is_host}
    on_host = sum(table.bytes - table.device_bytes for table in all_tables)
    on_host -= sum(table.paging.disk_bytes for table in sparse.values() if table.paging)
    host_bytes = on_host + shard.tables.budget.held
    yield gauge("table_rows", "Rows of a sparse table", {n: len(t) for n, t in sparse.items()})
    yield gauge("table_bytes", "Memory of a table", {n: t.bytes for n, t in tables.items()})
    yield counter("table_updates", "Updates of a table", {n: t.step for n, t in tables.items()})
    for name, help, count in _TRAFFIC:
        yield counter(name, help, {n: count(t) for n, t in sparse.items()})
    if paging := {n: t.paging for n, t in sparse.items() if t.paging is not None}:
        for name, help, value in _DISK:
            yield counter(name, help, {n: value(t) for n, t in paging.items()})
    yield counter(
        "dropped_rows",
        "Rows that were evicted, shrunk or removed",
        {n: t.dropped for n, t in sparse.items()},
    )
    yield gauge(
        "candidate_ids",
        "Ids pushed too seldom for a row so far",
        {n: t.waiting for n, t in sparse.items()},
    )
    yield gauge(
        "spilled_rows",
        "Rows of a table on a device that are in host memory, for which the device has no room",
        {n: t.spilled for n, t in sparse.items() if n in on_device},
    )
    yield gauge("table_device_bytes", "Device memory of a table, of its table_bytes", on_device)
    if on_device:
        yield gauge("device_memory_used_bytes", "Device memory of tables", sum(on_device.values()))
    if (limit := shard.tables.device_limit) is not None:
        yield gauge("device_memory_limit_bytes", "Device memory that tables may take", limit)
    yield gauge(
        "memory_used_bytes", "Host memory of tables and of pushes that are held", host_bytes
    )
    yield gauge(
        "held_bytes", "Memory of pushes that wait for their round", shard.tables.budget.held
    )
    if shard.tables.budget.limit is not None:
        yield gauge("memory_limit_bytes", "Memory that tables may take", shard.tables.budget.limit)


def _staleness(counts: Mapping[int, int], mode: str) -> "Metric":
    """Return the staleness of pushes as a histogram.

    Staleness is the number of other workers' pushes that a server applied between a worker's pull and its
    push. Above 256 the shard counts by powers of two.
    """
    edges = [0, *(1 << power for power in range(_LARGEST_AGE + 1))]
    buckets = [
        (str(edge), float(sum(count for age, count in counts.items() if age <= edge)))
        for edge in edges
    ]
    buckets.append(("+Inf", float(sum(counts.values()))))
    total = float(sum(age * count for age, count in counts.items()))
    help = "Pushes of others applied since the weights behind a push were read"
    return histogram("staleness_pushes", help, buckets, total, mode=mode)


def standby_metrics(host: ShardHost, standby: Standby) -> bytes:
    """Return the metrics of a standby (a process that follows a server's log) as text.

    The standby may apply records meanwhile.

    Args:
        host: Host of the shard that the standby's records change.
    """
    size = sum(table.bytes for table in [*host.shard.tables.values()])
    return encode(
        [
            *process(),
            *log(host),
            counter("standby_taken_records", "Records taken, with the copy", standby.records),
            counter("standby_taken_bytes", "Bytes of these records", standby.bytes),
            gauge("standby_table_bytes", "Memory of the tables so far", size),
        ]
    )


class MetricsService:
    """Service Metrics, for the launcher and for readers outside the job.

    A call returns the present metrics. A call with `at_end` waits, and returns the final metrics when the
    server ends.
    """

    def __init__(self, host: ShardHost, metrics: ServerMetrics) -> None:
        self._host = host
        self._metrics = metrics
        self._lock = threading.Lock()
        self._waiting: list[DeferredReply] = []
        self._is_over = False

    @property
    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """gRPC handler of the service."""
        return grpc.method_handlers_generic_handler(
            "psfleet.v1.Metrics", {"Collect": parkable(self._collect)}
        )

    def end(self) -> None:
        """Reply to the calls that wait for the end of this server. The server's metrics are final now."""
        with self._lock:
            self._is_over = True
        for reply in self._waiting:
            reply.complete(self._figures())

    def _collect(self, request: bytes, reply: DeferredReply) -> None:
        waits = parse(CollectRequest, request).at_end
        with self._lock:
            if waits and not self._is_over:
                self._waiting = [waiting for waiting in self._waiting if not waiting.done]
                if len(self._waiting) == _MOST_WAITING:
                    raise LimitExceeded(
                        f"{_MOST_WAITING} readers wait for this server's last metrics; ask for those of now"
                    )
                self._waiting.append(reply)
                self._host.park(reply, "the server did not end in time")
                return
        reply.complete(self._figures())

    def _figures(self) -> bytes:
        rank, now = self._host.shard.index, time.time()
        text = encode(self._metrics.collect())
        processes = [ProcessMetrics(role="server", rank=rank, text=text, at=now)]
        if standby := self._host.feed.look():
            processes.append(ProcessMetrics(role="standby", rank=rank, text=standby))
        reports = {} if self._host.coordinator is None else self._host.worker_reports.look()
        for seat, (at, text) in sorted(reports.items()):
            processes.append(ProcessMetrics(role="worker", rank=seat, text=text, at=at))
        return encoded(CollectReply(processes=processes))
