"""`psfleet report`: one file about a job, for people who were not there."""

from pathlib import Path

import click

from psfleet.errors import ConfigError
from psfleet_launch.commands.job_argument import job_argument, job_folder
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
    folder = job_folder(log_dir, job)
    try:
        click.echo(str(write_report(folder, output)))
    except FileNotFoundError as error:
        raise ConfigError(
            f"job {job!r} cannot be reported: {error.filename!r} does not exist"
        ) from None
    return 0
