"""The argument JOB of commands about a job that was launched before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from psfleet.errors import ConfigError
from psfleet_launch.job.job_folder import HISTORY

__all__ = ["job_argument", "job_folder", "recorded_job"]


def job_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the argument JOB and the option --log-dir."""
    where = click.option(
        "--log-dir",
        type=click.Path(path_type=Path),
        default=Path("psfleet-logs"),
        show_default=True,
        help="Where the job's logs are, as it was launched.",
    )
    return where(click.argument("job")(command))


def job_folder(log_dir: Path, job: str) -> Path:
    """The folder of a job's logs.

    Raises:
        ConfigError: There is no such job.
    """
    if not (log_dir / job / "serverlog.0").is_file():
        raise ConfigError(f"{str(log_dir)!r} has no job {job!r}; name its logs with --log-dir")
    return log_dir / job


def recorded_job(log_dir: Path, job: str) -> Path:
    """The same, of a job that has a history.

    Raises:
        ConfigError: There is no such job, or an older psfleet has launched it.
    """
    folder = job_folder(log_dir, job)
    if not (folder / HISTORY).is_file():
        raise ConfigError(f"job {job!r} has no history: {str(folder / HISTORY)!r} does not exist")
    return folder
