"""Files in a job's folder. Launcher, servers and commands like `psfleet mode` exchange messages in them.

    mode.json      a requested consistency mode          mode.told      the last request that workers know
    moved.json     new endpoints of moved servers        servers.json   the variables of the running job

In addition, each server writes a file when it is ready. Each file is a small JSON document, and readers see
all of it or nothing. A missing file is normal: the event has not happened yet.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psfleet.core.base.errors import ConfigError, FrameError
from psfleet.core.base.json_documents import Format
from psfleet.core.base.settings.declaration import from_variables, to_variables
from psfleet.core.base.settings.declared_settings import FleetSettings, JobSettings, ProcessSettings
from psfleet.core.base.settings.environment import Environment, reader_environment
from psfleet.core.base.settings.server_endpoints import check_endpoint

REQUEST = "mode.json"
"""File with the requested mode: a request number, and settings like {"mode": "ssp", "staleness": 4}."""

DONE = "mode.told"
"""File with the number of the last mode request that has reached the workers."""

_REQUEST = Format("mode request")
_REPLY = Format("mode answer")


_READY_FORMAT = Format("ready server")
MOVED = "moved.json"
"""File with the new endpoints of moved servers, in the folder of a job's logs."""
_RELOCATIONS_FORMAT = Format("moved servers")
SERVERS = "servers.json"
_RUNNING_FORMAT = Format("running job")


def write_request(folder: Path, number: int, consistency: dict[str, Any]) -> None:
    """Request a mode for the running job.

    Args:
        number: Number of the request, which increases with each request.
        consistency: Settings of the strategy's part `consistency`, such as {"mode": "ssp", "staleness": 4}.
    """
    _REQUEST.write(folder / REQUEST, number=number, consistency=consistency)


def read_request(folder: Path) -> tuple[int, dict[str, Any]]:
    """Return the number of the last requested mode, and its settings.

    Raises:
        FileNotFoundError: No mode was requested.
        FrameError: The file is damaged or of another version.
    """
    number, consistency = _REQUEST.read(folder / REQUEST, number=int, consistency=dict)
    return number, consistency


def write_reply(folder: Path, number: int) -> None:
    """Record that the mode request with this number has reached the workers."""
    _REPLY.write(folder / DONE, number=number)


def read_reply(folder: Path) -> int:
    """Return the number of the last mode request that has reached the workers, or 0 if none has."""
    try:
        [number] = _REPLY.read(folder / DONE, number=int)
    except FileNotFoundError:
        return 0
    return int(number)


def write_ready(where: Path, index: int, endpoint: str, pid: int) -> None:
    """Write the file with a server's index, endpoint and process id, which announces that it is ready."""
    _READY_FORMAT.write(where, index=index, endpoint=endpoint, pid=pid)


def read_ready(where: Path) -> tuple[str, int]:
    """Return endpoint and process id from the file that a ready server has written.

    Raises:
        FileNotFoundError: The server is not ready.
        FrameError: The file is damaged or of another version.
    """
    _, endpoint, pid = _READY_FORMAT.read(where, index=int, endpoint=str, pid=int)
    return endpoint, pid


def write_relocations(where: Path, endpoints: Mapping[str, str]) -> None:
    """Write the file of moved servers. `endpoints` maps the old endpoint of each to its new one."""
    _RELOCATIONS_FORMAT.write(where, moved=dict(endpoints))


def read_relocations(where: Path) -> dict[str, str]:
    """Return the new endpoint of each moved server by its old one. Empty if no file can be read."""
    try:
        (endpoints,) = _RELOCATIONS_FORMAT.read(where, moved=dict)
    except (FileNotFoundError, FrameError):
        return {}
    return {str(old): str(new) for old, new in endpoints.items()}


def write_running_job(folder: Path, environment: Environment) -> None:
    """Write the variables that a process outside the job needs to find the job's servers."""
    variables = to_variables(environment, FleetSettings, JobSettings, ProcessSettings)
    _RUNNING_FORMAT.write(folder / SERVERS, variables=variables)


def read_running_job(folder: Path) -> Environment:
    """Return the environment that a process outside of a running job needs to connect to the job.

    Raises:
        ConfigError: No job runs in the folder, or its servers have not started yet.
        FrameError: The file is damaged or of another version.
    """
    try:
        (variables,) = _RUNNING_FORMAT.read(folder / SERVERS, variables=dict)
    except FileNotFoundError:
        raise ConfigError(
            f"no job runs in {str(folder)!r}: it has no {SERVERS}, which is there from the start of the "
            "workers to the end of the job"
        ) from None
    return Environment(**from_variables(Environment, {**variables, "PSFLEET_ROLE": ""}))


def environment_of(job: Any, **access: Any) -> Environment:
    """Return the environment that this process needs to connect to a running job.

    Args:
        job: Folder of the job's logs, or the endpoints of its servers: a list, or a text with commas.
        access: Settings `tls` and `insecure` of this process. None for a setting means that of the job.

    Raises:
        ConfigError: `job` is neither a folder nor endpoints, or no job runs in the folder.
    """
    settings = {name: value for name, value in access.items() if value is not None}
    return dataclasses.replace(_found(job), **settings)


def _found(job: Any) -> Environment:
    if isinstance(job, str | os.PathLike):
        if os.path.isdir(job):
            return read_running_job(Path(job))
        job = [endpoint.strip() for endpoint in os.fspath(job).split(",")]
    try:
        for endpoint in job:
            check_endpoint(endpoint)
    except (ConfigError, TypeError, AttributeError):
        raise ConfigError(
            f"connect(job=...) got {job!r}, which is neither the folder of a job's logs nor the endpoints of "
            "its servers, such as unix:/path and host:port"
        ) from None
    return reader_environment(job)
