"""`psfleet doctor`: whether machines are fit for a job, and what to change."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from psfleet_launch.agent.machine_checks import Finding
    from psfleet_launch.engines.launch_engine import Engine

__all__ = ["doctor"]


@click.command()
@click.option("--engine", default="local", show_default=True, help="The engine of the job.")
@click.option(
    "--peers",
    default="",
    metavar="HOST,...",
    help="All machines of the job, this one too: whether they reach each other, and how fast.",
)
@click.option(
    "--port", default=7164, show_default=True, help="Where each machine listens for its peers."
)
@click.option(
    "--wait",
    default=30.0,
    show_default=True,
    help="Seconds to wait for the check on other machines.",
)
def doctor(engine: str, peers: str, port: int, wait: float) -> int:
    """Check this machine and say what to change; exit code 1 if a job would fail.

    Run it on every machine of a job, under Slurm for instance with srun --ntasks-per-node=1 psfleet doctor.
    With --peers run it on all of them at the same time.
    """
    from psfleet_launch.engines.launch_engine import load_engine

    kind = load_engine(engine)
    fatal = False
    for one in _findings(kind, [host for host in peers.split(",") if host], port, wait):
        click.echo(f"{one.name:<14}{one.value}")
        if one.advice:
            click.echo(f"{'':<14}{'! ' if one.is_fatal else '- '}{one.advice}")
        fatal |= one.is_fatal
    return int(fatal)


def _findings(
    engine: "type[Engine]", peers: list[str], port: int, wait: float
) -> "Iterator[Finding]":
    from psfleet_launch.agent.machine_checks import check_machine

    yield from check_machine(engine)
    if peers:
        from psfleet_launch.agent.peer_checks import PeerCheck

        with PeerCheck(peers, port, wait) as check:
            yield from check.findings()
