"""Files in a job's folder that coordinate a change of the number of servers of a running job.

    scale.json      written by `psfleet scale`: the requested number of servers
    scale.ready     written by the launcher: the servers that it has started for the request
    scale.promised  written by server 0: all servers have their rows and wait for the decision, or why not
    scale.done      written by the launcher: the decision, which is the servers of the job from now on

The files are written in this order, and each carries the number of the request. Only scale.done is durable:
it decides which servers the job has, also after a crash.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from psfleet.core.base.errors import FrameError
from psfleet.core.base.json_documents import Format

SCALE = "scale.json"
"""File in which `psfleet scale` requests a number of servers from the launcher."""

SCALE_READY = "scale.ready"
"""File in which the launcher lists, for server 0, the servers to move to, once all have started."""

SCALE_PROMISED = "scale.promised"
"""File in which server 0 reports that all servers have their part of the rows, or why they do not."""

SCALED = "scale.done"
"""File with the launcher's decision on the last request: the servers of the job, and why if unchanged."""

_SCALE = Format("request of servers")
_SCALE_READY = Format("servers to move to")
_SCALE_PROMISED = Format("promise of servers")
_SCALED = Format("servers moved to")


def write_scale(folder: Path, servers: int) -> int:
    """Request a number of servers.

    Returns the number of the request, one more than that of the last request.
    """
    number = read_scale(folder)[0] + 1
    _SCALE.write(folder / SCALE, number=number, servers=servers)
    return number


def read_scale(folder: Path) -> tuple[int, int]:
    """Return the number of the last request, and the number of servers that it requests.

    Returns (0, 0) if there is no request.
    """
    try:
        number, servers = _SCALE.read(folder / SCALE, number=int, servers=int)
    except (FileNotFoundError, FrameError):
        return 0, 0
    return number, servers


def write_scale_ready(folder: Path, number: int, endpoints: Sequence[str]) -> None:
    """Announce that the servers of a request have started.

    `endpoints`: Endpoints of all servers that the job is to have.
    """
    _SCALE_READY.write(folder / SCALE_READY, number=number, endpoints=[*endpoints])


def read_scale_ready(folder: Path) -> tuple[int, tuple[str, ...]]:
    """Return the number of the last request whose servers have started, and their endpoints.

    Raises:
        FileNotFoundError: No servers were started for a request.
        FrameError: The file is damaged or of another version.
    """
    number, endpoints = _SCALE_READY.read(folder / SCALE_READY, number=int, endpoints=list)
    return number, tuple(map(str, endpoints))


def write_promise(folder: Path, number: int, why: str = "") -> None:
    """Announce that all servers have their part of the rows, or that a request has failed.

    Args:
        why: Reason of the failure, or empty if all servers have their rows.
    """
    _SCALE_PROMISED.write(folder / SCALE_PROMISED, number=number, why=why)


def read_promise(folder: Path) -> tuple[int, str]:
    """Return the last reply of server 0 to a request: the request's number, and the reason of a failure.

    The reason is "" if all servers have their part of the rows. Returns (0, "") if there is no reply yet.

    Raises:
        FrameError: The file is damaged or of another version.
    """
    try:
        number, why = _SCALE_PROMISED.read(folder / SCALE_PROMISED, number=int, why=str)
    except FileNotFoundError:
        return 0, ""
    return number, why


@dataclass(frozen=True)
class Scaled:
    """Decision on the last request to change the number of servers of a job.

    Attributes:
        number: Number of the request, or 0 if there was no request.
        endpoints: Endpoints of the servers that the job has now.
        generation: Number of the last request that moved rows, or 0 if no request has.
        why: Reason why the request changed nothing, or empty if it was carried out.
    """

    number: int = 0
    endpoints: tuple[str, ...] = ()
    generation: int = 0
    why: str = ""


def write_scaled(folder: Path, scaled: Scaled) -> None:
    """Write the decision on a request. It is on the disk when this returns."""
    _SCALED.replace(
        folder / SCALED,
        number=scaled.number,
        endpoints=scaled.endpoints,
        generation=scaled.generation,
        why=scaled.why,
    )


def write_unscaled(folder: Path, number: int, endpoints: Sequence[str], why: str = "") -> None:
    """Write the decision that a request changes nothing and the job keeps these servers.

    `why` is the reason.
    """
    write_scaled(folder, Scaled(number, tuple(endpoints), read_scaled(folder).generation, why))


def read_scaled(folder: Path) -> Scaled:
    """Return the last decision, or `Scaled()` if there is none.

    Raises:
        FrameError: The file is damaged or of another version.
    """
    try:
        number, endpoints, generation, why = _SCALED.read(
            folder / SCALED, number=int, endpoints=list, generation=int, why=str
        )
    except FileNotFoundError:
        return Scaled()
    return Scaled(number, tuple(map(str, endpoints)), generation, why)
