"""The figures of a job in other forms: in a line, for TensorBoard, and at a glance for a terminal."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from psfleet.core.base.observability.logged_values import EventFile
from psfleet.core.base.observability.process_panels import PANELS
from psfleet_launch.observability.job_history import PastJob, clock, duration, incidents, state

Series = Mapping[str, float | None]

_PLACES = {panel.title: place for place, panel in enumerate(PANELS)}


def logged(series: Series) -> Iterator[str]:
    """`accuracy 0.93` for each name that scripts have logged: the mean over the workers.

    Args:
        series: The answer of the panel "Logged values", by name and worker.
    """
    values: dict[str, list[float]] = {}
    for key, value in series.items():
        if value is not None:
            values.setdefault(key.rpartition(" worker ")[0], []).append(value)
    for name, each in values.items():
        yield f"{name} {statistics.fmean(each):.4g}"


def logged_in(frame: Mapping[str, Any]) -> str:
    """The same of a frame of the recorder, in one line."""
    return " · ".join(logged(frame["panels"][_PLACES["Logged values"]]))


class FigureEvents:
    """Writes the answers to all panels' questions as scalars, a tag for each panel and series."""

    def __init__(self, folder: Path) -> None:
        self._file = EventFile(folder)

    def add_frame(self, frame: Mapping[str, Any]) -> None:
        """Write one frame of the recorder; the axis is that of the panel "Steps"."""
        steps = frame["panels"][_PLACES["Steps"]].get("") or 0.0
        scalars = {
            f"{panel.title}/{name}".removesuffix("/"): value
            for panel, series in zip(PANELS, frame["panels"], strict=True)
            if panel.title != "Logged values"  # workers write these themselves, every one
            for name, value in series.items()
            if value is not None
        }
        self._file.add(scalars, int(steps), frame["at"])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


_INCIDENTS = 8  # that are shown
_Format = Callable[[float], str]
_Ask = Callable[[str], dict[str, float | None]]


def _memory(value: float) -> str:
    return f"{value / 2**20:,.0f} MiB"


def _traffic(value: float) -> str:
    return f"{value / 1000:,.0f} kB/s"


_share: _Format = "{:.0%}".format
_WORKERS: tuple[tuple[str, str, _Format], ...] = (
    ("step", "Step time by worker", duration),
    ("steps/s", "Steps per second", "{:,.3g}/s".format),
    ("pulls", "Time in pulls", _share),
    ("pushes", "Time in pushes", _share),
    ("waiting", "Time waiting", _share),
    ("data", "Time waiting for data", _share),
    ("loss", "Loss", "{:.4g}".format),
)
_SERVERS: tuple[tuple[str, str, _Format], ...] = (
    ("pushes", "Pushes per second by server", "{:,.0f}/s".format),
    ("push", "Time of a push, median", duration),
    ("received", "Received by servers", _traffic),
    ("sent", "Sent by servers", _traffic),
    ("memory", "Resident memory", _memory),
)
_STANDBYS: tuple[tuple[str, str, _Format], ...] = (
    ("ready", "Standby is ready", lambda value: "yes" if value else "no"),
    ("lacks", "Records that the standby lacks", "{:,.0f}".format),
    ("takes", "Taken by standbys", _traffic),
    ("memory", "Resident memory", _memory),
)
"""Columns: heading, panel and how its values are shown."""
_SAID_BY_SERVERS = ("Standby is ready", "Records that the standby lacks")


def job_view(job: PastJob, is_running: bool) -> RenderableType:
    """Return the view of `psfleet top` for a history: of a job that is over the last known figures."""
    ask = job.newest if is_running else job.last
    parts: list[RenderableType] = [
        Text.assemble((job.heading["job"], "bold"), "  ", state(job, is_running)),
        Text(" · ".join(_progress(ask)) or "no figures yet"),
    ]
    if job.frames:
        parts += [_table("worker", ask, _WORKERS), _table("server", ask, _SERVERS)]
        if ask("Standby is ready"):
            parts.append(_table("standby", ask, _STANDBYS))
    parts += [
        Text(f"{clock(one.at)}  {one.member or 'job'}: {text}", style="red")
        for one, text in list(incidents(job))[-_INCIDENTS:]
    ]
    return Group(*parts)


def job_object(job: PastJob, is_running: bool) -> dict[str, Any]:
    """The same for programs: the values of every panel that has some, by title and series."""
    ask = job.newest if is_running else job.last
    titles = [panel["title"] for panel in job.heading["panels"]]
    return {
        "job": job.heading["job"],
        "state": state(job, is_running),
        "is_running": is_running,
        "exit_code": job.code,
        "figures": {title: values for title in titles if (values := ask(title))},
    }


def _progress(ask: _Ask) -> Iterator[str]:
    for title, words in (
        ("Steps", "{:,.0f} steps"),
        ("Samples per second", "{:,.0f} samples/s"),
        ("Rows", "{:,.0f} rows"),
        ("Torn steps", "{:,.0f} torn steps"),
        ("Age of the last snapshot", "last snapshot {:,.0f} s old"),
    ):
        values = [value for value in ask(title).values() if value is not None]
        if values and (any(values) or title != "Torn steps"):
            yield words.format(sum(values))
    yield from logged(ask("Logged values"))


def _table(role: str, ask: _Ask, columns: tuple[tuple[str, str, _Format], ...]) -> Table:
    """A row for each process of a role."""

    def by_rank(title: str) -> dict[str, float | None]:
        prefix = "server " if title in _SAID_BY_SERVERS else f"{role} "
        return {
            name.removeprefix(prefix): value
            for name, value in ask(title).items()
            if name.startswith(prefix)
        }

    cores = by_rank("CPU cores in use")
    visible = [(by_rank(title), form) for _, title, form in columns]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (role, "CPU", *(heading for heading, _, _ in columns)):
        table.add_column(heading, justify="left" if heading == role else "right", no_wrap=True)
    ranks = {rank for series in (cores, *(series for series, _ in visible)) for rank in series}
    for rank in sorted(ranks, key=lambda rank: (len(rank), rank)):
        cells = [_cell(cores.get(rank), "{:.2f}".format)]
        cells += [_cell(series.get(rank), form) for series, form in visible]
        table.add_row(rank, *cells)
    return table


def _cell(value: float | None, form: _Format) -> str:
    return "" if value is None else form(value)
