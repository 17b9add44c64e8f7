"""The commands for the machines of a job: agent, certs and doctor.

`agent` runs processes of a job on this machine for a launcher elsewhere. `certs` makes credentials for
processes that a user starts by hand. `doctor` checks a machine before a job uses it.
"""

import dataclasses
import datetime
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from psfleet.core.base.errors import ConfigError
from psfleet.core.net.connections.credentials import CERTIFICATE_DAYS, Credentials

if TYPE_CHECKING:
    from psfleet_launch.agent.machine_checks import Finding
    from psfleet_launch.engines.launch_engine import Engine


_LONGEST = 1 << 16  # bytes of credentials
_AGAIN = 1.0  # seconds between attempts to reach the launcher


@click.command()
@click.option(
    "--join", "endpoint", required=True, metavar="HOST:PORT", help="Where the launcher listens."
)
@click.option(
    "--credentials",
    required=True,
    metavar="FILE",
    help="The file that the launcher has made; a folder: FOLDER/worker of psfleet certs; -: standard input, "
    "whose end then ends the agent.",
)
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Seconds to wait until the launcher listens.",
)
@click.option("--name", default="", help="What to call this machine; by default its name.")
@click.option(
    "--address",
    default="",
    help="Where servers on this machine listen; by default the address that faces the launcher.",
)
def agent(endpoint: str, credentials: str, wait: float, name: str, address: str) -> int:
    """Run processes of one job on this machine until the job is over.

    psfleet-launch --engine join prints this command; --engine ssh runs it. All processes end with the agent,
    and the agent ends when its connection to the launcher is lost for 10 s.
    """
    from psfleet_launch.job.spawn import children_without_grpc

    children_without_grpc()  # before the imports that load gRPC
    from psfleet.core.base.settings.server_endpoints import check_address
    from psfleet.core.net.connections.access import Access
    from psfleet.core.net.connections.credentials import Credentials
    from psfleet_launch.agent.agent import Agent
    from psfleet_launch.agent.launcher_link import LauncherLink
    from psfleet_launch.engines.remote.agent_messages import read_invitation, write_secrets
    from psfleet_launch.engines.remote.machine import describe, why_unreachable
    from psfleet_launch.job.job_folder import private_folder

    check_address(endpoint)
    with private_folder() as folder:
        credentials_folder = Path(credentials)
        if not credentials_folder.is_dir():
            files = read_invitation(_read(credentials), credentials)
            credentials_folder = write_secrets(folder, files)["agent"]
        access = Access(Credentials.read(credentials_folder))
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline and why_unreachable(endpoint):
            time.sleep(_AGAIN)
        link = LauncherLink(endpoint, access)
        hello = describe(name, address, endpoint)
        link.connect(hello)
        return Agent(link, folder, hello.name, 0 if credentials == "-" else -1).run()


def _read(credentials: str) -> bytes:
    """Return the line with the credentials, from a file or standard input.

    Reads only this line from standard input, which stays open: the agent ends when it is closed.
    """
    if credentials == "-":
        return sys.stdin.buffer.readline(_LONGEST)
    try:
        path = Path(credentials)
        if path.stat().st_mode & 0o077:
            raise ConfigError(
                f"{credentials!r} can be read by others than its owner; chmod 600 it, and start the job again"
            )
        return path.read_bytes()[:_LONGEST]
    except OSError as error:
        raise ConfigError(
            f"credentials {credentials!r} cannot be read ({error.strerror}); name the file that "
            "psfleet-launch --engine join has printed, while its job runs"
        ) from None


def usable(folder: Path, days: float) -> bool:
    """Return whether a folder has credentials that are valid for another `days` days."""
    from psfleet.core.net.connections.certificates import ends

    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    try:
        credentials = [Credentials.read(folder / role) for role in ("server", "worker")]
        return all(ends(issued.certificate) >= until for issued in credentials)
    except ConfigError:
        return False


@click.command()
@click.option(
    "--days",
    type=float,
    default=CERTIFICATE_DAYS,
    show_default=True,
    help="Days for which the certificates are good.",
)
@click.option(
    "--keep", is_flag=True, help="Do nothing if FOLDER has certificates that last half as long."
)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def certs(days: float, keep: bool, folder: Path) -> int:
    """Make certificates and a token for one job in FOLDER, for processes started by hand.

    Copy FOLDER/server to the hosts of servers, FOLDER/worker to the hosts of workers, and FOLDER/reader to
    programs that only follow the job or request predictions. PSFLEET_TLS or --tls names the folder there.
    The signing key is deleted, so make new credentials for another job or when these expire.
    """
    from psfleet.core.net.connections.certificates import make_credentials  # loads cryptography

    if keep and usable(folder, days / 2):
        click.echo(f"credentials in {folder} are still good")
        return 0
    for role, role_folder in make_credentials(folder, days).items():
        click.echo(f"for {role}s: PSFLEET_TLS={role_folder}")
    click.echo(f"good for {days:g} days")
    return 0


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
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def doctor(engine: str, peers: str, port: int, wait: float, as_json: bool) -> int:
    """Check whether this machine can run a job, and say what to change; exit code 1 if a job would fail.

    Run it on every machine of a job, for example under Slurm with srun --ntasks-per-node=1 psfleet doctor.
    With --peers run it on all machines at the same time.
    """
    from psfleet_launch.engines.launch_engine import load_engine

    kind = load_engine(engine)
    fatal = False
    for finding in _findings(kind, [host for host in peers.split(",") if host], port, wait):
        fatal |= finding.is_fatal
        if as_json:
            click.echo(json.dumps(dataclasses.asdict(finding)))
            continue
        click.echo(f"{finding.name:<14}{finding.value}")
        if finding.advice:
            click.echo(f"{'':<14}{'! ' if finding.is_fatal else '- '}{finding.advice}")
    return int(fatal)


def _findings(
    engine: "type[Engine]", peers: list[str], port: int, wait: float
) -> "Iterator[Finding]":
    from psfleet_launch.agent.machine_checks import check_machine

    yield from check_machine(engine)
    if peers:
        from psfleet_launch.agent.machine_checks import PeerCheck

        with PeerCheck(peers, port, wait) as check:
            yield from check.findings()
