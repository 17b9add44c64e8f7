"""The metrics of one worker, as its heartbeats carry them to server 0 on request."""

import resource
from collections.abc import Callable
from typing import TYPE_CHECKING

from psfleet.observability.exposition import counter, encode, gauge, histogram, latency, merge
from psfleet.observability.logged_values import LAGS, NEWEST
from psfleet.platform.memory import resident
from psfleet_worker.observability.step_times import StepTimes

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from psfleet.runtime.validation import NonFiniteCheck
    from psfleet.wire.gradient_compressor import GradientCompressor
    from psfleet_worker.observability.hot_ids import HotIds


class WorkerMetrics:
    """Collects the metrics of a worker.

    Args:
        retries: Number of attempts beyond the first of each call.

    Attributes:
        watch: Looks for values that are not finite; None: nothing has been looked at.
        compressor: Compresses gradients; None: there were none.
        hot: Looks at the ids of batches; None: there were none.
        wanted: Server 0 requests them.
    """

    def __init__(self, times: StepTimes, retries: Callable[[], int]) -> None:
        self.watch: NonFiniteCheck | None = None
        self.compressor: GradientCompressor | None = None
        self.hot: HotIds | None = None
        self.wanted = False
        self._times = times
        self._retries = retries

    def text(self) -> bytes:
        """Return all families in Prometheus' text format; empty while they are not requested."""
        return encode(self.collect()) if self.wanted else b""

    def collect(self) -> "list[Metric]":
        """Return all families."""
        times, usage = self._times, resource.getrusage(resource.RUSAGE_SELF)
        families = [
            latency("step_seconds", "Time from a worker's push to its next", times.steps),
            counter("worker_pull_seconds", "Time in pulls, with waiting", times.pull / 1e9),
            counter("worker_push_seconds", "Time in pushes", times.push / 1e9),
            counter("worker_wait_seconds", "Time until pushes and others came", times.wait / 1e9),
            counter("worker_data_seconds", "Time until batches came", times.data / 1e9),
            counter("worker_script_seconds", "Time of steps in the script", times.script / 1e9),
            counter("worker_samples", "Samples behind the worker's pushes", times.samples),
            counter("retries", "Attempts beyond the first of a call", self._retries()),
            counter("cpu_seconds", "CPU time of the process", usage.ru_utime + usage.ru_stime),
            gauge("resident_bytes", "Memory of the process", resident()),
        ]
        if times.loss is not None:
            families.append(
                gauge("loss", "Loss of the worker's last step that told one", times.loss)
            )
        if NEWEST:
            help = "Last value that the script has logged by this name"
            families.append(gauge("logged", help, dict(NEWEST), "name"))
        if LAGS:
            help = "Messages of a partition behind those that the worker has read"
            families.append(gauge("topic_lag", help, dict(LAGS), "partition"))
        if self.compressor is not None:
            families.append(
                counter("saved_bytes", "By which gradients would be longer", self.compressor.saved)
            )
        if self.hot is not None:
            families += self.hot.families()
        return families if self.watch is None else [*families, *_numbers(self.watch)]


def _numbers(watch: "NonFiniteCheck") -> "list[Metric]":
    help = "Norm of a table's gradient in a step"
    return [
        counter("nonfinite_pushes", "Steps with a NaN or infinite loss or gradient", watch.found),
        *merge(
            histogram("gradient_norm", help, norms.buckets(), norms.total, table=name)
            for name, norms in [*watch.norms.items()]
        ),
    ]
