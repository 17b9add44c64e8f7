"""Classes for panels: each shows one figure of a job, with its query, meaning, advice and perhaps an alert.

A query is written once, as an Expression. Prometheus evaluates it as PromQL; the page of a job evaluates it
in Python from two looks, the samples of a job's metrics at two moments. So the page shows the same figures
as Grafana; a test compares the two. Functions that format numbers for people are at the end.

training_panels.py and process_panels.py define the panels.
"""

import abc
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

WINDOW = "1m"
"""Interval of PromQL's rates. The page of a job computes rates between two readings of metrics instead."""

_LATEST = 5.0  # a process whose samples are this many seconds late is treated as ended

Series = dict[tuple[str, ...], float]
"""Result of a query: a value for each combination of the labels in `Expression.by`, in that order."""

AGGREGATES: Mapping[str, Callable[[Iterable[float]], float]] = {
    "sum": sum,
    "max": max,
    "avg": statistics.fmean,
}

READ_AT = "psfleet_read_timestamp_seconds"
"""Name of the metric with the time when the other metrics of a process were read."""


@dataclass
class Look:
    """The samples of all metrics of a job at one moment.

    Attributes:
        at: Time in seconds since the epoch.
        samples: Maps the name of a metric to its samples, each a pair (labels, value).
        times: Maps a process, the pair (role, rank), to the time when its samples were read. Samples of
            workers are sent with heartbeats, so they are a little older than the look.
    """

    at: float
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = field(default_factory=dict)
    times: dict[tuple[str, str], float] = field(default_factory=dict)

    def select(
        self, metric: str, where: Mapping[str, str]
    ) -> list[tuple[Mapping[str, str], float]]:
        """Return the samples of a metric that have all of these labels."""
        samples = self.samples.get(metric, [])
        if not where:
            return samples
        return [(labels, value) for labels, value in samples if where.items() <= labels.items()]

    def before(self, last: "Look", older: "Look") -> "Look":
        """Return the earlier samples to compute rates against, taken from two earlier looks.

        A look is the samples of all metrics at one moment. A rate needs two different readings of a process.
        For a process that was not read again since `last`, samples are taken from `older`, for all other
        processes from `last`. A process that was not read for 5 s has ended, and gets no rates.
        """
        oldest = max(self.times.values(), default=0.0) - _LATEST
        times = self.times.items()
        silent = {process for process, at in times if at > oldest and last.times.get(process) == at}
        if not silent:
            return Look(last.at, last.samples, last.times)
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
    """A query of metrics. Subclasses are frozen dataclasses, so that panels can be written as a table.

    Attributes:
        by: Labels that the result keeps, such as ("table",) for one value per table.
    """

    by: tuple[str, ...]

    @abc.abstractmethod
    def promql(self, where: str = "", per_job: bool = False) -> str:
        """Return the query in PromQL.

        Args:
            where: Further label matchers, such as `job="flights"`.
            per_job: True to get one result per job.
        """

    @abc.abstractmethod
    def evaluate(self, now: Look, before: Look) -> Series:
        """Compute the result from two looks at the metrics. Leaves out values that cannot be computed yet."""

    @property
    @abc.abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that the query reads."""


@dataclass(frozen=True)
class _Single(Expression):
    """Query of one metric. Samples with equal `by` labels are aggregated, usually summed."""

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
    """Growth of a counter per second. If the counter has decreased, a restart has reset it to 0."""

    def promql(self, where: str = "", per_job: bool = False) -> str:
        return self._promql(where, per_job, f"rate({{}}[{WINDOW}])")

    def evaluate(self, now: Look, before: Look) -> Series:
        samples = now.select(self.metric, self.where)
        if not samples:
            return {}
        former = {
            frozenset(sample_labels.items()): n
            for sample_labels, n in before.select(self.metric, self.where)
        }
        rates: list[tuple[Mapping[str, str], float]] = []
        for labels, value in samples:
            start = former.get(frozenset(labels.items()))
            process = labels.get("role", ""), labels.get("rank", "")
            span = now.times.get(process, now.at) - before.times.get(process, before.at)
            # No rate without an earlier sample, or if the process has not been read again since.
            if start is not None and span > 0:
                rates.append((labels, (value - start if value >= start else value) / span))
        return self._aggregated(rates)


@dataclass(frozen=True)
class Age(_Single):
    """Seconds since the time that is the value of a metric."""

    aggregate: str = "max"

    def promql(self, where: str = "", per_job: bool = False) -> str:
        return f"time() - {self._promql(where, per_job)}"

    def evaluate(self, now: Look, before: Look) -> Series:
        values = self._aggregated(now.select(self.metric, self.where))
        return {key: now.at - value for key, value in values.items()}


@dataclass(frozen=True)
class Ratio(Expression):
    """Quotient of two queries, for each combination of labels."""

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
    """Return a query for the recent mean of a histogram's values."""
    return Ratio(Rate(f"{histogram}_sum", by), Rate(f"{histogram}_count", by))


@dataclass(frozen=True)
class Skew(Expression):
    """Ratio of the largest value of a query to the mean of its values. 1 means an even load."""

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
    """Quantile of a histogram's recent values: the value that a share of them (0 to 1) does not exceed.

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
    """Return a quantile from the number of values up to each bound, sorted by bound.

    The last bound is infinite.
    """
    rank = share * buckets[-1][1]
    if not rank:
        return math.nan
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            break
        low, below = bound, count
    # In the last bucket there is nothing to interpolate, because it has no upper bound.
    if math.isinf(bound) or bound <= 0:
        return low if math.isinf(bound) else bound
    return low + (bound - low) * (rank - below) / (count - below)


@dataclass(frozen=True)
class Alert:
    """Alert of a panel.

    Attributes:
        when: Condition on the result of the panel's query, such as `> 0.9`.
        lasts: Time that the condition must hold before the alert fires.
        severity: `warning` or `critical`.
    """

    name: str
    when: str
    lasts: str = "1m"
    severity: str = "warning"


@dataclass(frozen=True)
class Panel:
    """A figure of a job that is shown to users.

    Attributes:
        unit: Unit of Grafana: `s`, `bytes`, `short`, `percentunit`, `cps` (per second), `Bps`, or `none`
            for a value that needs four digits, such as a loss.
        advice: Advice to the user if the figure is bad.
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
    """Return the panels, each with the title of their section."""
    return tuple(replace(panel, section=title) for panel in panels)


_COUNTS, _BYTES = ("", "k", "M", "G", "T"), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def _digits(value: float, count: int = 3) -> str:
    """Return a number with `count` significant digits, without trailing zeros, such as `12.5` or `1.2e-7`."""
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

    The screen, `psfleet top`, page and report all use this function. charts.js, which draws the charts in a
    browser, implements the same rules in JavaScript; a test compares the two.
    """
    return _FORMATS[unit](value)


def rate_text(value: float, things: str) -> str:
    """Return a rate as a text. `rate_text(13500, "steps")` is `13.5 k steps/s`."""
    return f"{number_text(value, 'short')} {things}/s"


def counted(count: int, noun: str) -> str:
    """Return a number of things as a text: `1 server`, `3 servers` or, for a range, `1..4 servers`."""
    return f"{count} {noun}{'' if str(count) == '1' else 's'}"
