"""The command `psfleet`: watch, change and inspect jobs, and use trained models. `psfleet-launch` starts
jobs."""

import sys
from collections.abc import Sequence

import click

from psfleet.core.base.errors import PsfleetError
from psfleet.core.base.settings.environment import read_environment
from psfleet.core.engine.rules import import_rules
from psfleet_launch.commands.checkpoint_commands import ckpt, log
from psfleet_launch.commands.job_commands import jobs, logs, mode, report, scale, stop, top
from psfleet_launch.commands.machine_commands import agent, certs, doctor
from psfleet_launch.commands.model_commands import export, models, predict, serve
from psfleet_launch.commands.options import CommandGroup, run_command

_HEADINGS = {
    "Jobs": ("jobs", "top", "logs", "report", "mode", "scale", "stop"),
    "Models": ("export", "predict", "serve", "models"),
    "Snapshots and logs": ("ckpt", "log"),
    "Machines": ("doctor", "certs", "agent"),
}


@click.group(
    cls=CommandGroup,
    headings=_HEADINGS,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.version_option(package_name="psfleet", prog_name="psfleet")
@click.pass_context
def psfleet(context: click.Context) -> None:
    """Watch, change and inspect jobs, use trained models, and prepare machines for jobs.

    psfleet-launch starts a job. `psfleet COMMAND --help` describes a command.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    import_rules(read_environment().rules)  # snapshots and logs refer to them


for _command in (
    *(agent, certs, ckpt, doctor, export, jobs, log, logs),
    *(mode, models, predict, report, scale, serve, stop, top),
):
    psfleet.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    return run_command(psfleet, "psfleet", arguments, (PsfleetError, OSError))


if __name__ == "__main__":
    sys.exit(main())
