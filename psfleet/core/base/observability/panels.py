"""Panel of a figure: its question to metrics, what it means, what to do, and its alert; numbers as text.

A question is written twice: in PromQL, and as Python over two looks at a job. The page of a job and
Prometheus therefore show the same figures; a test asks both.
"""

import abc
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

WINDOW = "1m"
"""Over which PromQL takes rates; the page takes those between two looks."""

_LATEST = 5.0  # seconds for which a heartbeat may be late

Series = dict[tuple[str, ...], float]
"""Values by those of the labels that a question keeps, in its order."""

AGGREGATES: Mapping[str, Callable[[Iterable[float]], float]] = {
    "sum": sum,
    "max": max,
    "avg": statistics.fmean,
}

READ_AT = "psfleet_read_timestamp_seconds"
"""Metric of the time at which the other metrics of a process were read."""


@dataclass
class Look:
    """The samples of a job at one moment.

    Attributes:
        at: Seconds since the epoch.
        samples: By name of the metric the labels and the value of each.
        times: By role and rank when the samples of a process were read. Those of workers come with heartbeats
            and are a little older than the look.
    """

    at: float
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = field(default_factory=dict)
    times: dict[tuple[str, str], float] = field(default_factory=dict)

    def select(
        self, metric: str, where: Mapping[str, str]
    ) -> list[tuple[Mapping[str, str], float]]:
        """The samples of a metric with these labels."""
        return [
            (labels, value)
            for labels, value in self.samples.get(metric, [])
            if where.items() <= labels.items()
        ]

    def time_of(self, labels: Mapping[str, str]) -> float:
        """Return when a sample with these labels was read."""
        return self.times.get(_process(labels), self.at)

    def before(self, last: "Look", older: "Look") -> "Look":
        """Return the look to compare this one with: `last`, but `older` for those not heard since then.

        A process that is not heard for longer has no rates: it has ended.
        """
        oldest = max(self.times.values(), default=0.0) - _LATEST
        times = self.times.items()
        silent = {one for one, at in times if at > oldest and last.times.get(one) == at}
        merged = last.times | {one: older.times.get(one, older.at) for one in silent}
        samples = {
            name: [
                *(one for one in last.samples.get(name, ()) if _process(one[0]) not in silent),
                *(one for one in older.samples.get(name, ()) if _process(one[0]) in silent),
            ]
            for name in self.samples
        }
        return Look(last.at, samples, merged)


def _process(labels: Mapping[str, str]) -> tuple[str, str]:
    return labels.get("role", ""), labels.get("rank", "")


class Expression(abc.ABC):
    """A question. Frozen dataclasses, built by the table of panels.

    Attributes:
        by: Labels that its answer keeps.
    """

    by: tuple[str, ...]

    @abc.abstractmethod
    def promql(self, where: str = "", per_job: bool = False) -> str:
        """The question to Prometheus.

        Args:
            where: Further matchers of labels, as in `job="flights"`.
            per_job: Answer for each job by itself.
        """

    @abc.abstractmethod
    def evaluate(self, now: Look, before: Look) -> Series:
        """The answer of two looks; what cannot be said yet is left out."""

    @property
    @abc.abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that it asks about."""


@dataclass(frozen=True)
class _Single(Expression):
    """About one metric, whose series are added up (or the greatest is taken) by labels."""

    metric: str
    by: tuple[str, ...] = ()
    where: Mapping[str, str] = field(default_factory=dict)
    aggregate: str = "sum"

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric,)

    def _promql(self, where: str, per_job: bool, wrap: str = "{}") -> str:
        labels = [f'{name}="{value}"' for name, value in self.where.items()]
        matchers = ",".join([where, *labels] if where else labels)
        selector = self.metric + (f"{{{matchers}}}" if matchers else "")
        names = ", ".join(("job", *self.by) if per_job else self.by)
        by = f" by ({names})" if names else ""
        return f"{self.aggregate}{by} ({wrap.format(selector)})"

    def _aggregated(self, samples: Iterable[tuple[Mapping[str, str], float]]) -> Series:
        groups: dict[tuple[str, ...], list[float]] = {}
        for labels, value in samples:
            key = tuple(map(labels.get, self.by, itertools.repeat("")))
            groups.setdefault(key, []).append(value)
        return {key: AGGREGATES[self.aggregate](values) for key, values in groups.items()}


@dataclass(frozen=True)
class Level(_Single):
    """Present value of a metric."""

    def promql(self, where: str = "", per_job: bool = False) -> str:
        return self._promql(where, per_job)

    def evaluate(self, now: Look, before: Look) -> Series:
        return self._aggregated(now.select(self.metric, self.where))


@dataclass(frozen=True)
class Rate(_Single):
    """By how much a count grows in a second. A count that was set back, by a restart, began at 0."""

    def promql(self, where: str = "", per_job: bool = False) -> str:
        return self._promql(where, per_job, f"rate({{}}[{WINDOW}])")

    def evaluate(self, now: Look, before: Look) -> Series:
        former = {frozenset(one.items()): n for one, n in before.select(self.metric, self.where)}
        rates: list[tuple[Mapping[str, str], float]] = []
        for labels, value in now.select(self.metric, self.where):
            start = former.get(frozenset(labels.items()))
            span = now.time_of(labels) - before.time_of(labels)
            if start is not None and span > 0:
                rates.append((labels, (value - start if value >= start else value) / span))
        return self._aggregated(rates)


@dataclass(frozen=True)
class Age(_Single):
    """Seconds since the time that a metric tells."""

    aggregate: str = "max"

    def promql(self, where: str = "", per_job: bool = False) -> str:
        return f"time() - {self._promql(where, per_job)}"

    def evaluate(self, now: Look, before: Look) -> Series:
        values = self._aggregated(now.select(self.metric, self.where))
        return {key: now.at - value for key, value in values.items()}


@dataclass(frozen=True)
class Ratio(Expression):
    """One answer divided by another, series by series."""

    above: Expression
    below: Expression

    @property
    def by(self) -> tuple[str, ...]:  # type: ignore[override]  # read only
        return self.above.by

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*self.above.metrics, *self.below.metrics)

    def promql(self, where: str = "", per_job: bool = False) -> str:
        return f"{self.above.promql(where, per_job)} / {self.below.promql(where, per_job)}"

    def evaluate(self, now: Look, before: Look) -> Series:
        above, below = self.above.evaluate(now, before), self.below.evaluate(now, before)
        return {key: value / below[key] for key, value in above.items() if below.get(key)}


def Mean(histogram: str, by: tuple[str, ...] = ()) -> Ratio:
    """The mean of what a histogram has counted lately."""
    return Ratio(Rate(f"{histogram}_sum", by), Rate(f"{histogram}_count", by))


@dataclass(frozen=True)
class Skew(Expression):
    """Ratio of the busiest series to the mean: 1 is even."""

    of: Expression
    by: tuple[str, ...] = ()

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.of.metrics

    def promql(self, where: str = "", per_job: bool = False) -> str:
        of, by = self.of.promql(where, per_job), " by (job)" if per_job else ""
        return f"max{by} ({of}) / avg{by} ({of})"

    def evaluate(self, now: Look, before: Look) -> Series:
        values = list(self.of.evaluate(now, before).values())
        mean = sum(values) / len(values) if values else 0.0
        return {(): max(values) / mean} if mean else {}


@dataclass(frozen=True)
class Quantile(Expression):
    """The value that a share of what a histogram has counted lately did not exceed.

    Within a bucket values count as spread evenly, as Prometheus' histogram_quantile has it.
    """

    share: float
    histogram: str
    by: tuple[str, ...] = ()

    @property
    def metrics(self) -> tuple[str, ...]:
        return (f"{self.histogram}_bucket",)

    def promql(self, where: str = "", per_job: bool = False) -> str:
        buckets = Rate(f"{self.histogram}_bucket", ("le", *self.by))
        return f"histogram_quantile({self.share:g}, {buckets.promql(where, per_job)})"

    def evaluate(self, now: Look, before: Look) -> Series:
        buckets = Rate(f"{self.histogram}_bucket", ("le", *self.by)).evaluate(now, before)
        groups: dict[tuple[str, ...], list[tuple[float, float]]] = {}
        for (bound, *rest), value in buckets.items():
            groups.setdefault(tuple(rest), []).append((float(bound), value))
        quantiles = {key: _quantile(self.share, sorted(each)) for key, each in groups.items()}
        return {key: value for key, value in quantiles.items() if not math.isnan(value)}


def _quantile(share: float, buckets: list[tuple[float, float]]) -> float:
    """Compute a quantile from cumulative counts by upper bound, the last of which is infinity."""
    rank = share * buckets[-1][1]
    if not rank:
        return math.nan
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            break
        low, below = bound, count
    if math.isinf(bound) or bound <= 0:
        return low if math.isinf(bound) else bound
    return low + (bound - low) * (rank - below) / (count - below)


@dataclass(frozen=True)
class Alert:
    """Alert of a panel.

    Attributes:
        when: Condition on the panel's query, as in `> 0.9`.
        lasts: Time for which it must hold.
        severity: `warning` or `critical`.
    """

    name: str
    when: str
    lasts: str = "1m"
    severity: str = "warning"


@dataclass(frozen=True)
class Panel:
    """One figure.

    Attributes:
        unit: Unit of Grafana: `s`, `bytes`, `short`, `percentunit`, `cps` (per second), `Bps`,
            `none` (a value whose fourth digit counts, such as a loss).
    """

    title: str
    unit: str
    query: Expression
    meaning: str
    advice: str
    alert: Alert | None = None
    section: str = ""


def section(title: str, *panels: Panel) -> tuple[Panel, ...]:
    """The panels of a section of the page."""
    return tuple(replace(panel, section=title) for panel in panels)


_COUNTS, _BYTES = ("", "k", "M", "G", "T"), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def _digits(value: float, count: int = 3) -> str:
    """Significant digits, without zeros at the end; `1.2e-7` below a millionth."""
    rounded = float(f"{value:.{count - 1}e}")
    if rounded and abs(rounded) < 1e-6:
        mantissa, _, power = f"{rounded:.{count - 1}e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{rounded:.12f}".rstrip("0").rstrip(".")


def _scaled(value: float, units: Sequence[str], step: float, count: int = 3) -> str:
    unit = 0
    while abs(float(f"{value:.{count - 1}e}")) >= step and unit < len(units) - 1:
        value, unit = value / step, unit + 1
    return f"{_digits(value, count)} {units[unit]}".rstrip()


def _duration(seconds: float) -> str:
    if seconds >= 172_800:
        return f"{seconds / 86_400:.1f} d"
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    if seconds >= 1 or seconds == 0:
        return f"{_digits(seconds)} s"
    return f"{_digits(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{_digits(seconds * 1e6)} µs"


_FORMATS: Mapping[str, Callable[[float], str]] = {
    "s": _duration,
    "bytes": lambda value: _scaled(value, _BYTES, 1024),
    "Bps": lambda value: f"{_scaled(value, _BYTES, 1024)}/s",
    "cps": lambda value: f"{_scaled(value, _COUNTS, 1000)}/s",
    "percentunit": lambda value: f"{_digits(value * 100)} %",
    "short": lambda value: _scaled(value, _COUNTS, 1000),
    "none": lambda value: _scaled(value, _COUNTS, 1000, 4),
}


def number_text(value: float, unit: str) -> str:
    """Return the number as a person reads it: `13.5 k/s`, `205 MiB`, `47.3 %`, `12.5 ms`.

    Screen, `psfleet top`, page and report all write numbers like this. charts.js, which draws the charts in a
    browser, has the same rules in JavaScript; a test compares the two.

    Args:
        unit: Unit of a panel.
    """
    return _FORMATS[unit](value)


def rate_text(value: float, things: str) -> str:
    """Return `13.5 k steps/s` for 13,500 steps in a second."""
    return f"{number_text(value, 'short')} {things}/s"
