"""The figures of a job in other forms: in a line, for TensorBoard, and at a glance for a terminal."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from psfleet.core.base.observability.logged_values import EventFile
from psfleet.core.base.observability.panels import number_text, rate_text
from psfleet.core.base.observability.process_panels import PANELS
from psfleet_launch.observability.job_history import PastJob, clock, incidents, state

Series = Mapping[str, float | None]

_PLACES = {panel.title: place for place, panel in enumerate(PANELS)}


_INCIDENTS = 8  # that are shown
_Ask = Callable[[str], Mapping[str, float | None]]
_WORKERS = (
    ("CPU", "CPU cores in use"),
    ("step", "Step time by worker"),
    ("steps", "Steps per second"),
    ("pulls", "Time in pulls"),
    ("pushes", "Time in pushes"),
    ("waiting", "Time waiting"),
    ("data", "Time waiting for data"),
    ("loss", "Loss"),
)
_SERVERS = (
    ("CPU", "CPU cores in use"),
    ("pushes", "Pushes per second by server"),
    ("push", "Time of a push, median"),
    ("received", "Received by servers"),
    ("sent", "Sent by servers"),
    ("memory", "Resident memory"),
)
_STANDBYS = (
    ("CPU", "CPU cores in use"),
    ("ready", "Standby is ready"),
    ("lacks", "Records that the standby lacks"),
    ("takes", "Taken by standbys"),
    ("memory", "Resident memory"),
)
"""Columns: heading and panel."""
_SAID_BY_SERVERS = ("Standby is ready", "Records that the standby lacks")


def logged(series: Series) -> Iterator[tuple[str, str]]:
    """Yield each name that scripts have logged, and the mean over the workers as text.

    Args:
        series: The answer of the panel "Logged values", by name and worker.
    """
    values: dict[str, list[float]] = {}
    for key, value in series.items():
        if value is not None:
            values.setdefault(key.rpartition(" worker ")[0], []).append(value)
    for name, each in values.items():
        yield name, number_text(statistics.fmean(each), "none")


def logged_in(frame: Mapping[str, Any]) -> str:
    """The same of a frame of the recorder, in one line."""
    return " · ".join(map(" ".join, logged(frame["panels"][_PLACES["Logged values"]])))


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


def job_view(job: PastJob, is_running: bool) -> RenderableType:
    """Return the view of `psfleet top` for a history: of a job that is over the last known figures."""
    ask: _Ask = job.newest if is_running else partial(_at_end, job)
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


def _at_end(job: PastJob, title: str) -> Mapping[str, float | None]:
    """Last known figures of a job that is over; of rates the usual ones, as none is left at the end."""
    is_rate = PANELS[_PLACES[title]].unit in ("cps", "Bps") or title == "CPU cores in use"
    return job.usual(title) if is_rate else job.last(title)


def _progress(ask: _Ask) -> Iterator[str]:
    forms: tuple[tuple[str, Callable[[float], str]], ...] = (
        ("Steps", "{:,.0f} steps".format),
        ("Samples per second", partial(rate_text, things="samples")),
        ("Rows", "{:,.0f} rows".format),
        ("Torn steps", "{:,.0f} torn steps".format),
        ("Age of the last snapshot", lambda age: f"last snapshot {number_text(age, 's')} old"),
    )
    for title, words in forms:
        values = [value for value in ask(title).values() if value is not None]
        if values and (any(values) or title != "Torn steps"):
            yield words(sum(values))
    yield from map(" ".join, logged(ask("Logged values")))


def _table(role: str, ask: _Ask, columns: tuple[tuple[str, str], ...]) -> Table:
    """A row for each process of a role."""

    def by_rank(title: str) -> dict[str, float | None]:
        prefix = "server " if title in _SAID_BY_SERVERS else f"{role} "
        return {
            name.removeprefix(prefix): value
            for name, value in ask(title).items()
            if name.startswith(prefix)
        }

    figures = {title: by_rank(title) for _, title in columns}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (role, *(heading for heading, _ in columns)):
        table.add_column(heading, justify="left" if heading == role else "right", no_wrap=True)
    ranks = {rank for series in figures.values() for rank in series}
    for rank in sorted(ranks, key=lambda rank: (len(rank), rank)):
        table.add_row(rank, *(_cell(title, series.get(rank)) for title, series in figures.items()))
    return table


def _cell(title: str, value: float | None) -> str:
    if value is None:
        return ""
    if title == "Standby is ready":
        return "yes" if value else "no"
    return number_text(value, PANELS[_PLACES[title]].unit)
