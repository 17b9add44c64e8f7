"""Alerts of a job, found in its history by the rules that Prometheus has in docs/alerts.yml."""

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from psfleet_launch.observability.job_history import PastJob

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {"==": operator.eq, ">": operator.gt}
_MINUTE = 60.0


@dataclass(frozen=True)
class FiredAlert:
    """An alert that is or was in force.

    Attributes:
        name: Name, as in docs/alerts.yml.
        severity: `warning` or `critical`.
        when: Its condition, as in `> 0.9`.
        series: Series of the panel; empty: it has one.
        until: Time at which it ended; None: it is in force.
    """

    name: str
    severity: str
    title: str
    when: str
    series: str
    since: float
    until: float | None = None


def fired_alerts(job: PastJob) -> Iterator[FiredAlert]:
    """Yield, for each series of each panel with an alert, the times in which the alert was in force."""
    for panel in job.heading["panels"]:
        if alert := panel.get("alert"):
            yield from _of_panel(job, panel["title"], alert)


def _of_panel(job: PastJob, title: str, alert: Mapping[str, Any]) -> Iterator[FiredAlert]:
    sign, bound = alert["when"].split()
    lasts = float(alert["lasts"].removesuffix("m")) * _MINUTE
    starts: dict[str, float] = {}
    at = 0.0
    for frame, series in zip(job.frames, job.panel(title), strict=True):
        at = frame["at"]
        true = {
            name
            for name, value in series.items()
            if value is not None and _OPERATORS[sign](value, float(bound))
        }
        for name in [*starts]:
            if name not in true and (since := starts.pop(name) + lasts) <= at:
                yield _fired(title, alert, name, since, at)
        for name in true:
            starts.setdefault(name, at)
    for name, since in starts.items():
        if since + lasts <= at:
            yield _fired(title, alert, name, since + lasts)


def _fired(
    title: str, alert: Mapping[str, Any], series: str, since: float, until: float | None = None
) -> FiredAlert:
    return FiredAlert(alert["name"], alert["severity"], title, alert["when"], series, since, until)
