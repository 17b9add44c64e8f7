"""Metrics as processes count, give and merge them, as a launcher collects them, and as Prometheus reads them.

A process gives its metrics without the labels job, role and rank; whoever collects them adds those.
prometheus_client is imported when somebody asks for metrics, so that a job that nobody watches does
without it; and nothing here needs NumPy, as the launcher reads histograms."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_FIRST, _LAST = 14, 36  # buckets that are shown: up to 16 microseconds, ..., up to 69 seconds


_SCALE = 64  # squares are counted in units of 2**-64
PREFIX = "psfleet_"
Values = float | Mapping[str, float]
"""One value, or one for each value of the label."""
_EXACT = 256  # beyond that only the power of two below is kept, so a histogram stays small


@dataclass(slots=True)
class LatencyHistogram:
    """Durations by powers of two of a nanosecond. Whoever measures fills it without a call:

        spent = time.perf_counter_ns() - began
        latency.counts[spent.bit_length()] += 1
        latency.total += spent

    Two threads that count at the same moment may lose a count; a lock would cost more than the call.

    Attributes:
        counts: Numbers of durations less than 2**index ns, and not less than half of it.
        total: Sum of all durations in ns.
    """

    counts: list[int] = field(default_factory=lambda: [0] * 64)
    total: int = 0
    name: str = ""

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds in seconds and how many durations were below, as Prometheus wants them."""
        bounds = [
            (f"{2**index / 1e9:.6g}", float(sum(self.counts[: index + 1])))
            for index in range(_FIRST, _LAST + 1)
        ]
        return [*bounds, ("+Inf", float(sum(self.counts)))]


_FIRST_NORM, _LAST_NORM = -14, 14  # buckets that are shown: up to 2**-14, ..., up to 16384


@dataclass(slots=True)
class NormHistogram:
    """Norms by powers of two. The measuring code fills it without a call of Python:

        norms.counts[int(square * norms.UNIT).bit_length()] += 1  # the square must be finite
        norms.total += square**0.5

    Attributes:
        counts: Numbers of squared norms less than 2**index / UNIT, and not less than half of it.
    """

    UNIT = 2.0**_SCALE

    counts: list[int] = field(default_factory=lambda: [0] * 256)
    total: float = 0.0

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds and how many norms were below, as Prometheus wants them."""
        bounds = [
            (f"{2.0**power:.10g}", float(sum(self.counts[: _SCALE + 2 * power + 1])))
            for power in range(_FIRST_NORM, _LAST_NORM + 1)
        ]
        return [*bounds, ("+Inf", float(sum(self.counts)))]


def counter(name: str, help: str, values: Values, label: str = "table") -> "Metric":
    """A count that only grows; its name ends with `_total` when it is shown."""
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(PREFIX + name, help, labels=_labels(values, label)), values)


def gauge(name: str, help: str, values: Values, label: str = "table") -> "Metric":
    """A value that goes up and down."""
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(PREFIX + name, help, labels=_labels(values, label)), values)


def latency(name: str, help: str, durations: LatencyHistogram, **labels: str) -> "Metric":
    """A histogram of durations in seconds."""
    return histogram(name, help, durations.buckets(), durations.total / 1e9, **labels)


def histogram(
    name: str, help: str, buckets: Iterable[tuple[str, float]], total: float, **labels: str
) -> "Metric":
    """A histogram.

    Args:
        buckets: Upper bounds, the last `+Inf`, and how many values do not exceed each.
    """
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(PREFIX + name, help, labels=list(labels))
    family.add_metric(list(labels.values()), list(buckets), total)
    return family


def _labels(values: Values, label: str) -> list[str]:
    return [label] if isinstance(values, Mapping) else []


def _filled(family: "Metric", values: Values) -> "Metric":
    each = values.items() if isinstance(values, Mapping) else [(None, values)]
    for name, value in each:
        family.add_metric([] if name is None else [name], value)  # type: ignore[attr-defined]
    return family


def encode(families: Iterable["Metric"]) -> bytes:
    """The families in Prometheus' text format."""
    from prometheus_client import generate_latest

    collector: Any = SimpleNamespace(collect=lambda: families)
    return generate_latest(collector)


def decode(text: bytes, **labels: str) -> Iterator["Metric"]:
    """The families of a text, each sample with these labels too.

    Raises:
        ValueError: It is no such text.
    """
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text.decode()):
        family.samples = [one._replace(labels={**labels, **one.labels}) for one in family.samples]
        yield family


def merge(families: Iterable["Metric"]) -> list["Metric"]:
    """Families of the same name become one, as the text format requires."""
    by_name: dict[str, Metric] = {}
    for family in families:
        if family.name in by_name:
            by_name[family.name].samples.extend(family.samples)
        else:
            by_name[family.name] = family
    return list(by_name.values())


@dataclass
class StalenessHistogram:
    """A histogram over the pushes of one shard; costs two additions for each.

    Attributes:
        counts: Number of pushes by staleness; above 256 rounded down to a power of two.
    """

    counts: dict[int, int] = field(default_factory=dict)
    _applied: int = 0  # pushes of all workers
    _own: dict[int, int] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)

    def pulled(self, worker: int) -> None:
        """The worker is given values."""
        self._seen[worker] = self._applied - self._own.get(worker, 0)

    def pushed(self, worker: int) -> None:
        """A new push of the worker is applied."""
        own = self._own.get(worker, 0)
        others = self._applied - own
        age = others - self._seen.setdefault(worker, others)
        bucket = age if age < _EXACT else 1 << (age.bit_length() - 1)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        self._applied += 1
        self._own[worker] = own + 1
