"""Events of a job in words, and its alerts as Prometheus would raise them."""

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from psfleet.platform.logs import FIRST_NONFINITE
from psfleet_launch.observability.job_history import JobEvent, PastJob


def state(job: PastJob, is_running: bool) -> str:
    """One sentence: is it over, and how?"""
    span = f"{duration(lasted(job))} from {moment(job.heading['began'])} on"
    if job.code is not None:
        return f"ended with exit code {job.code} after {span}"
    if is_running:
        return f"runs: {span}"
    return f"no end is recorded: its launcher was killed after {span}"


def lasted(job: PastJob) -> float:
    """Seconds from its begin until the last that is known of it."""
    began = job.heading["began"]
    times = [*(one.at for one in job.events), *(one["at"] for one in job.frames[-1:])]
    return float(max([began, *times]) - began)


def incidents(job: PastJob) -> Iterator[tuple[JobEvent, str]]:
    """Deaths, silences, takeovers, restarts and the first NaN, in order, each with a description."""
    ends: dict[str, float] = {}
    heirs: dict[str, tuple[str, float]] = {}  # by standby whose place it takes, and since when
    for one in job.events:
        match one.kind:
            case "ended":
                ends[one.member] = one.at
                if one.code:
                    yield one, f"ended with {exit_words(one.code)}{one.text and f': {one.text}'}"
            case "hung":
                yield one, one.text
            case "takeover":
                heirs[one.member] = one.text, ends.get(one.text, one.at)
                yield one, f"takes over from {one.text}"
            case "ready" if one.member in heirs:
                before, since = heirs.pop(one.member)
                yield one, f"has the place of {before} {duration(one.at - since)} after its end"
            case "started" if one.member in ends:
                yield one, "is started again"
            case "said" if one.text.startswith(FIRST_NONFINITE):
                who, _, what = one.text.removeprefix(FIRST_NONFINITE).partition(", ")
                yield replace(one, member=who), f"{FIRST_NONFINITE}{what}"
            case "stop":
                yield one, f"the job is asked to end by {one.text}"


def exit_words(code: int) -> str:
    """`signal 9` or `exit code 1`."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def duration(seconds: float) -> str:
    """`3.2 min`."""
    if seconds >= 120:
        return f"{seconds / 3600:.1f} h" if seconds >= 7200 else f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def moment(at: float) -> str:
    """Date and time of day, here."""
    return datetime.fromtimestamp(at).astimezone().isoformat(" ", "seconds")


def clock(at: float) -> str:
    """The time of day, here."""
    return datetime.fromtimestamp(at).strftime("%H:%M:%S.%f")[:-5]


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
