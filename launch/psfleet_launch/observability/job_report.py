"""The report of a job: the page of `--watch` with the history of a running or finished job in it.

One file, which loads nothing: whoever gets it by mail sees what the operator saw.
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from psfleet_launch.job.job_folder import REPORT, is_claimed
from psfleet_launch.observability.job_history import JobEvent, PastJob, read_history

__all__ = [
    "clock",
    "duration",
    "incidents",
    "job_report",
    "slow_processes",
    "state",
    "tables",
    "write_report",
]

_PLACE = '<script id="report" type="application/json">null</script>'
_SLOW = 1.5
"""A process is called slow from this multiple of the median of the others on."""

Table = dict[str, Any]


def write_report(folder: Path, to: Path | None = None) -> Path:
    """Write the report of the job with these logs, by default into their folder; where it is.

    Raises:
        FileNotFoundError: The job has no history.
        FrameError: Its history is damaged.
    """
    where = to or folder / REPORT
    where.write_text(job_report(read_history(folder), is_running=is_claimed(folder)), "utf-8")
    return where


def job_report(job: PastJob, is_running: bool = False) -> str:
    """The page."""
    content = {
        "job": job.heading["job"],
        "state": state(job, is_running),
        "panels": job.heading["panels"],
        "frames": job.frames,
        "tables": tables(job),
    }
    said = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    page = files(__package__).joinpath("dashboard.html").read_text("utf-8")
    return page.replace(_PLACE, _PLACE.replace("null", said))


def state(job: PastJob, is_running: bool) -> str:
    """One sentence: is it over, and how?"""
    began = job.heading["began"]
    last = max([began, *(one.at for one in job.events), *(one["at"] for one in job.frames)])
    spent = f"{duration(last - began)} from {_moment(began)} on"
    if job.code is not None:
        return f"ended with exit code {job.code} after {spent}"
    if is_running:
        return f"runs: {spent}"
    return f"no end is recorded: its launcher was killed after {spent}"


def tables(job: PastJob) -> list[Table]:
    """What the report says besides the panels."""
    made = [
        _table("The job", (), _facts(job)),
        _table(
            "Deaths and takeovers",
            ("Time", "Process", "What happened"),
            [(clock(one.at), one.member, text) for one, text in incidents(job)],
        ),
        _table(
            "Speed of processes",
            ("Process", "Step time", "Without waiting", "Against the others", ""),
            slow_processes(job),
        ),
        _table("Processes", ("Process", "Machine", "Starts", "Deaths", "State"), _processes(job)),
        _table(
            "Losses",
            ("What", "Count"),
            [
                (title, f"{sum(filter(None, job.last(title).values())):g}")
                for title in ("Torn steps", "Pushes that came again", "Steps with NaN or infinity")
                if job.last(title)
            ],
        ),
        _table(
            "What was said",
            ("Time", "Process", "Text"),
            [(clock(one.at), one.member, one.text) for one in job.events if one.kind == "said"],
        ),
    ]
    return [table for table in made if table["rows"]]


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    return {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]}


def _facts(job: PastJob) -> Iterator[tuple[str, str]]:
    said = job.heading
    yield "Script", said["script"]
    yield "Engine", said["engine"]
    for name, value in said["settings"].items():
        if name != "strategy":
            yield name.capitalize(), str(value)
    for part, settings in said["settings"].get("strategy", {}).items():
        yield (
            f"Strategy: {part}",
            ", ".join(f"{name} {value}" for name, value in settings.items()),
        )
    yield "Began", _moment(said["began"])
    yield "psfleet", said["psfleet"]
    if job.dropped:
        yield "Events that are not kept", f"{job.dropped:,}"


def incidents(job: PastJob) -> Iterator[tuple[JobEvent, str]]:
    """Deaths, silences, takeovers and restarts, in order, each with what is said about it."""
    ended: dict[str, float] = {}
    heirs: dict[str, tuple[str, float]] = {}  # by standby whose place it takes, and since when
    for one in job.events:
        match one.kind:
            case "ended":
                ended[one.member] = one.at
                if one.code:
                    yield one, f"ended with {_code(one.code)}{one.text and f': {one.text}'}"
            case "hung":
                yield one, one.text
            case "takeover":
                heirs[one.member] = one.text, ended.get(one.text, one.at)
                yield one, f"takes over from {one.text}"
            case "ready" if one.member in heirs:
                before, since = heirs.pop(one.member)
                yield one, f"has the place of {before} {duration(one.at - since)} after its end"
            case "started" if one.member in ended:
                yield one, "is started again"
            case "stop":
                yield one, f"the job is asked to end by {one.text}"


def slow_processes(job: PastJob) -> Iterator[tuple[str, ...]]:
    """Each worker's step time, with and without waiting, the slowest first.

    In sync mode all workers have the step time of the slowest; the time in pulls and waits of the others
    tells which one that is.
    """
    steps = _means(job.panel("Step time by worker"))
    pulls, waits = _means(job.panel("Time in pulls")), _means(job.panel("Time waiting"))
    own = {
        rank: time * max(1 - pulls.get(rank, 0.0) - waits.get(rank, 0.0), 0.0)
        for rank, time in steps.items()
    }
    for rank in sorted(own, key=lambda rank: -own[rank]):
        others = [time for other, time in own.items() if other != rank]
        usual = statistics.median(others) if others else 0.0
        ratio = own[rank] / usual if usual else 1.0
        yield (
            f"worker {rank}",
            duration(steps[rank]),
            duration(own[rank]),
            f"{ratio:.2f}",
            "slow" if ratio >= _SLOW else "",
        )


def _means(frames: Iterable[dict[str, float | None]]) -> dict[str, float]:
    """The mean of each series."""
    values: dict[str, list[float]] = {}
    for frame in frames:
        for name, value in frame.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    return {name: statistics.fmean(each) for name, each in values.items()}


def _processes(job: PastJob) -> Iterator[tuple[str, ...]]:
    machines = {
        member: machine
        for machine, members in job.heading["machines"].items()
        for member in members
    }
    only = next(iter(job.heading["machines"])) if len(job.heading["machines"]) == 1 else ""
    own: dict[str, list[JobEvent]] = {}
    for one in job.events:
        if one.kind in ("started", "ended"):
            own.setdefault(one.member, []).append(one)
    for member, events in own.items():
        deaths = sum(bool(one.code) for one in events)
        starts = sum(one.kind == "started" for one in events)
        last = events[-1]
        ended = f"ended with {_code(last.code)}" if last.code is not None else "running"
        yield member, machines.get(member, only), str(starts), str(deaths), ended


def _code(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def duration(seconds: float) -> str:
    """`3.2 min`."""
    if seconds >= 120:
        return f"{seconds / 3600:.1f} h" if seconds >= 7200 else f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().isoformat(" ", "seconds")


def clock(at: float) -> str:
    """The time of day, here."""
    return datetime.fromtimestamp(at).strftime("%H:%M:%S.%f")[:-5]
