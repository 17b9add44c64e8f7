"""A job's credentials: made by the launcher, or by hand with `psfleet certs`."""

import datetime
from pathlib import Path

import click

from psfleet.errors import ConfigError
from psfleet.wire.certificate_lifetime import CERTIFICATE_DAYS
from psfleet.wire.credentials import Credentials

__all__ = ["certs", "make", "usable"]


def make(folder: Path, days: float = CERTIFICATE_DAYS) -> dict[str, Path]:
    """Credentials for a new job in a folder; the folder of each role."""
    # Here: a job on unix sockets does without the cryptography.
    from psfleet.wire.certificates import make_credentials

    return make_credentials(folder, days)


def usable(folder: Path, days: float) -> bool:
    """Whether there are credentials that are good for so many days more."""
    from psfleet.wire.certificates import ends

    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    try:
        found = [Credentials.read(folder / role) for role in ("server", "worker")]
        return all(ends(one.certificate) >= until for one in found)
    except ConfigError:
        return False


@click.command()
@click.option(
    "--days",
    type=float,
    default=CERTIFICATE_DAYS,
    show_default=True,
    help="How long they are good for.",
)
@click.option(
    "--keep", is_flag=True, help="Do nothing while there are some that last half as long."
)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def certs(days: float, keep: bool, folder: Path) -> int:
    """Make certificates and a token for one job in FOLDER, for processes started by hand.

    FOLDER/server goes to the hosts of servers, FOLDER/worker to those of workers; PSFLEET_TLS names
    it there. The key that signs them is thrown away: for another job, or later, make new ones.
    """
    if keep and usable(folder, days / 2):
        click.echo(f"credentials in {folder} are still good")
        return 0
    for role, place in make(folder, days).items():
        click.echo(f"for {role}s: PSFLEET_TLS={place}")
    click.echo(f"good for {days:g} days")
    return 0
