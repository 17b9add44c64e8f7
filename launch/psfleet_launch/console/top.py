"""Draws a job in a terminal, for `psfleet top`: its progress, a table for each role, and its last faults.

`observability/job_view.py` computes the content. The page of `--watch` and the report show the same content.
"""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from psfleet.core.base.panels.panel import number_text
from psfleet_launch.console.progress_line import progress_line
from psfleet_launch.observability.job_view import Ask, JobView, clock

_MOST_FAULTS = 8
_COLUMNS = {
    "worker": {
        "CPU": "CPU cores in use",
        "step": "Step time by worker",
        "steps": "Steps per second",
        "pulls": "Time in pulls",
        "pushes": "Time in pushes",
        "waiting": "Time waiting",
        "data": "Time waiting for data",
        "loss": "Loss",
    },
    "server": {
        "CPU": "CPU cores in use",
        "pushes": "Pushes per second by server",
        "push": "Time of a push, median",
        "received": "Received by servers",
        "sent": "Sent by servers",
        "memory": "Resident memory",
    },
    "standby": {
        "CPU": "CPU cores in use",
        "ready": "Standby is ready",
        "lacks": "Records that the standby lacks",
        "takes": "Taken by standbys",
        "memory": "Resident memory",
    },
}
"""Columns of the table of each role: heading, and title of the panel with the values."""
_SAID_BY_SERVERS = ("Standby is ready", "Records that the standby lacks")


def top_screen(view: JobView) -> RenderableType:
    """Return the screen of `psfleet top` for a job."""
    parts: list[RenderableType] = [
        Text.assemble((view.job.heading["job"], "bold"), "  ", view.state),
        Text(progress_line(view.ask) or "no figures yet"),
    ]
    if view.job.frames:
        roles = [role for role in _COLUMNS if role != "standby" or view.ask("Standby is ready")]
        parts += [_table(role, view) for role in roles]
    parts += [
        Text(f"{clock(fault.at)}  {fault.member or 'job'}: {fault.text}", style="red")
        for fault in view.faults[-_MOST_FAULTS:]
    ]
    return Group(*parts)


def top_object(view: JobView) -> dict[str, Any]:
    """Return the content of the screen as JSON: the values of every panel that has values, by title and
    series."""
    job = view.job
    ask: Ask = job.newest if view.is_running else job.last
    titles = [panel["title"] for panel in job.heading["panels"]]
    return {
        "job": job.heading["job"],
        "state": view.state,
        "is_running": view.is_running,
        "exit_code": job.code,
        "figures": {title: values for title in titles if (values := ask(title))},
    }


def _table(role: str, view: JobView) -> Table:
    def by_rank(title: str) -> dict[str, float | None]:
        prefix = "server " if title in _SAID_BY_SERVERS else f"{role} "
        return {
            name.removeprefix(prefix): value
            for name, value in view.ask(title).items()
            if name.startswith(prefix)
        }

    columns = _COLUMNS[role]
    figures = {title: by_rank(title) for title in columns.values()}
    units = {panel["title"]: panel["unit"] for panel in view.job.heading["panels"]}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (role, *columns):
        table.add_column(heading, justify="left" if heading == role else "right", no_wrap=True)
    ranks = {rank for series in figures.values() for rank in series}
    for rank in sorted(ranks, key=lambda rank: (len(rank), rank)):
        cells = (
            _cell(title, series.get(rank), units.get(title, "none"))
            for title, series in figures.items()
        )
        table.add_row(rank, *cells)
    return table


def _cell(title: str, value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if title == "Standby is ready":
        return "yes" if value else "no"
    return number_text(value, unit)
