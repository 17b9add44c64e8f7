"""`psfleet agent`: run processes of a job on this machine, for a launcher on another one."""

import sys
from pathlib import Path

import click

from psfleet.errors import ConfigError

__all__ = ["agent"]

_LONGEST = 1 << 16  # bytes of credentials


@click.command()
@click.option(
    "--join", "endpoint", required=True, metavar="HOST:PORT", help="Where the launcher listens."
)
@click.option(
    "--credentials",
    required=True,
    metavar="FILE",
    help="The file that the launcher has made; -: standard input, whose end then ends the agent.",
)
@click.option("--name", default="", help="What to call this machine; by default its name.")
@click.option(
    "--address",
    default="",
    help="Where servers on this machine listen; by default the address that faces the launcher.",
)
def agent(endpoint: str, credentials: str, name: str, address: str) -> int:
    """Run processes of one job on this machine until the job is over.

    psfleet-launch --engine join prints this command; --engine ssh runs it. All processes end with the agent,
    and the agent ends when its connection to the launcher is lost for 10 s.
    """
    from psfleet_launch.job.spawn import children_without_grpc

    children_without_grpc()  # before the imports that load gRPC
    from psfleet.settings.environment import check_endpoint
    from psfleet.wire.access import Access
    from psfleet.wire.credentials import Credentials
    from psfleet_launch.agent.agent import Agent
    from psfleet_launch.agent.launcher_link import LauncherLink
    from psfleet_launch.agent.machine import describe
    from psfleet_launch.engines.remote.agent_messages import read_invitation, write_secrets
    from psfleet_launch.job.job_folder import private_folder

    check_endpoint(endpoint)
    with private_folder() as folder:
        files = read_invitation(_read(credentials), credentials)
        place = write_secrets(folder, files)["agent"]
        link = LauncherLink(endpoint, Access(Credentials.read(place)))
        hello = describe(name, address, endpoint)
        link.connect(hello)
        return Agent(link, folder, hello.name, 0 if credentials == "-" else -1).run()


def _read(credentials: str) -> bytes:
    """The line with the credentials. Not more is read from standard input, which stays open."""
    if credentials == "-":
        return sys.stdin.buffer.readline(_LONGEST)
    try:
        path = Path(credentials)
        if path.stat().st_mode & 0o077:
            raise ConfigError(
                f"{credentials!r} can be read by others than its owner; chmod 600 it, and start the job anew"
            )
        return path.read_bytes()[:_LONGEST]
    except OSError as error:
        raise ConfigError(
            f"credentials {credentials!r} cannot be read ({error.strerror}); name the file that "
            "psfleet-launch --engine join has printed, while its job runs"
        ) from None
