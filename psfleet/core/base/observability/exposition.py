"""Metrics of a process: counting, converting to and from Prometheus' text format, and merging.

A process provides its metrics without the labels job, role and rank. The launcher collects them and adds
these labels. prometheus_client is imported only when metrics are requested, so a job without monitoring
does not need it. The module does not import NumPy, because the launcher reads histograms too.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_FIRST, _LAST = 14, 36  # exponents of the buckets shown: up to 2**14 ns = 16 us, ..., up to 69 s


_SCALE = 64  # squared norms are counted in units of 2**-64
PREFIX = "psfleet_"
Values = float | Mapping[str, float]
"""A single value, or a value for each value of one label, such as each table."""
# A larger staleness is rounded down to a power of two, which keeps the histogram small.
_EXACT = 256


@dataclass(slots=True)
class LatencyHistogram:
    """Histogram of durations, with buckets that are powers of two of a nanosecond.

    Code adds a duration without a function call:

        spent = time.perf_counter_ns() - began
        latency.counts[spent.bit_length()] += 1
        latency.total += spent

    There is no lock, which would cost more than the addition. Two threads that add at the same moment may
    lose one duration.

    Attributes:
        counts: counts[i] is the number of durations from 2**(i-1) to below 2**i ns.
        total: Sum of all durations in ns.
    """

    counts: list[int] = field(default_factory=lambda: [0] * 64)
    total: int = 0
    name: str = ""

    def buckets(self) -> list[tuple[str, float]]:
        """Return the number of durations up to each upper bound in seconds, as Prometheus expects them."""
        bounds = [
            (f"{2**index / 1e9:.6g}", float(sum(self.counts[: index + 1])))
            for index in range(_FIRST, _LAST + 1)
        ]
        return [*bounds, ("+Inf", float(sum(self.counts)))]


_FIRST_NORM, _LAST_NORM = -14, 14  # buckets that are shown: up to 2**-14, ..., up to 16384


@dataclass(slots=True)
class NormHistogram:
    """Histogram of norms, with buckets that are powers of two.

    For speed, code adds a norm without a function call, and gives its square instead of the norm:

        norms.counts[int(square * norms.UNIT).bit_length()] += 1  # the square must be finite
        norms.total += square**0.5

    Attributes:
        UNIT: Factor that makes whole numbers of squares, so that `bit_length` finds the bucket.
        counts: counts[i] is the number of norms whose square is from 2**(i-1) / UNIT to below 2**i / UNIT.
    """

    UNIT = 2.0**_SCALE

    counts: list[int] = field(default_factory=lambda: [0] * 256)
    total: float = 0.0

    def buckets(self) -> list[tuple[str, float]]:
        """Return the number of norms up to each upper bound, as Prometheus expects them."""
        bounds = [
            (f"{2.0**power:.10g}", float(sum(self.counts[: _SCALE + 2 * power + 1])))
            for power in range(_FIRST_NORM, _LAST_NORM + 1)
        ]
        return [*bounds, ("+Inf", float(sum(self.counts)))]


def counter(name: str, help: str, values: Values, label: str = "table") -> "Metric":
    """Return a metric that only grows. Its name gets the suffix `_total`.

    Args:
        name: Name of the metric without the prefix `psfleet_`.
        values: A number, or a mapping from each value of the label to a number.
    """
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(PREFIX + name, help, labels=_labels(values, label)), values)


def gauge(name: str, help: str, values: Values, label: str = "table") -> "Metric":
    """Return a metric that goes up and down. The arguments are those of `counter`."""
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(PREFIX + name, help, labels=_labels(values, label)), values)


def latency(name: str, help: str, durations: LatencyHistogram, **labels: str) -> "Metric":
    """Return a histogram metric of durations in seconds."""
    return histogram(name, help, durations.buckets(), durations.total / 1e9, **labels)


def histogram(
    name: str, help: str, buckets: Iterable[tuple[str, float]], total: float, **labels: str
) -> "Metric":
    """Return a histogram metric.

    Args:
        name: Name of the metric without the prefix `psfleet_`.
        buckets: For each upper bound, the number of values up to it. The last bound is `+Inf`.
    """
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(PREFIX + name, help, labels=list(labels))
    family.add_metric(list(labels.values()), list(buckets), total)
    return family


def _labels(values: Values, label: str) -> list[str]:
    return [label] if isinstance(values, Mapping) else []


def _filled(family: "Metric", values: Values) -> "Metric":
    labelled_values = values.items() if isinstance(values, Mapping) else [(None, values)]
    for name, value in labelled_values:
        family.add_metric([] if name is None else [name], value)  # type: ignore[attr-defined]
    return family


def encode(families: Iterable["Metric"]) -> bytes:
    """Return metrics in Prometheus' text format."""
    from prometheus_client import generate_latest

    collector: Any = SimpleNamespace(collect=lambda: families)
    return generate_latest(collector)


def decode(text: bytes, **labels: str) -> Iterator["Metric"]:
    """Yield the metrics in a text of Prometheus' format, and add these labels to each sample.

    Raises:
        ValueError: The text is not in Prometheus' format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text.decode()):
        family.samples = [
            sample._replace(labels={**labels, **sample.labels}) for sample in family.samples
        ]
        yield family


def merge(families: Iterable["Metric"]) -> list["Metric"]:
    """Join metrics of the same name, such as those of several processes, as the text format requires."""
    by_name: dict[str, Metric] = {}
    for family in families:
        if family.name in by_name:
            by_name[family.name].samples.extend(family.samples)
        else:
            by_name[family.name] = family
    return list(by_name.values())


@dataclass
class StalenessHistogram:
    """Histogram of the staleness of one shard's pushes. Costs two additions per push.

    The staleness of a push is the number of pushes of other workers that were applied between the worker's
    pull and its push.

    Attributes:
        counts: Maps a staleness to the number of pushes that had it. A staleness of 256 or more is rounded
            down to a power of two.
    """

    counts: dict[int, int] = field(default_factory=dict)
    _applied: int = 0  # pushes of all workers
    _own: dict[int, int] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)

    def pulled(self, worker: int) -> None:
        """Note that a pull of the worker is served now, with all pushes applied so far."""
        self._seen[worker] = self._applied - self._own.get(worker, 0)

    def pushed(self, worker: int) -> None:
        """Note that a push of the worker is applied now, and count its staleness."""
        own_pushes = self._own.get(worker, 0)
        other_pushes = self._applied - own_pushes
        # A worker that has not pulled yet starts with a staleness of 0.
        age = other_pushes - self._seen.setdefault(worker, other_pushes)
        bucket = age if age < _EXACT else 1 << (age.bit_length() - 1)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        self._applied += 1
        self._own[worker] = own_pushes + 1
