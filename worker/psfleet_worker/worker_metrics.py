"""Metrics of one worker: where its time goes, its samples and loss, and which ids are most frequent.

Heartbeats carry the metrics to server 0, but only while the job is being watched. The training thread adds up
times in `StepTimes`. The thread of the heartbeats computes the frequent ids, from batches that exist anyway.

The most frequent ids come from a summary of Misra and Gries (1982), merged with the counts of whole batches
as in Agarwal et al., "Mergeable summaries", PODS 2012. It keeps the same ids as SpaceSaving, without
SpaceSaving's overestimates.
"""

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.logs import log_of
from psfleet.core.base.memory import resident
from psfleet.core.base.observability.exposition import (
    LatencyHistogram,
    counter,
    encode,
    gauge,
    histogram,
    latency,
    merge,
)
from psfleet.core.base.observability.logged_values import LAGS, NEWEST
from psfleet.core.engine.schema.table import OWN

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from psfleet.core.engine.non_finite_check import NonFiniteCheck
    from psfleet.core.net.gradient_compressor import GradientCompressor


Ids = NDArray[np.int64]
_log = log_of(__name__)
_SAMPLE = 8192  # ids that one observation counts, over all tables
# Weight of earlier counts at each observation. With one observation a second, about the last minute is
# weighted.
_FADE = 63 / 64
_MANY = 100  # number of most frequent ids whose common share is a metric
_HOT = 0.1  # least share of a single id that logs a warning
_ENOUGH = 1000  # ids to count before that warning


@dataclass
class StepTimes:
    """Times of a worker's steps in ns, and the samples and losses of its pushes.

    Attributes:
        pull: Time in pulls. In sync mode that includes the wait for the round.
        push: Time to lay out gradients and hand them to the queue.
        wait: Time spent waiting for acknowledgements, and at barriers and reductions.
        data: Time that the fleet's data loops waited for a batch.
        script: Remaining time of the steps, which is the script's own work. Pulls of a second thread are
            included in `pull` only.
        steps: Histogram of the times from push to push.
        samples: Number of samples of all pushes.
        loss: Loss of the last push, or None if it had none.
    """

    pull: int = 0
    push: int = 0
    wait: int = 0
    data: int = 0
    script: int = 0
    steps: LatencyHistogram = field(default_factory=LatencyHistogram)
    samples: int = 0
    loss: float | None = None
    _pushed: int = 0
    _spent: int = 0  # pull + push + wait + data at the last push

    def pushed(self, samples: int, loss: float | None) -> None:
        """Count a push, and add to `script` the time of the step that no other counter has."""
        now, elsewhere = time.perf_counter_ns(), self.pull + self.push + self.wait + self.data
        if self._pushed:
            duration = now - self._pushed
            self.steps.counts[duration.bit_length()] += 1
            self.steps.total += duration
            script = duration + self._spent - elsewhere
            if script > 0:
                self.script += script
        self._spent = elsewhere
        self._pushed, self.loss = now, loss
        self.samples += samples


class FrequentIds:
    """Counts of the most frequent ids of a stream, in constant memory.

    A count is never too high, and is too low by at most total / (places + 1). So every id that makes up more
    than 1 / (places + 1) of the stream has a count.

    Args:
        places: Maximum number of ids that are counted.

    Attributes:
        total: Number of ids so far. Ids before a `fade` have a lower weight.
        ids: Ids that have a count, int64 [at most places].
        counts: Count of each of these ids, float64.
    """

    def __init__(self, places: int = 1024) -> None:
        self._places = places
        self.total = 0.0
        self.ids: Ids = np.zeros(0, np.int64)
        self.counts: NDArray[np.float64] = np.zeros(0)

    def add(self, ids: Ids) -> None:
        """Count the ids of a batch, int64 [n]. Repeated ids count each time."""
        distinct, counts = np.unique(ids, return_counts=True)
        union, positions = np.unique(np.concatenate([self.ids, distinct]), return_inverse=True)
        sums = np.zeros(len(union))
        np.add.at(sums, positions, np.concatenate([self.counts, counts]))
        # Subtract the (places + 1)-th largest count from all: at most `places` counts stay positive, and each
        # subtraction of 1 removes 1 from places + 1 ids at once, which bounds the error.
        if len(union) > self._places:
            sums -= np.partition(sums, -self._places - 1)[-self._places - 1]
        positive = sums > 0
        self.ids, self.counts = union[positive], sums[positive]
        self.total += len(ids)

    def fade(self, factor: float) -> None:
        """Multiply all counts so far by a factor, so that later ids weigh more."""
        self.total *= factor
        self.counts *= factor

    def share(self, count: int) -> float:
        """Return the fraction of the stream that the `count` most frequent ids make up, or 0 without ids."""
        if not self.total:
            return 0.0
        top = np.sort(self.counts)[-count:]
        return float(top.sum() / self.total)

    def first(self) -> int | None:
        """Return the most frequent id, or None before the first id was counted."""
        return int(self.ids[self.counts.argmax()]) if len(self.ids) else None


class HotIds:
    """Finds the most frequent ids of each table, from a sample of its newest batch.

    This costs the training thread nothing: the thread of heartbeats reads batches that exist anyway.

    Args:
        batches: Returns the newest batch of ids of each table, by table name: int64 [n], with repeats.
    """

    def __init__(self, worker: int, batches: Callable[[], Mapping[str, Ids]]) -> None:
        self._worker = worker
        self._batches = batches
        self._found: dict[str, FrequentIds] = {}
        self._seen: dict[str, Ids] = {}
        self._named: set[str] = set()
        self._numbers = np.random.default_rng(worker)

    def families(self) -> "Iterator[Metric]":
        """Sample the newest batches, and yield the shares of the most frequent ids of each table."""
        self._look()
        tables = self._found.items()
        yield gauge(
            "hottest_id_share", "Most frequent id", {n: frequent.share(1) for n, frequent in tables}
        )
        fractions = {name: frequent.share(_MANY) for name, frequent in tables}
        yield gauge("hot_ids_share", f"The {_MANY} most frequent ids", fractions)

    def _look(self) -> None:
        batches = {n: ids for n, ids in self._batches().items() if not n.startswith(OWN)}
        for name, ids in batches.items():
            if not len(ids) or self._seen.get(name) is ids:
                continue
            self._seen[name] = ids
            sample_size = max(_SAMPLE // len(batches), 1)
            sample = (
                ids
                if len(ids) <= sample_size
                else ids[self._numbers.integers(len(ids), size=sample_size)]
            )
            frequent = self._found.setdefault(name, FrequentIds())
            frequent.fade(_FADE)
            frequent.add(sample)
            self._name(name, frequent)

    def _name(self, table: str, frequent: FrequentIds) -> None:
        """Log once which id makes up much of a table's batches, because metrics do not name ids."""
        share = frequent.share(1)
        if table in self._named or share < _HOT:
            return
        if frequent.total >= _ENOUGH and len(frequent.ids) > _MANY:
            self._named.add(table)
            _log.warning(
                f"psfleet: worker {self._worker}: {share:.0%} of the ids of table {table!r} are "
                f"{frequent.first()}; if it stands for a missing value, leave it out of the batches"
            )


class WorkerMetrics:
    """Collects the metrics of a worker.

    Args:
        retries: Returns the total number of repeated attempts of calls.

    Attributes:
        watch: Check for values that are not finite, or None before the worker can push and pull.
        compressor: Compressor of gradients, or None before the worker can push and pull.
        hot: Finds the most frequent ids of batches, or None before the worker can push and pull.
        wanted: True if server 0 requests the metrics.
    """

    def __init__(self, times: StepTimes, retries: Callable[[], int]) -> None:
        self.watch: NonFiniteCheck | None = None
        self.compressor: GradientCompressor | None = None
        self.hot: HotIds | None = None
        self.wanted = False
        self._times = times
        self._retries = retries

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format, or b"" while server 0 does not request them."""
        return encode(self.collect()) if self.wanted else b""

    def collect(self) -> "list[Metric]":
        """Return all metric families."""
        times, usage = self._times, resource.getrusage(resource.RUSAGE_SELF)
        total = times.pull + times.push + times.wait + times.data + times.script
        families = [
            latency("step_seconds", "Time from a worker's push to its next", times.steps),
            counter("worker_pull_seconds", "Time in pulls, with waiting", times.pull / 1e9),
            counter("worker_push_seconds", "Time in pushes", times.push / 1e9),
            counter("worker_wait_seconds", "Time until pushes and others came", times.wait / 1e9),
            counter("worker_data_seconds", "Time until batches came", times.data / 1e9),
            counter("worker_script_seconds", "Time of steps in the script", times.script / 1e9),
            counter("worker_seconds", "All of these times", total / 1e9),
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
            for name, norms in [*watch.norms.tables.items()]
            if not name.startswith(OWN)
        ),
    ]
