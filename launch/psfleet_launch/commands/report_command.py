"""`psfleet report`: one file about a job, for people who were not there."""

from pathlib import Path

import click

from psfleet_launch.commands.job_argument import job_argument, recorded_job
from psfleet_launch.observability.job_report import write_report

__all__ = ["report"]


@click.command()
@job_argument
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write it; by default report.html in the folder of the job's logs.",
)
def report(log_dir: Path, job: str, output: Path | None) -> int:
    """Write a report of JOB as one HTML file.

    It shows the job's processes, curves, slow workers, deaths, takeovers and losses. The job may be running,
    finished, or cut off by the death of its launcher.
    """
    click.echo(str(write_report(recorded_job(log_dir, job), output)))
    return 0
