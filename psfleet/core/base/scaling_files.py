"""Files in a job's folder by which `psfleet scale`, the launcher and server 0 agree on new servers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from psfleet.core.base.errors import FrameError
from psfleet.core.base.json_documents import Format

SCALE = "scale.json"
"""Wanted number of servers, for the launcher."""

SCALE_READY = "scale.ready"
"""The servers that the job is to have, which have started, for server 0."""

SCALE_PROMISED = "scale.promised"
"""Reply of server 0 to that: all servers hold their part once it is decided, or why they do not."""

SCALED = "scale.done"
"""Outcome of the last request, as the launcher decides: the servers of the job, or why they are as before."""

_SCALE = Format("request of servers")
_SCALE_READY = Format("servers to move to")
_SCALE_PROMISED = Format("promise of servers")
_SCALED = Format("servers moved to")


def write_scale(folder: Path, servers: int) -> int:
    """Request a number of servers; the number of the request, which grows."""
    number = read_scale(folder)[0] + 1
    _SCALE.write(folder / SCALE, number=number, servers=servers)
    return number


def read_scale(folder: Path) -> tuple[int, int]:
    """Number of the last request and the wanted number of servers; (0, 0): there is none that can be read."""
    try:
        number, servers = _SCALE.read(folder / SCALE, number=int, servers=int)
    except (FileNotFoundError, FrameError):
        return 0, 0
    return number, servers


def write_scale_ready(folder: Path, number: int, endpoints: Sequence[str]) -> None:
    """The servers of a request have started."""
    _SCALE_READY.write(folder / SCALE_READY, number=number, endpoints=[*endpoints])


def read_scale_ready(folder: Path) -> tuple[int, tuple[str, ...]]:
    """Number and servers of the last request whose servers have started.

    Raises:
        FileNotFoundError: There is none.
        FrameError: It is damaged or of another version.
    """
    number, endpoints = _SCALE_READY.read(folder / SCALE_READY, number=int, endpoints=list)
    return number, tuple(map(str, endpoints))


def write_promise(folder: Path, number: int, why: str = "") -> None:
    """All servers promise to hold their part of this request; `why`: they do not."""
    _SCALE_PROMISED.write(folder / SCALE_PROMISED, number=number, why=why)


def read_promise(folder: Path) -> tuple[int, str]:
    """Number of the last request that servers have promised, and why they have not; (0, ""): there is none.

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
    """The servers of a job after its last request for another number of them.

    Attributes:
        number: Number of the request; 0: there was none.
        endpoints: Endpoints of the servers.
        generation: Number of the request since which they hold the rows as they do; 0: since the start.
        why: Reason why the request has changed nothing; empty: it was carried out.
    """

    number: int = 0
    endpoints: tuple[str, ...] = ()
    generation: int = 0
    why: str = ""


def write_scaled(folder: Path, scaled: Scaled) -> None:
    """Decide a request. The file is on the disk when this returns."""
    _SCALED.replace(
        folder / SCALED,
        number=scaled.number,
        endpoints=scaled.endpoints,
        generation=scaled.generation,
        why=scaled.why,
    )


def write_unscaled(folder: Path, number: int, endpoints: Sequence[str], why: str = "") -> None:
    """Answer a request that changes nothing: the job has these servers, as before."""
    write_scaled(folder, Scaled(number, tuple(endpoints), read_scaled(folder).generation, why))


def read_scaled(folder: Path) -> Scaled:
    """The last decided request.

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
