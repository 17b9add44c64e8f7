"""Reads the metrics of all processes of a job, and computes the figures of all panels from them.

A *panel* is one chart, such as "Steps per second", with a query on the metrics. A *look* is one reading of
all metrics. A *frame* has the values of all panels at one look.

The `Recorder` makes a look and a frame every 2 s, in its own thread. The frames are used by the history,
the progress line, TensorBoard and the page. A server that does not answer within 2 s is missing in the
look.
"""

import contextlib
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from psfleet.core.base.observability.exposition import PREFIX, decode, merge
from psfleet.core.base.panels.panel import READ_AT, Level, Look, Ratio
from psfleet.core.base.panels.process_panels import PANELS
from psfleet.core.base.scaling_files import write_scale
from psfleet.core.base.settings.environment import Environment
from psfleet_launch.job.job_plan import Job
from psfleet_launch.observability.job_timeline import Timeline
from psfleet_launch.supervision.scaling_requests import EVERY, ServerUsage, wanted

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_REPLY_TIMEOUT = 2.0  # seconds for the reply of a server; a silent server is left out
_LONGEST = 86_400.0  # seconds after which the call for the final metrics is repeated
_LAST_TIMEOUT = 1.0  # seconds for the final metrics of servers that have ended
_EVERY = 2.0  # seconds between two looks
_KEPT = 60  # number of measurements that are stored
_PAUSE = 60.0  # seconds until the next request, so that the effect of the last one can be seen


def process_metrics(timeline: Timeline) -> "list[Metric]":
    """Return the launcher's own metrics of a job's processes: running, deaths, restarts, hangs and
    takeovers."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

    labels = ["role", "rank"]
    alive = Counter(map(timeline.who, timeline.alive))
    up = GaugeMetricFamily(f"{PREFIX}process_up", "Processes that run", labels=labels)
    for process in timeline.known:
        up.add_metric(list(process), alive[process])
    metrics: list[Metric] = [up]
    for name, help, counts in (
        ("deaths", "Processes that ended with an error or by a signal", timeline.deaths),
        ("restarts", "Processes that were started again", timeline.restarts),
        ("hung", "Times that a server was silent for too long", timeline.silences),
    ):
        family = CounterMetricFamily(PREFIX + name, help, labels=labels)
        for process in timeline.known:
            family.add_metric(list(process), counts[process])
        metrics.append(family)
    took = SummaryMetricFamily(
        f"{PREFIX}takeover_seconds",
        "Time from the death of a server until its standby answered",
        labels=labels,
    )
    for role, rank in timeline.known:
        if role == "server":
            count, seconds = timeline.takeovers.get(rank, (0, 0.0))
            took.add_metric([role, rank], count, seconds)
    return [*metrics, took]


class FleetReader:
    """Reads the metrics of a job from its servers. Any thread may read.

    The last steps of training happen after the last regular look. So each server also gets a call that it
    answers when it ends, with its final metrics (`read_last`).

    Args:
        endpoints: Endpoints of the servers. The job runner changes this list when servers start.
        environment: Environment with the launcher's credentials.
        timeline: Function that returns the state of the job.
    """

    def __init__(
        self,
        job: str,
        endpoints: Sequence[str],
        environment: Environment,
        timeline: Callable[[], Timeline] = Timeline,
    ) -> None:
        self._job = job
        self._endpoints = endpoints
        self._environment = environment
        self._timeline = timeline
        self._lock = threading.Lock()
        self._channels: dict[str, Any] = {}
        self._ends: dict[str, Any] = {}  # call for the final metrics of a server, by endpoint
        self._lasts: dict[str, bytes] = {}  # reply to this call, by endpoint

    def read(self) -> "list[Metric]":
        """Return the present metrics of all processes. Each sample has the labels job, role and rank."""
        return self._families(self._of_processes())

    def read_last(self) -> "list[Metric]":
        """Return the metrics as they were when the servers ended. Every server must have ended."""
        return self._families(self._of_ends())

    def _families(self, of_processes: "Iterable[Metric]") -> "list[Metric]":
        launcher_metrics = process_metrics(self._timeline())
        for family in launcher_metrics:
            family.samples = [
                sample._replace(labels={"job": self._job, **sample.labels})
                for sample in family.samples
            ]
        return merge([*launcher_metrics, *of_processes])

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()
            self._ends.clear()

    def _of_processes(self) -> "Iterator[Metric]":
        with self._lock:
            import grpc  # imported here, because only watched jobs need it

            from psfleet.core.net.connections.access import Access
            from psfleet.core.net.connections.channel import open_channel
            from psfleet.core.net.v1.metrics_pb2 import CollectRequest

            access = Access.of(self._environment)
            request = CollectRequest().SerializeToString()
            calls = []
            for endpoint in self._endpoints:
                if endpoint.endswith(":0"):  # it has not reported its endpoint yet
                    continue
                if endpoint not in self._channels:
                    self._channels[endpoint] = open_channel(endpoint, access)
                method = self._channels[endpoint].unary_unary("/psfleet.v1.Metrics/Collect")
                calls.append(
                    method.future(request, timeout=_REPLY_TIMEOUT, metadata=access.metadata)
                )
                if endpoint not in self._ends or self._take_last(endpoint):
                    self._ends[endpoint] = method.future(
                        CollectRequest(at_end=True).SerializeToString(),
                        timeout=_LONGEST,
                        metadata=access.metadata,
                    )
        for call in calls:
            with contextlib.suppress(grpc.RpcError):
                yield from self._decoded(call.result())

    def _of_ends(self) -> "Iterator[Metric]":
        deadline = time.monotonic() + _LAST_TIMEOUT
        with self._lock:
            for endpoint in self._endpoints:
                if endpoint in self._ends:
                    self._take_last(endpoint, max(deadline - time.monotonic(), 0.0))
            lasts = [self._lasts[server] for server in self._endpoints if server in self._lasts]
        for last in lasts:
            yield from self._decoded(last)

    def _take_last(self, endpoint: str, timeout: float = 0.0) -> bool:
        """Store the reply that a server gives at its end. Return whether the call is over."""
        import grpc

        try:
            self._lasts[endpoint] = self._ends[endpoint].result(timeout)
        except grpc.FutureTimeoutError:
            return False
        except (grpc.RpcError, grpc.FutureCancelledError):
            pass  # the server was killed, or another process is at its endpoint
        return True

    def _decoded(self, reply: bytes) -> "Iterator[Metric]":
        from prometheus_client.core import GaugeMetricFamily

        from psfleet.core.net.v1.metrics_pb2 import CollectReply

        read_at = GaugeMetricFamily(
            READ_AT, "When a server had these figures", labels=["job", "role", "rank"]
        )
        for process in CollectReply.FromString(reply).processes:
            rank = str(process.rank)
            yield from decode(process.text, job=self._job, role=process.role, rank=rank)
            if process.at:
                read_at.add_metric([self._job, process.role, rank], process.at)
        yield read_at


def look_at(families: "Sequence[Metric]") -> Look:
    """Return a look with these metrics, in the form that panels query."""
    look = Look(time.time())
    for family in families:
        for sample in family.samples:
            look.samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    for labels, at in look.samples.get(READ_AT, ()):
        look.times[labels["role"], labels["rank"]] = at
    return look


class Recorder:
    """Thread that reads the metrics of a job every 2 s, and computes a frame: the values of all panels.

    Args:
        listeners: Functions to call with each frame, in the thread.
        every: Seconds between two frames.
        read_last: Function that reads the final metrics after the end of the job, or None for no final frame.
        on_look: Function to call with each look (the metrics of one reading), in the thread.
    """

    def __init__(
        self,
        read: "Callable[[], list[Metric]]",
        listeners: Sequence[Callable[[dict[str, Any]], None]] = (),
        every: float = _EVERY,
        read_last: "Callable[[], list[Metric]] | None" = None,
        on_look: Callable[[Look], None] = lambda look: None,
    ) -> None:
        self._read = read
        self._on_look = on_look
        self._read_last = read_last
        self._listeners = listeners
        self._every = every
        self._changed = threading.Condition()
        self._hurries = self._stops = False
        self._thread = threading.Thread(target=self._run, name="psfleet-watch", daemon=True)

    def start(self) -> None:
        """Start the thread. If it is running already, make a look now, because the servers have changed."""
        if self._thread.ident is None:
            self._thread.start()
            return
        with self._changed:
            self._hurries = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread, after a last frame."""
        with self._changed:
            self._stops = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        before = last = None
        while not self._stops:
            now = look_at(self._read())
            self._on_look(now)
            if last is not None:
                before = now.before(last, before or last)
                self._add(replies(now, before))
            last = now
            with self._changed:
                self._changed.wait_for(lambda: self._stops or self._hurries, self._every)
                self._hurries = False
        if self._read_last is not None and last is not None:
            now = look_at(self._read_last())
            self._add(replies(now, now.before(last, before or last)))

    def _add(self, frame: dict[str, Any]) -> None:
        for listener in self._listeners:
            listener(frame)


def replies(now: Look, before: Look) -> dict[str, Any]:
    """Return a frame: the time, and for each panel in order the value of each series by name.

    Args:
        before: Earlier look, needed to compute rates.
    """
    return {
        "at": now.at,
        "panels": [
            {
                " ".join(key): value if math.isfinite(value) else None  # JSON has no infinity
                for key, value in panel.query.evaluate(now, before).items()
            }
            for panel in PANELS
        ],
    }


def panel_texts() -> list[dict[str, Any]]:
    """Return the texts of each panel for the page: section, title, unit, meaning, advice and alert."""
    return [
        {
            "section": panel.section,
            "title": panel.title,
            "unit": panel.unit,
            "meaning": panel.meaning,
            "advice": panel.advice,
            "by": " ".join(panel.query.by),
            "alert": None if panel.alert is None else asdict(panel.alert),
        }
        for panel in PANELS
    ]


class ServerUsageWatch:
    """Requests more or fewer servers for a job with `--servers 2..8`, as `psfleet scale` does for a user.

    The recorder's thread calls `add_look`. The job runner calls `ask` in the main thread.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._usages: deque[ServerUsage] = deque(maxlen=_KEPT)
        self._servers = 0
        self._asked = -_PAUSE

    @property
    def is_needed(self) -> bool:
        """True if --servers is a range, so that the number of servers may change."""
        return self._job.request.server_count.most > self._job.request.server_count

    def follow(self, servers: int) -> None:
        """Start to measure the load with this number of servers. 0 stops measuring."""
        self._usages.clear()
        self._servers = servers if self.is_needed else 0

    def add_look(self, look: Look) -> None:
        """Record the memory and processor time of the servers in a look.

        A look is ignored if the last measurement was less than `EVERY` seconds ago, or if a server is
        missing.
        """
        used = look.select("psfleet_cpu_seconds_total", {"role": "server"})
        is_due = not self._usages or look.at >= self._usages[-1].at + EVERY
        if not is_due or len(used) != self._servers:
            return
        memory = Ratio(
            Level("psfleet_memory_used_bytes", ("rank",)),
            Level("psfleet_memory_limit_bytes", ("rank",)),
        )
        # With --disk, servers use all memory for rows before they write rows to disk. Used memory then says
        # nothing.
        shares = {} if self._job.request.disk else memory.evaluate(look, look)
        fullest, cpu = max(shares.values(), default=0.0), sum(seconds for _, seconds in used)
        self._usages.append(ServerUsage(look.at, self._servers, fullest, cpu))

    def ask(self) -> str:
        """Request another number of servers if the load calls for it. Return a line with the reason, or "".

        Raises:
            OSError: The request cannot be written.
        """
        request = self._job.request
        if not self._servers or time.monotonic() < self._asked + _PAUSE:
            return ""
        number = wanted(list(self._usages), request.server_count, request.server_cores or 1)
        if number is None:
            return ""
        self._asked = time.monotonic()
        write_scale(self._job.logs, number.servers)
        return f"servers   {number.servers} are wanted: {number.why}"
