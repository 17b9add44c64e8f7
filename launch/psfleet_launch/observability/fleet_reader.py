"""The metrics of all processes of a job, asked of its servers over the connections that all calls take."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from psfleet.observability.exposition import decode, merge
from psfleet.observability.expressions import Look
from psfleet.settings.environment import Environment
from psfleet_launch.observability.job_counters import JobCounters

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["FleetReader", "look_at"]

_PATIENCE = 2.0  # seconds for the answer of a server; one that is silent is left out


class FleetReader:
    """Reads the metrics of a job. Any thread may read.

    Args:
        job: Name of the job.
        endpoints: Of its servers; the runner of the job changes them when servers start.
        environment: With what this process proves itself to the servers.
        counters: Of the launcher itself.
    """

    def __init__(
        self, job: str, endpoints: Sequence[str], environment: Environment, counters: JobCounters
    ) -> None:
        self._job = job
        self._endpoints = endpoints
        self._environment = environment
        self._counters = counters
        self._lock = threading.Lock()
        self._channels: dict[str, Any] = {}

    def read(self) -> "list[Metric]":
        """All families, each sample with the labels job, role and rank."""
        own = self._counters.families()
        for family in own:
            family.samples = [
                one._replace(labels={"job": self._job, **one.labels}) for one in family.samples
            ]
        return merge([*own, *self._of_processes()])

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()

    def _of_processes(self) -> "Iterator[Metric]":
        with self._lock:
            import grpc  # here: a job that nobody watches does without

            from psfleet.wire.access import Access
            from psfleet.wire.channel import open_channel
            from psfleet.wire.v1.metrics_pb2 import CollectReply, CollectRequest

            access = Access.of(self._environment)
            request = CollectRequest().SerializeToString()
            calls = []
            for endpoint in self._endpoints:
                if endpoint.endswith(":0"):  # it has not said yet where it listens
                    continue
                if endpoint not in self._channels:
                    self._channels[endpoint] = open_channel(endpoint, access)
                method = self._channels[endpoint].unary_unary("/psfleet.v1.Metrics/Collect")
                calls.append(method.future(request, timeout=_PATIENCE, metadata=access.metadata))
        for call in calls:
            with contextlib.suppress(grpc.RpcError):
                for one in CollectReply.FromString(call.result()).processes:
                    yield from decode(one.text, job=self._job, role=one.role, rank=str(one.rank))


def look_at(families: "Sequence[Metric]") -> Look:
    """The samples by name."""
    look = Look(time.time())
    for family in families:
        for one in family.samples:
            look.samples.setdefault(one.name, []).append((one.labels, one.value))
    return look
