"""psfleet: what one does with a job besides starting it."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from psfleet.core.base.errors import ConfigError, PsfleetError
from psfleet.core.base.settings.environment import read_environment
from psfleet.core.engine.rules import import_rules
from psfleet_launch.commands.checkpoint_commands import ckpt, log
from psfleet_launch.commands.job_commands import jobs, logs, mode, report, scale, stop, top
from psfleet_launch.commands.machine_commands import agent, certs, doctor
from psfleet_launch.commands.model_commands import export, models, predict, serve
from psfleet_launch.commands.options import (
    CommandGroup,
    merged,
    requested,
    run_command,
    strategy_options,
)

_HEADINGS = {
    "Jobs": ("jobs", "top", "logs", "report", "mode", "scale", "stop", "plan"),
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
    """Watch, change and inspect jobs, use what they have trained, and prepare machines for them.

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


@psfleet.command(context_settings={"allow_interspersed_args": False})
@strategy_options("pipeline")
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def plan(
    context: click.Context,
    /,
    strategy: str | None,
    script: str,
    arguments: tuple[str, ...],
    **flags: Any,
) -> int:
    """Say what a strategy means for SCRIPT: memory of each process, bytes, schedule and bubble.

    The script runs by itself up to its first training step, which is measured and not applied.
    """
    parts = merged(requested(context), file=strategy)
    stages = int(parts.get("pipeline", {}).get("stages", 1))
    with tempfile.TemporaryDirectory(prefix="psfleet-") as folder:
        return _plan(
            [script, *arguments], json.dumps(parts) if parts else "", stages, Path(folder, "plan")
        )


def _plan(words: Sequence[str], strategy: str, stages: int, out: Path) -> int:
    """Run the script until it has written its plan; show that, or why there is none.

    BLAS has as many threads as it would have in a job of one worker of these stages.
    """
    share = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // stages))}
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PSFLEET_", "PADDLE_", "TRAINING_ROLE"))
    }
    process = subprocess.run(
        [sys.executable, *words],
        text=True,
        capture_output=True,
        check=False,
        env=share | variables | {"PSFLEET_PLAN": str(out), "PSFLEET_STRATEGY": strategy},
    )
    if process.returncode or not out.exists():
        why = process.stderr.strip() or "it ended without a training step"
        raise ConfigError(f"{words[0]} has no plan:\n{why}")
    print(f"plan of {words[0]}: {out.read_text().rstrip()}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    return run_command(psfleet, "psfleet", arguments, (PsfleetError, OSError))


if __name__ == "__main__":
    sys.exit(main())
