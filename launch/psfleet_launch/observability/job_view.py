"""A job at a glance, for a terminal: how far it is, what each process does, what went wrong lately."""

from collections.abc import Callable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from psfleet_launch.observability.job_figures import logged
from psfleet_launch.observability.job_history import PastJob
from psfleet_launch.observability.job_report import clock, duration, incidents, state

__all__ = ["job_view"]

_INCIDENTS = 8  # that are shown
_Format = Callable[[float], str]
_Ask = Callable[[str], dict[str, float | None]]


def _share(value: float) -> str:
    return f"{value:.0%}"


def _memory(value: float) -> str:
    return f"{value / 2**20:,.0f} MiB"


def _rate(value: float) -> str:
    return f"{value:,.0f}/s"


_WORKERS: tuple[tuple[str, str, _Format], ...] = (
    ("step", "Step time by worker", duration),
    ("pulls", "Time in pulls", _share),
    ("pushes", "Time in pushes", _share),
    ("waiting", "Time waiting", _share),
    ("data", "Time waiting for data", _share),
    ("loss", "Loss", "{:.4g}".format),
)
_SERVERS: tuple[tuple[str, str, _Format], ...] = (
    ("pushes", "Pushes per second by server", _rate),
    ("push", "Time of a push, median", duration),
    ("received", "Received by servers", lambda value: f"{_memory(value)}/s"),
    ("memory", "Resident memory", _memory),
)
_STANDBYS: tuple[tuple[str, str, _Format], ...] = (
    ("ready", "Standby is ready", lambda value: "yes" if value else "no"),
    ("lacks", "Records that the standby lacks", "{:,.0f}".format),
    ("takes", "Taken by standbys", lambda value: f"{_memory(value)}/s"),
    ("memory", "Memory of standbys", _memory),
)
"""Columns: heading, panel and how its values are shown."""


def job_view(job: PastJob, is_running: bool) -> RenderableType:
    """What `psfleet top` shows of a history: of a job that is over the last known figures."""
    ask = job.newest if is_running else job.last
    shown: list[RenderableType] = [
        Text.assemble((job.heading["job"], "bold"), "  ", state(job, is_running)),
        Text(" · ".join(_progress(ask)) or "no figures yet"),
    ]
    if job.frames:
        shown += [_table("worker", ask, _WORKERS), _table("server", ask, _SERVERS)]
        if ask("Standby is ready"):
            shown.append(_table("standby", ask, _STANDBYS))
    shown += [
        Text(f"{clock(one.at)}  {one.member or 'job'}: {text}", style="red")
        for one, text in list(incidents(job))[-_INCIDENTS:]
    ]
    return Group(*shown)


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
    cores = {
        name.removeprefix(f"{role} "): value
        for name, value in ask("CPU cores in use").items()
        if name.startswith(f"{role} ")
    }
    found = [(ask(title), shown) for _, title, shown in columns]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (role, "CPU", *(heading for heading, _, _ in columns)):
        table.add_column(heading, justify="left" if heading == role else "right", no_wrap=True)
    ranks = {rank for series in (cores, *(series for series, _ in found)) for rank in series}
    for rank in sorted(ranks, key=lambda rank: (len(rank), rank)):
        cells = [_cell(cores.get(rank), "{:.2f}".format)]
        cells += [_cell(series.get(rank), shown) for series, shown in found]
        table.add_row(rank, *cells)
    return table


def _cell(value: float | None, shown: _Format) -> str:
    return "" if value is None else shown(value)
