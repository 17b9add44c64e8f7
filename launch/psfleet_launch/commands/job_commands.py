"""The commands about a launched job: jobs, stop, logs, report, top, mode and scale.

They find a job by the folder of its logs. A request to a running job is a file in that folder; the launcher
or server 0 replies with another file. No command connects to the servers.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.live import Live

from psfleet.core.base.errors import ConfigError, FrameError
from psfleet.core.base.job_files import DONE, read_reply, read_request, write_request
from psfleet.core.base.scaling_files import read_scaled, write_scale
from psfleet.core.base.settings.kinds import one_of
from psfleet.core.engine.consistency import MODES
from psfleet_launch.console.top import top_object, top_screen
from psfleet_launch.job.job_folder import HISTORY, claimed_by, is_claimed
from psfleet_launch.observability.job_history import read_history
from psfleet_launch.observability.job_view import JobView, view_of
from psfleet_launch.observability.page_and_report import write_report

T = TypeVar("T")


_EVERY = 1.0  # seconds between two readings of the history
_LOOK = 0.1  # seconds between two readings of a reply


def job_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that gives a command the argument JOB and the option --log-dir."""
    where = click.option(
        "--log-dir",
        type=click.Path(path_type=Path),
        default=Path("psfleet-logs"),
        show_default=True,
        help="Where the job's logs are, as it was launched.",
    )
    return where(click.argument("job")(command))


def job_folder(log_dir: Path, job: str) -> Path:
    """Return the folder of a job's logs.

    Raises:
        ConfigError: There is no such job.
    """
    if not (log_dir / job / "serverlog.0").is_file():
        raise ConfigError(f"{str(log_dir)!r} has no job {job!r}; name its logs with --log-dir")
    return log_dir / job


def recorded_job(log_dir: Path, job: str) -> Path:
    """Return the folder of a job's logs. The job must have a history file.

    Raises:
        ConfigError: There is no such job, or an older version of psfleet has launched it.
    """
    folder = job_folder(log_dir, job)
    if not (folder / HISTORY).is_file():
        raise ConfigError(f"job {job!r} has no history: {str(folder / HISTORY)!r} does not exist")
    return folder


@click.command()
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    default=Path("psfleet-logs"),
    show_default=True,
    help="Where jobs have their logs.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def jobs(log_dir: Path, as_json: bool) -> int:
    """List the jobs that have logs, and show whether they are running or how they have ended."""
    for folder in sorted(log.parent for log in log_dir.glob("*/serverlog.0")):
        code = read_history(folder).code if (folder / HISTORY).is_file() else None
        state = (
            "running" if is_claimed(folder) else "ended" if code is None else f"exit code {code}"
        )
        entry = {"job": folder.name, "state": state, "logs": str(folder)}
        click.echo(json.dumps(entry) if as_json else f"{folder.name}  {state}  {folder}")
    return 0


@click.command()
@job_argument
def stop(log_dir: Path, job: str) -> int:
    """End JOB like Ctrl-C in its terminal. Run it on the machine of the job's launcher."""
    launcher = claimed_by(job_folder(log_dir, job))
    if launcher is None:
        raise ConfigError(f"job {job!r} does not run on this machine; see psfleet jobs")
    os.kill(launcher, signal.SIGTERM)
    click.echo(f"job {job} is told to end")
    return 0


@click.command()
@job_argument
@click.argument("member", default="worker.0")
def logs(log_dir: Path, job: str, member: str) -> int:
    """Print the output of a MEMBER of JOB, such as server.1. The default is worker.0."""
    folder = job_folder(log_dir, job)
    role, _, rank = member.partition(".")
    file = folder / f"{role}log.{rank}"
    if not file.is_file():
        members = sorted(p.name.replace("log.", ".") for p in folder.glob("*log.[0-9]*"))
        raise ConfigError(f"job {job!r} has no log of {member!r}; it has {', '.join(members)}")
    click.echo(file.read_text(errors="replace"), nl=False)
    return 0


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

    It shows the job's processes, curves, slow workers, deaths, takeovers and losses. The job may be running
    or finished, or its launcher may have been killed.
    """
    click.echo(str(write_report(recorded_job(log_dir, job), output)))
    return 0


@click.command()
@job_argument
@click.option("--once", is_flag=True, help="Print what there is now, and end.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object of all figures, and end.")
def top(log_dir: Path, job: str, once: bool, as_json: bool) -> int:
    """Show the progress and the processes of JOB until it ends or Ctrl-C.

    Without a terminal the screen is printed once. NO_COLOR turns colours off. A job with `--no-progress`
    and without `--watch` has no figures.
    """
    folder, console = recorded_job(log_dir, job), Console(highlight=False)
    view = _view(folder)
    if as_json:
        click.echo(json.dumps(top_object(view)))
        return 0
    if once or not console.is_terminal or not view.is_running:
        console.print(top_screen(view))
        return 0
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(top_screen(view), console=console, auto_refresh=False) as live,
    ):
        while view.is_running:
            time.sleep(_EVERY)
            view = _view(folder)
            live.update(top_screen(view), refresh=True)
    return 0


def _view(folder: Path) -> JobView:
    # Check first whether the job runs, then read its history. If the job ends in between, the history is
    # complete.
    is_running = is_claimed(folder)
    return view_of(read_history(folder), is_running)


def _forms() -> str:
    """List the possible modes: `async`, `ssp[:STALENESS]`."""
    numbers = {name: declared.main_setting.upper() for name, declared in MODES.items()}
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
    help="Seconds to wait until the workers have the request; it stays in force after that.",
)
@click.argument("form", metavar="MODE[:NUMBER]")
def mode(log_dir: Path, job: str, wait: float, form: str) -> int:
    """Run `psfleet mode`. Its help text is _HELP."""
    part, folder = _part(form), job_folder(log_dir, job)
    _check_running(folder)
    number = _number(folder) + 1
    (folder / DONE).unlink(missing_ok=True)
    write_request(folder, number, part)
    if _awaited(lambda: read_reply(folder), lambda reply: reply == number, folder, wait) is None:
        raise ConfigError(
            f"the workers of {job!r} have met at no barrier within {wait:g} s; the wish for "
            f"{form!r} stays, and they follow it at their next one"
        )
    click.echo(f"the workers of {job} have met and were told to go on in mode {form}")
    return 0


@click.command()
@job_argument
@click.option("--servers", type=int, required=True, help="How many servers the job is to have.")
@click.option(
    "--wait",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help="Seconds to wait until it has them; the request stays in force after that.",
)
def scale(log_dir: Path, job: str, servers: int, wait: float) -> int:
    """Change the number of servers of the running JOB at the next collective of its workers.

    Rows move between the servers while the workers wait for each other: at fleet.barrier_worker(), an
    all-reduce, or the end of a fleet.shard loop. No push is lost, and in sync mode the results of training
    stay bit-identical.
    """
    folder = job_folder(log_dir, job)
    _check_running(folder)
    number = write_scale(folder, servers)
    outcome = _awaited(
        lambda: read_scaled(folder), lambda reply: reply.number >= number, folder, wait
    )
    if outcome is None:
        raise ConfigError(
            f"the workers of {job!r} have come to no collective within {wait:g} s; the wish for {servers} "
            "servers stays, and they follow it at their next one"
        )
    if outcome.why:
        raise ConfigError(f"job {job!r} has as many servers as before: {outcome.why}")
    click.echo(f"job {job} has {len(outcome.endpoints)} servers")
    return 0


def _part(form: str) -> dict[str, str | int]:
    """Return the checked settings of a mode in the form `ssp:4`."""
    from psfleet.core.runtime.strategy import Settings  # imported here, because it loads NumPy

    name, colon, number = form.partition(":")
    part: dict[str, str | int] = {"mode": name}
    if colon:
        setting = MODES[name].main_setting if name in MODES else ""
        if not setting or not number.isdigit():
            raise ConfigError(f"mode {form!r} is none; name {_forms()}")
        part[setting] = int(number)
    Settings.from_parts({"consistency": part})
    return part


def _number(folder: Path) -> int:
    """Return the number of the last request, or 0 if there was no request or its file is damaged."""
    try:
        return read_request(folder)[0]
    except (FileNotFoundError, FrameError):
        return 0


def _check_running(folder: Path) -> None:
    if not is_claimed(folder):
        raise ConfigError(f"job {folder.name!r} is not running; only one that does can change")


def _awaited(
    read: Callable[[], T], is_it: Callable[[T], bool], folder: Path, wait: float
) -> T | None:
    """Read repeatedly until `is_it` is True for the content, and return the content. None after `wait`
    seconds."""
    deadline = time.monotonic() + wait
    while not is_it(reply := read()):
        if time.monotonic() > deadline:
            return None
        _check_running(folder)
        time.sleep(_LOOK)
    return reply
