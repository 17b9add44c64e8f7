"""The page of a job: one HTML file of its parts, which loads nothing, for a running job and for a report.

The charts are drawn by uPlot 1.6.32, as the npm package of that name has it; its licence is in the page.
"""

import functools
import json
import operator
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from psfleet.core.base.logs import FIRST_NONFINITE
from psfleet.core.base.observability.panels import number_text, rate_text
from psfleet.core.base.settings.kinds import local_path
from psfleet_launch.job.job_folder import REPORT, is_claimed
from psfleet_launch.observability.job_figures import logged
from psfleet_launch.observability.job_history import (
    PastJob,
    clock,
    incidents,
    lasted,
    marks,
    moment,
    read_history,
    state,
    zone,
)
from psfleet_launch.observability.process_states import (
    SLOW,
    ProcessState,
    mark_silent,
    mark_slow,
    process_states,
    step_times,
)

Table = dict[str, Any]
"""`title`, `columns`, `rows` of texts, and in `moods` for each row `good`, `warn`, `bad` or nothing."""
_Figures = Mapping[str, float | None]


_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {"==": operator.eq, ">": operator.gt}
_MINUTE = 60.0
_PARTS = (
    "dashboard.css",
    "dashboard.js",
    "charts.js",
    "uplot.min.css",
    "uplot.min.js",
    "uplot-licence.txt",
)
_PLACE = '<script id="report" type="application/json">null</script>'


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


def overview(job: PastJob, is_running: bool, faults: int = 0) -> dict[str, Any]:
    """Return the overview that the page shows above its charts.

    Args:
        faults: Number of the newest faults that it names; 0: all.
    """
    processes = process_states(job)
    is_running = is_running and job.code is None  # the launcher writes the report at its end
    if is_running:
        mark_silent(job, processes)
    elif job.code is None:
        for one in processes:
            if one.mood == "good":
                one.words, one.mood = "its end is not recorded", ""
    mark_slow(job, is_running, processes)
    all_alerts = list(fired_alerts(job))
    alerts = [one for one in all_alerts if one.until is None] if is_running else all_alerts
    badge = _badge(job, is_running, processes, alerts)
    return {
        "state": state(job, is_running),
        "badge": badge,
        "figures": [list(one) for one in _figures(job, is_running, processes)],
        "tables": [
            table
            for table in (
                _process_table(job, is_running, processes),
                _alert_table(alerts, is_running),
                _fault_table(job, faults),
            )
            if table["rows"]
        ],
        "marks": [list(one) for one in marks(job)],
        "finished": [one.series for one in processes if one.words == "finished"],
    }


def _badge(
    job: PastJob, is_running: bool, processes: Sequence[ProcessState], alerts: Sequence[FiredAlert]
) -> tuple[str, str]:
    """One or a few words, and the mood."""
    if job.code is not None:
        return ("finished", "good") if job.code == 0 else ("failed", "bad")
    if not is_running:
        return "killed", "bad"
    if dead := [one.name for one in processes if one.mood == "bad"]:
        return f"runs without {', '.join(dead)}", "bad"
    if not alerts:
        slow = [one.name for one in processes if one.mood == "warn"]
        return (f"runs, {', '.join(slow)} slow", "warn") if slow else ("runs", "good")
    is_critical = any(one.severity == "critical" for one in alerts)
    words = f"{len(alerts)} alert{'s' if len(alerts) > 1 else ''}"
    return f"runs, {words}", "bad" if is_critical else "warn"


def _process_table(job: PastJob, is_running: bool, processes: Sequence[ProcessState]) -> Table:
    machines = {
        member: machine
        for machine, members in job.heading["machines"].items()
        for member in members
    }
    only = next(iter(job.heading["machines"]), "") if len(job.heading["machines"]) == 1 else ""
    rate: Callable[[str], _Figures] = job.newest if is_running else job.usual
    steps, pushes = rate("Steps per second"), rate("Pushes per second by server")
    memory, cores = (
        (job.newest if is_running else job.last)("Resident memory"),
        rate("CPU cores in use"),
    )
    rows = []
    for one in processes:
        speed = _shown(steps, one.series, lambda value: rate_text(value, "steps"))
        rows.append(
            [
                one.name,
                one.machine or machines.get(one.name, only),
                one.words,
                speed or _shown(pushes, one.series, lambda value: rate_text(value, "pushes")),
                _shown(memory, one.series, lambda value: number_text(value, "bytes")),
                _shown(cores, one.series, lambda value: number_text(value, "short")),
            ]
        )
    columns = ["Process", "Machine", "State", "Speed", "Memory", "CPU cores"]
    return _table("Processes", columns, rows, [one.mood for one in processes])


def _shown(figures: _Figures, series: str, words: Callable[[float], str]) -> str:
    value = figures.get(series)
    return "" if value is None else words(value)


# -- what went wrong ---------------------------------------------------------------------------


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


def _alert_table(alerts: Sequence[FiredAlert], is_running: bool) -> Table:
    rows = [
        [
            clock(one.since) + ("" if one.until is None else f" to {clock(one.until)}"),
            one.name,
            f"{one.title} {one.when}{one.series and f' ({one.series})'}",
        ]
        for one in alerts
    ]
    moods = ["bad" if one.severity == "critical" else "warn" for one in alerts]
    return _table(
        "Alerts in force" if is_running else "Alerts", ["Since", "Alert", "What"], rows, moods
    )


def _fault_table(job: PastJob, newest: int) -> Table:
    rows = [[clock(one.at), one.member or "job", text] for one, text in incidents(job)]
    return _table("Faults", ["Time", "Process", "What happened"], rows[-newest:])


def _table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], moods: Sequence[str] = ()
) -> Table:
    rows = [list(row) for row in rows]
    return {"title": title, "columns": list(columns), "rows": rows, "moods": list(moods)}


# -- figures -----------------------------------------------------------------------------------


def _figures(
    job: PastJob, is_running: bool, processes: Sequence[ProcessState]
) -> Iterator[tuple[str, str, str, str]]:
    """Label, value, a note and the mood of each number of the overview."""
    ask = job.newest if is_running else job.last
    if steps := ask("Steps"):
        yield "Steps", _count(steps), _rate(ask("Steps per second"), max, is_running), ""
    if (samples := ask("Samples")) and _sum(samples):
        yield ("Samples", _count(samples), _rate(ask("Samples per second"), sum, is_running), "")
    if losses := ask("Loss"):
        yield _loss(losses, is_running)
    for name, text in logged(ask("Logged values")):
        yield name, text, "", ""
    seconds = _sum(ask("Time left"))
    yield (
        "Time",
        number_text(lasted(job), "s"),
        f"{number_text(seconds, 's')} left" if seconds and is_running else "",
        "",
    )
    deaths, starts = (
        sum(one.deaths for one in processes),
        sum(max(one.starts - 1, 0) for one in processes),
    )
    takeovers = sum(one.kind == "takeover" for one in job.events)
    recoveries = [
        f"{count} {noun}{'s' if count > 1 else ''}"
        for count, noun in ((starts, "restart"), (takeovers, "takeover"))
        if count
    ]
    yield "Deaths", f"{deaths}", ", ".join(recoveries), "bad" if deaths else ""
    spoilt = _sum(ask("Steps with NaN or infinity"))
    first = next((one.text for one in job.events if one.text.startswith(FIRST_NONFINITE)), "")
    if spoilt or first:
        yield "Steps with NaN", f"{spoilt:,.0f}", first.removeprefix(FIRST_NONFINITE), "bad"
    else:
        yield "Steps with NaN", "0", "", ""


def _loss(losses: _Figures, is_running: bool) -> tuple[str, str, str, str]:
    """The mean of the workers' losses; those that are not finite are named."""
    label, finite = (
        "Loss" if is_running else "Final loss",
        [one for one in losses.values() if one is not None],
    )
    if len(finite) < len(losses):
        spoilt = ", ".join(name for name, value in losses.items() if value is None)
        return label, "NaN", spoilt, "bad"
    note = f"mean of {len(finite)} workers" if len(finite) > 1 else ""
    return label, number_text(statistics.fmean(finite), "none"), note, ""


def _sum(figures: _Figures) -> float:
    return sum(value for value in figures.values() if value is not None)


def _count(figures: _Figures) -> str:
    return f"{_sum(figures):,.0f}"


def _rate(figures: _Figures, total: Any, is_running: bool) -> str:
    """Return the present rate; empty for a job that is over."""
    values = [value for value in figures.values() if value is not None]
    return number_text(total(values), "cps") if values and is_running else ""


def dashboard_page(report: str = "null") -> str:
    """The page.

    Args:
        report: Content of the page, as JSON; without it the page follows the job at the port that serves it.
    """
    return _page().replace(_PLACE, _PLACE.replace("null", report.replace("<", "\\u003c")))


@functools.cache
def _page() -> str:
    folder = files(__package__)
    page = folder.joinpath("dashboard.html").read_text("utf-8")
    for name in _PARTS:
        page = page.replace(f"/* {name} */", folder.joinpath(name).read_text("utf-8"))
    return page


def write_report(folder: Path, to: Path | None = None) -> Path:
    """Write the report of the job with these logs, by default into their folder; where it is.

    Raises:
        FileNotFoundError: The job has no history.
        FrameError: Its history is damaged.
    """
    where = local_path(to or folder / REPORT)
    where.write_text(job_report(read_history(folder), is_running=is_claimed(folder)), "utf-8")
    return where


def job_report(job: PastJob, is_running: bool = False) -> str:
    """The page."""
    content = {
        "job": job.heading["job"],
        "overview": overview(job, is_running),
        "zone": zone(job.heading["began"]),
        "panels": job.heading["panels"],
        "frames": job.frames,
        "tables": tables(job),
    }
    return dashboard_page(json.dumps(content, separators=(",", ":")))


def tables(job: PastJob) -> list[Table]:
    """Return the tables that the report has besides the overview and the panels."""
    all_tables = [
        _table("The job", (), _facts(job)),
        _table(
            "Speed of processes",
            ("Process", "Step time", "Without waiting", "Against the others", ""),
            slow_processes(job),
        ),
        _table(
            "Lost and repeated steps",
            ("What", "Count"),
            [
                (title, f"{sum(filter(None, job.last(title).values())):g}")
                for title in ("Torn steps", "Pushes that came again")
                if job.last(title)
            ],
        ),
        _table(
            "What was said",
            ("Time", "Process", "Text"),
            [(clock(one.at), one.member, one.text) for one in job.events if one.kind == "said"],
        ),
    ]
    return [table for table in all_tables if table["rows"]]


def _facts(job: PastJob) -> Iterator[tuple[str, str]]:
    heading = job.heading
    yield "Script", heading["script"]
    yield "Engine", heading["engine"]
    for name, value in heading["settings"].items():
        if name != "strategy":
            yield name.capitalize(), str(value)
    for part, settings in heading["settings"].get("strategy", {}).items():
        yield (
            f"Strategy: {part}",
            ", ".join(f"{name} {value}" for name, value in settings.items()),
        )
    yield "Began", moment(heading["began"])
    yield "psfleet", heading["psfleet"]
    if job.dropped:
        yield "Events that are not kept", f"{job.dropped:,}"


def slow_processes(job: PastJob) -> Iterator[tuple[str, ...]]:
    """The rows of the report about each worker's step time, see `step_times`."""
    for worker, step, own, ratio in step_times(job):
        note = "slow" if ratio >= SLOW else ""
        yield worker, number_text(step, "s"), number_text(own, "s"), f"{ratio:.2f}", note
