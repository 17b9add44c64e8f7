"""Panels: each shows one figure of a job, with its query, meaning, advice and perhaps an alert.

A query is written once, as an Expression, and evaluated in two ways: as PromQL by Prometheus, and as Python
over two looks at a job's metrics. So the page of a job shows the same figures as Grafana; a test compares
the two. At the end are the functions that format numbers for people.

training_panels.py and process_panels.py define the panels.
"""

import abc
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

WINDOW = "1m"
"""Interval of PromQL's rates. The page of a job takes rates between two looks instead."""

_LATEST = 5.0  # seconds by which a process's samples may be late before it counts as ended

Series = dict[tuple[str, ...], float]
"""Values by the label values that a query keeps (`Expression.by`), in that order."""

AGGREGATES: Mapping[str, Callable[[Iterable[float]], float]] = {
    "sum": sum,
    "max": max,
    "avg": statistics.fmean,
}

READ_AT = "psfleet_read_timestamp_seconds"
"""Metric with the time at which the other metrics of a process were read."""


@dataclass
class Look:
    """The metric samples of a job at one moment.

    Attributes:
        at: Time in seconds since the epoch.
        samples: Labels and value of each sample, by name of the metric.
        times: Time at which each process's samples were read, by role and rank. Samples of workers arrive
            with heartbeats, so they are a little older than the look.
    """

    at: float
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = field(default_factory=dict)
    times: dict[tuple[str, str], float] = field(default_factory=dict)

    def select(
        self, metric: str, where: Mapping[str, str]
    ) -> list[tuple[Mapping[str, str], float]]:
        """Return the samples of a metric that have these labels."""
        return [
            (labels, value)
            for labels, value in self.samples.get(metric, [])
            if where.items() <= labels.items()
        ]

    def time_of(self, labels: Mapping[str, str]) -> float:
        """Return the time at which a sample with these labels was read."""
        return self.times.get(_process(labels), self.at)

    def before(self, last: "Look", older: "Look") -> "Look":
        """Return the look to compute rates against: `last`, or `older` for processes not read since.

        A process without new samples for longer than that has ended, and gets no rates.
        """
        oldest = max(self.times.values(), default=0.0) - _LATEST
        times = self.times.items()
        silent = {process for process, at in times if at > oldest and last.times.get(process) == at}
        merged = last.times | {process: older.times.get(process, older.at) for process in silent}
        samples = {
            name: [
                *(
                    sample
                    for sample in last.samples.get(name, ())
                    if _process(sample[0]) not in silent
                ),
                *(
                    sample
                    for sample in older.samples.get(name, ())
                    if _process(sample[0]) in silent
                ),
            ]
            for name in self.samples
        }
        return Look(last.at, samples, merged)


def _process(labels: Mapping[str, str]) -> tuple[str, str]:
    return labels.get("role", ""), labels.get("rank", "")


class Expression(abc.ABC):
    """A query. Subclasses are frozen dataclasses, so that panels can be written as a table.

    Attributes:
        by: Labels that the result keeps.
    """

    by: tuple[str, ...]

    @abc.abstractmethod
    def promql(self, where: str = "", per_job: bool = False) -> str:
        """Return the query in PromQL.

        Args:
            where: Further label matchers, as in `job="flights"`.
            per_job: True for one result per job.
        """

    @abc.abstractmethod
    def evaluate(self, now: Look, before: Look) -> Series:
        """Return the result from two looks. Series that cannot be computed yet are left out."""

    @property
    @abc.abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that the query reads."""


@dataclass(frozen=True)
class _Single(Expression):
    """Query of one metric, whose series are aggregated (usually summed) by labels."""

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
    """Growth of a counter per second. A counter that decreased was reset to 0 by a restart."""

    def promql(self, where: str = "", per_job: bool = False) -> str:
        return self._promql(where, per_job, f"rate({{}}[{WINDOW}])")

    def evaluate(self, now: Look, before: Look) -> Series:
        former = {
            frozenset(sample_labels.items()): n
            for sample_labels, n in before.select(self.metric, self.where)
        }
        rates: list[tuple[Mapping[str, str], float]] = []
        for labels, value in now.select(self.metric, self.where):
            start = former.get(frozenset(labels.items()))
            span = now.time_of(labels) - before.time_of(labels)
            # No rate without an earlier sample, or if the process has not been read again since.
            if start is not None and span > 0:
                rates.append((labels, (value - start if value >= start else value) / span))
        return self._aggregated(rates)


@dataclass(frozen=True)
class Age(_Single):
    """Seconds since the time that a metric contains."""

    aggregate: str = "max"

    def promql(self, where: str = "", per_job: bool = False) -> str:
        return f"time() - {self._promql(where, per_job)}"

    def evaluate(self, now: Look, before: Look) -> Series:
        values = self._aggregated(now.select(self.metric, self.where))
        return {key: now.at - value for key, value in values.items()}


@dataclass(frozen=True)
class Ratio(Expression):
    """Quotient of two queries, series by series."""

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
    """Return a query for the recent mean of a histogram."""
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
    """Value that the given share of a histogram's recent values did not exceed.

    Values within a bucket are assumed to be spread evenly, as in Prometheus' histogram_quantile.
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
        for (bound, *series_key), value in buckets.items():
            groups.setdefault(tuple(series_key), []).append((float(bound), value))
        quantiles = {key: _quantile(self.share, sorted(group)) for key, group in groups.items()}
        return {key: value for key, value in quantiles.items() if not math.isnan(value)}


def _quantile(share: float, buckets: list[tuple[float, float]]) -> float:
    """Return a quantile, given sorted cumulative counts by upper bound; the last bound is infinity."""
    rank = share * buckets[-1][1]
    if not rank:
        return math.nan
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            break
        low, below = bound, count
    # Nothing to interpolate in the last bucket, which has no upper bound.
    if math.isinf(bound) or bound <= 0:
        return low if math.isinf(bound) else bound
    return low + (bound - low) * (rank - below) / (count - below)


@dataclass(frozen=True)
class Alert:
    """Alert of a panel.

    Attributes:
        name: Name of the alert.
        when: Condition on the panel's query, as in `> 0.9`.
        lasts: Time for which the condition must hold.
        severity: `warning` or `critical`.
    """

    name: str
    when: str
    lasts: str = "1m"
    severity: str = "warning"


@dataclass(frozen=True)
class Panel:
    """Figure of a job.

    Attributes:
        title: Title of the panel.
        unit: Unit of Grafana: `s`, `bytes`, `short`, `percentunit`, `cps` (per second), `Bps`, `none` (a
            value whose fourth digit counts, such as a loss).
        query: Query of the figure.
        meaning: Meaning of the figure, for the user.
        advice: Action for the user if the figure is bad.
        alert: Alert on the query, or None.
        section: Title of its section on the page.
    """

    title: str
    unit: str
    query: Expression
    meaning: str
    advice: str
    alert: Alert | None = None
    section: str = ""


def section(title: str, *panels: Panel) -> tuple[Panel, ...]:
    """Return the panels with the title of their section."""
    return tuple(replace(panel, section=title) for panel in panels)


_COUNTS, _BYTES = ("", "k", "M", "G", "T"), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def _digits(value: float, count: int = 3) -> str:
    """Return the number with `count` significant digits and no trailing zeros; `1.2e-7` below a millionth."""
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
    """Return a number as a person reads it: `13.5 k/s`, `205 MiB`, `47.3 %`, `12.5 ms`.

    The screen, `psfleet top`, page and report all use this. charts.js, which draws the charts in a browser,
    implements the same rules in JavaScript; a test compares the two.

    Args:
        value: The number.
        unit: Unit of a panel.
    """
    return _FORMATS[unit](value)


def rate_text(value: float, things: str) -> str:
    """Return `13.5 k steps/s` for 13,500 steps in a second."""
    return f"{number_text(value, 'short')} {things}/s"
