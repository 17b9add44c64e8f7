"""The metrics of one worker, as its heartbeats carry them to server 0 on request.

The most frequent ids come from a summary of Misra and Gries (1982) that is merged with the counts of whole
batches, as in Agarwal et al., "Mergeable summaries", PODS 2012. It holds what SpaceSaving holds, less its
overestimates.
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
_SAMPLE = 8192  # ids of all tables that one observation counts
_FADE = (
    63 / 64
)  # weight of earlier counts at each observation; at one a second about a minute counts
_MANY = 100  # most frequent ids, whose common share is a metric
_HOT = 0.1  # share of an id from which on a warning is logged
_ENOUGH = 1000  # ids that must have been counted before that warning


@dataclass
class StepTimes:
    """Times are in ns.

    Attributes:
        pull: Spent until values were there; in sync mode with waiting for the round.
        push: Spent to lay out gradients and hand them over.
        wait: Spent for acknowledgements, and at barriers and reductions.
        data: Spent by the loops of the fleet until a batch was there.
        script: The rest of the steps, which is the script's own work. What a second thread spends in
            pulls counts as pulls alone.
        steps: From push to push.
        samples: Behind all pushes.
        loss: Loss that came with the last push, or None if it had none.
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
    _spent: int = 0  # in all but the script, at the last push

    def pushed(self, samples: int, loss: float | None) -> None:
        """Count a push."""
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
    """Counts of at most `places` ids.

    A count is never too high, and too low by at most total / (places + 1): every id that makes up more
    than that share of the stream is held.

    Attributes:
        total: Number of ids; those before a `fade` count less.
        ids: int64 [at most places].
        counts: float64, the count of each id in `ids`.
    """

    def __init__(self, places: int = 1024) -> None:
        self._places = places
        self.total = 0.0
        self.ids: Ids = np.zeros(0, np.int64)
        self.counts: NDArray[np.float64] = np.zeros(0)

    def add(self, ids: Ids) -> None:
        """Count the ids of a batch, int64 [n], with repeats."""
        distinct, counts = np.unique(ids, return_counts=True)
        union, positions = np.unique(np.concatenate([self.ids, distinct]), return_inverse=True)
        sums = np.zeros(len(union))
        np.add.at(sums, positions, np.concatenate([self.counts, counts]))
        if len(union) > self._places:
            sums -= np.partition(sums, -self._places - 1)[-self._places - 1]
        positive = sums > 0
        self.ids, self.counts = union[positive], sums[positive]
        self.total += len(ids)

    def fade(self, factor: float) -> None:
        """Let all that was counted so far weigh less."""
        self.total *= factor
        self.counts *= factor

    def share(self, count: int) -> float:
        """Return the share of the stream that the `count` most frequent ids make up; 0 without ids."""
        if not self.total:
            return 0.0
        top = np.sort(self.counts)[-count:]
        return float(top.sum() / self.total)

    def first(self) -> int | None:
        """Return the most frequent id, or None before the first id was counted."""
        return int(self.ids[self.counts.argmax()]) if len(self.ids) else None


class HotIds:
    """Samples the newest batch of each table. Costs the training nothing: it takes what is there.

    Args:
        batches: The newest batch of each table by its name: int64 [n], with repeats.
    """

    def __init__(self, worker: int, batches: Callable[[], Mapping[str, Ids]]) -> None:
        self._worker = worker
        self._batches = batches
        self._found: dict[str, FrequentIds] = {}
        self._seen: dict[str, Ids] = {}
        self._named: set[str] = set()
        self._numbers = np.random.default_rng(worker)

    def families(self) -> "Iterator[Metric]":
        """Sample the newest batches; return the counts of all samples."""
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
        """Say once which id it is: no metric has ids for labels."""
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
        retries: Number of attempts beyond the first of each call.

    Attributes:
        watch: Check for values that are not finite, or None before the worker's transfers exist.
        compressor: Compressor of gradients, or None until then.
        hot: Summary of the ids of batches, or None until then.
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
        """Return all families in Prometheus' text format; empty while they are not requested."""
        return encode(self.collect()) if self.wanted else b""

    def collect(self) -> "list[Metric]":
        """Return all families."""
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
