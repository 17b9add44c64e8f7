"""`psfleet top`: a job in the terminal."""

import contextlib
import time
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live

from psfleet_launch.commands.job_argument import job_argument, recorded_job
from psfleet_launch.job.job_folder import is_claimed
from psfleet_launch.observability.job_history import PastJob, read_history
from psfleet_launch.observability.job_view import job_view

__all__ = ["top"]

_EVERY = 1.0  # seconds between two looks at the history


@click.command()
@job_argument
@click.option("--once", is_flag=True, help="Print what there is now, and end.")
def top(log_dir: Path, job: str, once: bool) -> int:
    """Show the progress and the processes of JOB until it ends or Ctrl-C.

    Without a terminal it is shown once. NO_COLOR turns colours off. A job with `--no-progress` and without
    `--watch` has no figures.
    """
    folder, console = recorded_job(log_dir, job), Console(highlight=False)
    past, is_running = _look(folder)
    if once or not console.is_terminal or not is_running:
        console.print(job_view(past, is_running))
        return 0
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(job_view(past, is_running), console=console, auto_refresh=False) as live,
    ):
        while is_running:
            time.sleep(_EVERY)
            past, is_running = _look(folder)
            live.update(job_view(past, is_running), refresh=True)
    return 0


def _look(folder: Path) -> tuple[PastJob, bool]:
    """The history, and whether the job runs."""
    is_running = is_claimed(folder)  # before its last lines are read
    past = read_history(folder)
    return past, is_running and past.code is None
