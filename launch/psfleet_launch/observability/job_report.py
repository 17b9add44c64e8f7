"""The page of a job: one HTML file of its parts, which loads nothing, for a running job and for a report.

The charts are drawn by uPlot 1.6.32, as the npm package of that name has it; its licence is in the page.

One file, which loads nothing: whoever gets it by mail sees what the operator saw.
"""

import functools
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from psfleet.settings.kinds import local_path
from psfleet_launch.job.job_folder import REPORT, is_claimed
from psfleet_launch.observability.job_history import PastJob, read_history
from psfleet_launch.observability.job_incidents import clock, duration, moment
from psfleet_launch.observability.job_overview import Table, overview

_PARTS = (
    "dashboard.css",
    "dashboard.js",
    "charts.js",
    "uplot.min.css",
    "uplot.min.js",
    "uplot-licence.txt",
)
_PLACE = '<script id="report" type="application/json">null</script>'


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


_SLOW = 1.5
"""A process is called slow from this multiple of the median of the others on."""


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


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    return {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]}


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
    """Each worker's step time, with and without waiting, the slowest first.

    In sync mode all workers have the step time of the slowest; the time in pulls and waits of the others
    tells which one that is.
    """
    steps = _means(job.panel("Step time by worker"))
    pulls, waits = _means(job.panel("Time in pulls")), _means(job.panel("Time waiting"))
    own = {
        worker: time * max(1 - pulls.get(worker, 0.0) - waits.get(worker, 0.0), 0.0)
        for worker, time in steps.items()
    }
    for worker in sorted(own, key=lambda worker: -own[worker]):
        others = [time for other, time in own.items() if other != worker]
        usual = statistics.median(others) if others else 0.0
        ratio = own[worker] / usual if usual else 1.0
        yield (
            worker,
            duration(steps[worker]),
            duration(own[worker]),
            f"{ratio:.2f}",
            "slow" if ratio >= _SLOW else "",
        )


def _means(frames: Iterable[dict[str, float | None]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for frame in frames:
        for name, value in frame.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    return {name: statistics.fmean(each) for name, each in values.items()}
