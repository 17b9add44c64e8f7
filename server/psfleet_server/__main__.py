"""The command psfleet-server, which runs one parameter server until it gets SIGTERM.

Each option can also be given as an environment variable; the launcher uses those.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from psfleet.core.base.errors import PsfleetError
from psfleet.core.base.settings.environment import read_environment
from psfleet.core.base.settings.kinds import DEVICE_PLACES

_OPTIONS = {
    "index": "PSFLEET_RANK",
    "servers": "PSFLEET_SERVERS",
    "workers": "PSFLEET_WORKERS",
    "ready_file": "PSFLEET_READY_FILE",
    "device": "PSFLEET_DEVICE",
}

# numba imports these modules if they are installed, for matrix products and for calls of C libraries. A
# server's kernels have neither, and together the imports take 0.15 of 1.0 s of CPU time at its start.
_UNUSED = ("scipy", "cffi")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--index", help="This server's place in --servers, from 0.")
@click.option(
    "--servers",
    help="Endpoints of all servers, comma-separated: unix:/path or "
    "host:port; port 0 takes a free one.",
)
@click.option("--workers", help="How many workers will come.")
@click.option("--ready-file", help="Write endpoint and process id here, as JSON, when ready.")
@click.option(
    "--device", help=f"Hold tables in memory of this: {', '.join(DEVICE_PLACES)} or auto."
)
@click.option(
    "--insecure", is_flag=True, help="Listen on TCP in the clear: no certificates, no token."
)
@click.version_option(package_name="psfleet", prog_name="psfleet-server")
@click.option("--load", type=click.Path(), help="Start from this snapshot.")
def main(load: str | None, insecure: bool, **options: str | None) -> None:
    """Hold one shard of the parameters until every worker has left.

    Options that are not given come from the environment: PSFLEET_RANK, PSFLEET_SERVERS, PSFLEET_WORKERS,
    PSFLEET_READY_FILE, PSFLEET_DEVICE. Credentials for TCP are in the folder that PSFLEET_TLS names.
    """
    variables = {_OPTIONS[name]: text for name, text in options.items() if text is not None}
    if insecure:
        variables["PSFLEET_INSECURE"] = "1"
    sys.modules.update(dict.fromkeys(_UNUSED))  # type: ignore[arg-type]  # None: not to be found
    with _kept_for_ever():
        from psfleet_server.process import serve  # loads numba, which --help need not wait for

    try:
        environment = read_environment({**os.environ, "PSFLEET_ROLE": "server", **variables})
        serve(environment, load)
    except PsfleetError as error:
        print(f"psfleet-server: {error}", file=sys.stderr)
        sys.exit(2)


@contextmanager
def _kept_for_ever() -> Iterator[None]:
    """Create objects in this `with` block that the garbage collector never looks at.

    Of the 140,000 objects that imports create, hardly any becomes garbage. Without this block, scanning them
    would take a tenth of the imports' time. Each full collection in the running server would scan them again,
    and the server would handle no call for 50 to 70 ms (EPYC, Zen 1).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    main()
