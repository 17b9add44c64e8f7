"""Files that psfleet writes as JSON documents, each with a format and a version.

Every JSON file that psfleet writes goes through here; docs/formats.md lists them. An encoder names each
field in its code, and a decoder takes them with `exact`, so that no name of a Python attribute gets
into a file, and nothing in a file is passed over.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psfleet.core.base.errors import (
    CheckpointError,
    ConfigError,
    FrameError,
    PsfleetError,
    RuleError,
)
from psfleet.core.base.files import let_appear, read_small, reason, replace
from psfleet.core.base.settings.declaration import from_variables, to_variables
from psfleet.core.base.settings.declared_settings import FleetSettings, JobSettings, ProcessSettings
from psfleet.core.base.settings.environment import Environment, check_endpoint, reader_environment

_SMALL = 1 << 20  # bytes
_ADVICE = "read it with the psfleet version that wrote it"


class Misfit(ValueError):
    """A document is not of the format and version that the reader knows; the text goes on after its name."""


@dataclass(frozen=True)
class Format:
    """A kind of document.

    Attributes:
        name: Value of its field `format`.
        versions: Those that are read, ascending. A document has the first one unless it needs a later one.
    """

    name: str
    versions: tuple[int, ...] = (1,)

    @property
    def version(self) -> int:
        """That of a document that needs no later one."""
        return self.versions[0]

    def document(self, **fields: Any) -> dict[str, Any]:
        """A document with these fields, for `json.dumps`."""
        return {"format": self.name, "version": self.version, **fields}

    def write(self, where: Path, **fields: Any) -> None:
        """Let a small file of a running job appear, whole. It need not outlive the machine."""
        let_appear(where, self._writer(fields))

    def replace(self, where: Path, **fields: Any) -> None:
        """Write it so that it is on the disk when this returns."""
        replace(where, self._writer(fields))

    def _writer(self, fields: dict[str, Any]) -> Callable[[Path], object]:
        text = json.dumps(self.document(**fields), indent=1)
        return lambda draft: draft.write_text(text)

    def read(self, where: Path, **kinds: Any) -> list[Any]:
        """The values of the fields of a small file; see `exact`.

        Raises:
            FileNotFoundError: It is not there.
            FrameError: It cannot be read, or has another version or other fields.
        """
        with reading(where, FrameError):
            return exact(self.parse(read_small(where, _SMALL)), self.name, **kinds)

    def parse(self, content: bytes | str) -> dict[str, Any]:
        """The fields of a document, without those that say what it is.

        Raises:
            Misfit: It is of another format or of an unknown version.
            ValueError, RecursionError: It is no JSON.
        """
        return self.fields(json.loads(content))

    def fields(self, document: Any) -> dict[str, Any]:
        """Parse fields as `parse` does, of a document that is a part of another one."""
        if not isinstance(document, dict) or document.get("format") != self.name:
            value = document.get("format") if isinstance(document, dict) else document
            raise Misfit(f"is damaged or no {self.name} of psfleet: its format is {value!r:.60}")
        version = document.get("version")
        if type(version) is not int or version not in self.versions:
            *others, last = map(str, self.versions)
            versions = f"{', '.join(others)} and {last}" if others else last
            raise Misfit(
                f"has version {version!r:.60} of the format {self.name!r}, and this psfleet reads "
                f"version {versions}; {_ADVICE}"
            )
        return {
            name: value for name, value in document.items() if name not in ("format", "version")
        }


def exact(document: Any, what: str, **kinds: Any) -> list[Any]:
    """The values of exactly these fields, in their order.

    Args:
        said: An object of a document.
        what: Subject of the document, for messages.
        kinds: The type of each field, or a union of types; `object` for any value.

    Raises:
        Misfit: A field is unknown, missing or of another type.
    """
    if not isinstance(document, dict):
        raise Misfit(f"has {document!r:.60} as its {what}, which must be an object; {_ADVICE}")
    for name in document:
        if name not in kinds:
            raise Misfit(f"has the unknown field {name!r:.60} in its {what}; {_ADVICE}")
    for name, kind in kinds.items():
        if name not in document:
            raise Misfit(f"lacks the field {name!r} in its {what}; {_ADVICE}")
        if not _fits(document[name], kind):
            words = getattr(kind, "__name__", str(kind))
            raise Misfit(
                f"has {document[name]!r:.60} as {name} in its {what}, which must be of type {words}; "
                f"{_ADVICE}"
            )
    return [document[name] for name in kinds]


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):  # which is an int to Python
        return kind in (bool, object)
    return isinstance(value, kind)


@contextlib.contextmanager
def reading(where: str | Path, kind: type[PsfleetError] = CheckpointError) -> Iterator[None]:
    """Within, whatever is wrong with a file is an error of this kind that names it, in one sentence.

    Only a file that is not there stays a FileNotFoundError, unless it is a checkpoint's.
    """
    try:
        yield
    except Misfit as error:
        raise kind(f"{str(where)!r} {error}") from None
    except CheckpointError:
        raise
    except RuleError as error:  # of a user, which this process does not have as the writer had it
        raise kind(f"{str(where)!r} cannot be loaded here: {error}") from None
    except OSError as error:
        if kind is not CheckpointError and isinstance(error, FileNotFoundError):
            raise
        raise kind(f"{str(where)!r} cannot be read: {reason(error)}") from None
    except PsfleetError as error:
        raise kind(f"{str(where)!r} is damaged: {error}") from None
    except Exception as error:  # there is no end to what a file can hold
        raise kind(f"{str(where)!r} is damaged: {' '.join(repr(error).split())}") from None


REQUEST = "mode.json"
"""Requested mode: a number, which grows, and settings such as {"mode": "ssp", "staleness": 4}."""

DONE = "mode.told"
"""Number of the last request that has reached the workers."""

_REQUEST = Format("mode request")
_REPLY = Format("mode answer")


def write_request(folder: Path, number: int, consistency: dict[str, Any]) -> None:
    """Request a mode: the settings of the strategy's part `consistency`."""
    _REQUEST.write(folder / REQUEST, number=number, consistency=consistency)


def read_request(folder: Path) -> tuple[int, dict[str, Any]]:
    """The last request.

    Raises:
        FileNotFoundError: There is none.
        FrameError: It is damaged or of another version.
    """
    number, consistency = _REQUEST.read(folder / REQUEST, number=int, consistency=dict)
    return number, consistency


def write_reply(folder: Path, number: int) -> None:
    """Note that the request of this number has reached the workers."""
    _REPLY.write(folder / DONE, number=number)


def read_reply(folder: Path) -> int:
    """Return the number of the last request that has reached the workers; 0: none."""
    try:
        [number] = _REPLY.read(folder / DONE, number=int)
    except FileNotFoundError:
        return 0
    return int(number)


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
    _SCALED.replace(folder / SCALED, **dataclasses.asdict(scaled))


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


_READY_FORMAT = Format("ready server")


def write_ready(where: Path, index: int, endpoint: str, pid: int) -> None:
    """Let the file appear, whole."""
    _READY_FORMAT.write(where, index=index, endpoint=endpoint, pid=pid)


def read_ready(where: Path) -> tuple[str, int]:
    """Endpoint and process id of the server.

    Raises:
        FileNotFoundError: The server is not ready.
        FrameError: The file is damaged or of another version.
    """
    _, endpoint, pid = _READY_FORMAT.read(where, index=int, endpoint=str, pid=int)
    return endpoint, pid


MOVED = "moved.json"
"""Its name in the folder of a job's logs."""

_RELOCATIONS_FORMAT = Format("moved servers")


def write_relocations(where: Path, endpoints: Mapping[str, str]) -> None:
    """Replace the file; `endpoints` has the new endpoint of each old one."""
    _RELOCATIONS_FORMAT.write(where, moved=dict(endpoints))


def read_relocations(where: Path) -> dict[str, str]:
    """The new endpoint of each old one; empty: no server has moved, or the file is damaged."""
    try:
        (endpoints,) = _RELOCATIONS_FORMAT.read(where, moved=dict)
    except (FileNotFoundError, FrameError):
        return {}
    return {str(old): str(new) for old, new in endpoints.items()}


SERVERS = "servers.json"

_RUNNING_FORMAT = Format("running job")


def write_running_job(folder: Path, environment: Environment) -> None:
    """Let the file appear, whole: the variables with which a process without a role knows the servers."""
    variables = to_variables(environment, FleetSettings, JobSettings, ProcessSettings)
    _RUNNING_FORMAT.write(folder / SERVERS, variables=variables)


def read_running_job(folder: Path) -> Environment:
    """Read the file as the environment of a process without a role.

    Raises:
        ConfigError: No job runs there, or its servers have not started yet.
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
    """Return the environment of this process in a running job.

    Args:
        job: Folder of its logs, or the endpoints of its servers as a list or with commas between them.
        access: Settings `tls` and `insecure` of this process; None: those of the job.

    Raises:
        ConfigError: It is neither, or no job is there.
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
