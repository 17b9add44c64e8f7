"""The file in the folder of a running job's logs: with it other processes of the user find its servers."""

from pathlib import Path

from psfleet.errors import ConfigError
from psfleet.formats.document import Format
from psfleet.settings.declaration import from_variables, to_variables
from psfleet.settings.declared_settings import FleetSettings, JobSettings, ProcessSettings
from psfleet.settings.environment import Environment

__all__ = ["SERVERS", "read_running_job", "write_running_job"]

SERVERS = "servers.json"

_FORMAT = Format("running job")


def write_running_job(folder: Path, environment: Environment) -> None:
    """Let the file appear, whole: the variables with which a process without a role knows the servers."""
    variables = to_variables(environment, FleetSettings, JobSettings, ProcessSettings)
    _FORMAT.write(folder / SERVERS, variables=variables)


def read_running_job(folder: Path) -> Environment:
    """What the file says, as the environment of a process without a role.

    Raises:
        ConfigError: No job runs there, or its servers have not started yet.
        FrameError: The file is damaged or of another version.
    """
    try:
        (variables,) = _FORMAT.read(folder / SERVERS, variables=dict)
    except FileNotFoundError:
        raise ConfigError(
            f"no job runs in {str(folder)!r}: it has no {SERVERS}, which is there from the start of the "
            "workers to the end of the job"
        ) from None
    return Environment(**from_variables(Environment, {**variables, "PSFLEET_ROLE": ""}))
