"""HTML page of a job: served by `--watch` while the job runs, and written as a report when the job is over.

Both are the same HTML file, which loads no other files. The page requests its content from the launcher,
and the report contains it. `job_view.py` computes the content. The charts are drawn by uPlot 1.6.32,
unchanged from the npm package of this name; its licence is in the page.
"""

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from importlib.resources import files
from pathlib import Path
from typing import Any

from psfleet.core.base.panels.panel import number_text
from psfleet.core.base.settings.kinds import local_path
from psfleet_launch.job.job_folder import REPORT, is_claimed
from psfleet_launch.observability.job_history import PastJob, read_history
from psfleet_launch.observability.job_view import (
    SLOW,
    FiredAlert,
    JobView,
    clock,
    moment,
    step_times,
    view_of,
    zone,
)

Table = dict[str, Any]
"""A table as JSON: `title`, `columns`, `rows` of texts, and in `moods` the colour of each row (`good`,
`warn`, `bad` or "")."""

_PARTS = (
    "dashboard.css",
    "dashboard.js",
    "charts.js",
    "uplot.min.css",
    "uplot.min.js",
    "uplot-licence.txt",
)
_CONTENT = '<script id="report" type="application/json">null</script>'


def overview(view: JobView, faults: int = 0) -> dict[str, Any]:
    """Return the content above the charts as JSON: state, figures, processes, alerts and faults.

    Args:
        faults: Maximum number of faults, the newest ones, or 0 for all.
    """
    processes = _table(
        "Processes",
        ("Process", "Machine", "State", "Speed", "Memory", "CPU cores"),
        (
            (row.name, row.machine, row.words, row.speed, row.memory, row.cores)
            for row in view.processes
        ),
        [process.mood for process in view.processes],
    )
    alerts = _table(
        "Alerts in force" if view.is_running else "Alerts",
        ("Since", "Alert", "What"),
        map(_alert_row, view.alerts),
        ["bad" if alert.severity == "critical" else "warn" for alert in view.alerts],
    )
    newest = [(clock(fault.at), fault.member or "job", fault.text) for fault in view.faults][
        -faults:
    ]
    all_tables = (processes, alerts, _table("Faults", ("Time", "Process", "What happened"), newest))
    return {
        "state": view.state,
        "badge": view.badge,
        "figures": [list(astuple(figure)) for figure in view.figures],
        "tables": [table for table in all_tables if table["rows"]],
        "marks": list(map(list, view.marks)),
        "finished": [row.series for row in view.processes if row.words == "finished"],
    }


def _alert_row(alert: FiredAlert) -> tuple[str, ...]:
    until = "" if alert.until is None else f" to {clock(alert.until)}"
    condition = f"{alert.title} {alert.when}{alert.series and f' ({alert.series})'}"
    return f"{clock(alert.since)}{until}", alert.name, condition


def _table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], moods: Sequence[str] = ()
) -> Table:
    rows = [list(row) for row in rows]
    return {"title": title, "columns": list(columns), "rows": rows, "moods": list(moods)}


def dashboard_page(report: str = "null") -> str:
    """Return the HTML of the page.

    Args:
        report: Content of a report, as JSON. By default the page shows the running job whose launcher
            serves it.
    """
    return _page().replace(_CONTENT, _CONTENT.replace("null", report.replace("<", "\\u003c")))


@functools.cache
def _page() -> str:
    folder = files(__package__)
    page = folder.joinpath("dashboard.html").read_text("utf-8")
    for name in _PARTS:
        page = page.replace(f"/* {name} */", folder.joinpath(name).read_text("utf-8"))
    return page


def write_report(folder: Path, to: Path | None = None) -> Path:
    """Write the report of a job, and return its path.

    Args:
        to: Path of the report, or None for the folder of the logs.

    Raises:
        FileNotFoundError: The job has no history.
        FrameError: The history is damaged.
    """
    where = local_path(to or folder / REPORT)
    where.write_text(job_report(read_history(folder), is_running=is_claimed(folder)), "utf-8")
    return where


def job_report(job: PastJob, is_running: bool = False) -> str:
    """Return the report of a job as HTML."""
    content = {
        "job": job.heading["job"],
        "overview": overview(view_of(job, is_running)),
        "zone": zone(job.heading["began"]),
        "panels": job.heading["panels"],
        "frames": job.frames,
        "tables": tables(job),
    }
    return dashboard_page(json.dumps(content, separators=(",", ":")))


def tables(job: PastJob) -> list[Table]:
    """Return the tables that are in the report and not on the page."""
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
                (title, f"{sum(filter(None, counts.values())):g}")
                for title in ("Torn steps", "Pushes that came again")
                if (counts := job.last(title))
            ],
        ),
        _table(
            "What was said",
            ("Time", "Process", "Text"),
            [
                (clock(event.at), event.member, event.text)
                for event in job.events
                if event.kind == "said"
            ],
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
    """Yield a row for each worker, with its step times (`step_times`) as texts, for the report."""
    for worker, step, without_waiting, ratio in step_times(job):
        note = "slow" if ratio >= SLOW else ""
        texts = number_text(step, "s"), number_text(without_waiting, "s"), f"{ratio:.2f}"
        yield worker, *texts, note
