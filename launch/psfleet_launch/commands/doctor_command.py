"""`psfleet doctor`: whether this machine is fit for a job, and what to change."""

import click

__all__ = ["doctor"]


@click.command()
@click.option("--engine", default="local", show_default=True, help="The engine of the job.")
def doctor(engine: str) -> int:
    """Check this machine and say what to change; exit code 1 if a job would fail.

    Run it on every machine of a job, under Slurm for instance with srun --ntasks-per-node=1 psfleet doctor.
    """
    from psfleet_launch.engines.launch_engine import load_engine

    load_engine(engine)  # refuses a name that is none
    from psfleet_launch.agent.machine_checks import check_machine

    findings = [*check_machine(engine)]
    for one in findings:
        click.echo(f"{one.name:<14}{one.value}")
        if one.advice:
            click.echo(f"{'':<14}{'! ' if one.is_fatal else '- '}{one.advice}")
    return int(any(one.is_fatal for one in findings))
