"""Metrics as processes give them, as a launcher collects them, and as Prometheus reads them.

A process gives its metrics without the labels job, role and rank; whoever collects them adds those.
prometheus_client is imported when somebody asks for metrics, so that a job that nobody watches does
without it.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from psfleet.observability.histograms import LatencyHistogram

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

PREFIX = "psfleet_"

Values = float | Mapping[str, float]
"""One value, or one for each value of the label."""


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
