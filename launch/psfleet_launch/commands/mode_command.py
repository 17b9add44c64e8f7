"""`psfleet mode`: let a running job go on in another consistency mode."""

import time
from pathlib import Path

import click

from psfleet.consistency import MODES
from psfleet.errors import ConfigError, FrameError
from psfleet.formats.mode_request import DONE, read_answer, read_request, write_request
from psfleet.settings.kinds import one_of
from psfleet_launch.commands.job_argument import job_argument, job_folder
from psfleet_launch.job.job_folder import is_claimed

__all__ = ["mode"]

_LOOK = 0.1  # seconds between two looks whether the workers have been told


def _forms() -> str:
    """What may be wanted: `async`, `ssp[:STALENESS]`."""
    numbers = {name: known.main_setting.upper() for name, known in MODES.items()}
    forms = (f"{name}[:{number}]" if number else name for name, number in numbers.items())
    return one_of(*forms).wanted


_HELP = f"""Change the mode of the running JOB at the next barrier of its workers.

MODE is {_forms()}. Barriers are fleet.barrier_worker() and the ends of fleet.shard loops.
"""


@click.command(help=_HELP)
@job_argument
@click.option(
    "--wait",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help="Seconds until the workers must have been told; the wish stays beyond that.",
)
@click.argument("wanted", metavar="MODE[:NUMBER]")
def mode(log_dir: Path, job: str, wait: float, wanted: str) -> int:
    """See _HELP."""
    part, folder = _part(wanted), job_folder(log_dir, job)
    _check_running(folder)
    number = _number(folder) + 1
    (folder / DONE).unlink(missing_ok=True)
    write_request(folder, number, part)
    if not _told(folder, number, wait):
        raise ConfigError(
            f"the workers of {job!r} have met at no barrier within {wait:g} s; the wish for "
            f"{wanted!r} stays, and they follow it at their next one"
        )
    click.echo(f"the workers of {job} have met and were told to go on in mode {wanted}")
    return 0


def _part(wanted: str) -> dict[str, str | int]:
    """The settings of `ssp:4`, checked."""
    from psfleet.strategy import Settings  # here: it loads NumPy

    name, colon, number = wanted.partition(":")
    part: dict[str, str | int] = {"mode": name}
    if colon:
        setting = MODES[name].main_setting if name in MODES else ""
        if not setting or not number.isdigit():
            raise ConfigError(f"mode {wanted!r} is none; name {_forms()}")
        part[setting] = int(number)
    Settings.from_parts({"consistency": part})
    return part


def _number(folder: Path) -> int:
    """Of the last request; 0: there was none, or it was none."""
    try:
        return read_request(folder)[0]
    except (FileNotFoundError, FrameError):
        return 0


def _check_running(folder: Path) -> None:
    if not is_claimed(folder):
        raise ConfigError(f"job {folder.name!r} is not running; only one that does has a mode")


def _told(folder: Path, number: int, wait: float) -> bool:
    deadline = time.monotonic() + wait
    while read_answer(folder) != number:
        if time.monotonic() > deadline:
            return False
        _check_running(folder)
        time.sleep(_LOOK)
    return True
