"""Messages between a job's launcher and its agents, one on each machine, and the files that both keep alike.

Both directions are one stream each of a gRPC call that lasts as long as the agent. The agent's first message
is a Hello; the launcher answers with OpenJob or Refused. When the call ends, the agent ends every process
that it has started, and itself. The call has credentials of its own: those of servers and workers are no good
for it.
"""

import contextlib
import dataclasses
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from msgspec import field

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.files import let_appear
from psfleet.core.base.job_files import DONE, REQUEST
from psfleet.core.base.json_documents import Format, exact
from psfleet.core.base.scaling_files import SCALE, SCALE_PROMISED, SCALE_READY, SCALED
from psfleet.core.base.settings.declaration import settings_of
from psfleet.core.base.settings.declared_settings import UserSettings
from psfleet.core.net.connections.credentials import FILES
from psfleet.core.net.message_codec import Message, decode
from psfleet_launch.job.job_plan import Job, Member, Told
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.supervision.job_events import (
    LivenessSignal,
    ProcessEnding,
    ProcessExited,
    Said,
    ServerReady,
)

PROTOCOL = 2
"""Version of the protocol between launcher and agent."""

_REQUEST = Format("job request")
_INVITATION = Format("agent credentials")


_TO_SERVERS = (REQUEST, SCALE, SCALE_READY, SCALED)
"""What the launcher writes, or a user on its machine."""
_TO_LAUNCHER = (REQUEST, SCALE, DONE, SCALE_PROMISED)
"""What servers write, or a user on their machine."""


def python_version() -> str:
    """Return the version of this process's Python, as in 3.11."""
    return ".".join(platform.python_version_tuple()[:2])


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """A machine with an agent. The first three fields keep their names in every version of the protocol.

    Attributes:
        protocol: Version of the protocol.
        psfleet: Version of psfleet.
        python: Version of Python.
        name: What people call the machine; unique among the agents of a job.
        address: Address of the machine on the network of the launcher, where its servers listen.
        cores: Number of cores that the agent may use.
        memory: Bytes of memory.
        gpus: Names of the GPUs.
        pid: Process id of the agent.
    """

    protocol: int = PROTOCOL
    psfleet: str = field(default_factory=lambda: version("psfleet"))
    python: str = field(default_factory=python_version)
    name: str = ""
    address: str = ""
    cores: int = 0
    memory: int = 0
    gpus: list[str] = field(default_factory=list)
    pid: int = 0


class OpenJob(Message, frozen=True):
    """The job.

    Attributes:
        request: JobRequest as a JSON document.
        name: Name of the job.
        token: Unique text that marks the environment of the processes of this agent.
        working_folder: Working folder of the launcher; the agent changes to the folder of this name.
        logs: Folder of the job's logs.
        variables: Environment variables for the processes.
        workers: Number of workers that run on this machine and share its cores.
        credentials: Credentials of each role, by `role/name` of their files. Empty if the job has none.
        probe: Name of a file in the folder of logs, by which the agent sees whether that folder is shared.
    """

    request: bytes
    name: str
    token: str
    working_folder: str
    logs: str
    variables: dict[str, str]
    workers: int
    credentials: dict[str, bytes] = field(default_factory=dict)
    probe: str = ""


class Opened(Message, frozen=True):
    """Answer to OpenJob.

    Attributes:
        error: Why the agent cannot run processes of the job, or empty if it can.
        has_shared_logs: The folder of the logs is the launcher's.
    """

    error: str = ""
    has_shared_logs: bool = False


class Spawn(Message, frozen=True):
    """Start a process, with these parameters."""

    member: Member
    told: Told


class Signal(Message, frozen=True):
    """Send a signal to a process and its children."""

    member: Member
    number: int


class ServerCommand(Message, frozen=True):
    """Write a line, without its newline, to a server's standard input."""

    member: Member
    line: str


class Expect(Message, frozen=True):
    """Forget that a server was ready."""

    member: Member


class Sweep(Message, frozen=True):
    """Kill every process of the job."""


class Swept(Message, frozen=True):
    """Answer to Sweep: no process of the job is left.

    Attributes:
        joined: A worker has joined the fleet.
        left_behind: Processes that could not be ended.
    """

    joined: bool = False
    left_behind: list[str] = field(default_factory=list)


class Die(Message, frozen=True):
    """Kill every process of the job and the agent at once, as if the machine had lost its power."""


class Connect(Message, frozen=True):
    """Try whether processes on this machine can connect to a server that has started."""

    endpoint: str


class Connected(Message, frozen=True):
    """Answer to Connect.

    Attributes:
        error: Why they cannot, or empty if they can.
    """

    endpoint: str
    error: str


class Relocations(Message, frozen=True):
    """The new endpoint of each server that has moved to another machine, by its old endpoint."""

    moved: dict[str, str]


class JobFile(Message, frozen=True):
    """A file of requests to a running job, or of their outcomes, in the folder of the logs of one machine."""

    name: str
    content: bytes


class OutputChunk(Message, frozen=True):
    """Output of a process, in order.

    Attributes:
        is_error: The bytes were written to standard error. Known only of the process whose output is shown.
    """

    member: Member
    data: bytes
    is_error: bool = False


class Ping(Message, frozen=True):
    """Sent once a second by an agent, and sent back by the launcher, to see whether the connection works.

    The agent measures silence from the moment at which it sent the last ping that came back, by its own
    clock in seconds. So it gives the connection up before the launcher does.
    """

    sent_at: float


class Probe(Message, frozen=True):
    """Do nothing. The launcher wants the acknowledgement of the machine's kernel."""


class Refused(Message, frozen=True):
    """The agent cannot take part, for this reason."""

    why: str


class Leaving(Message, frozen=True):
    """The agent was asked to end. `why` is a sentence that says by whom."""

    why: str


AgentMessage = (
    Hello
    | Opened
    | ServerReady
    | ProcessExited
    | LivenessSignal
    | ProcessEnding
    | Said
    | OutputChunk
    | Swept
    | Ping
    | Leaving
    | Connected
    | JobFile
)
LauncherMessage = (
    Refused
    | OpenJob
    | Spawn
    | Signal
    | ServerCommand
    | Expect
    | Sweep
    | Ping
    | Relocations
    | Probe
    | Connect
    | Die
    | JobFile
)
ATTEND = "/psfleet.v1.Launcher/Attend"
"""The method of the launcher that agents call."""


def read_agent_message(data: bytes) -> AgentMessage:
    """Return the message of an agent in these bytes.

    Raises:
        FrameError: They hold none.
    """
    message: AgentMessage = decode(AgentMessage, data, "message of an agent")
    return message


def read_launcher_message(data: bytes) -> LauncherMessage:
    """Return the message of a launcher in these bytes.

    Raises:
        FrameError: They hold none.
    """
    message: LauncherMessage = decode(LauncherMessage, data, "message of a launcher")
    return message


def invitation(folder: Path) -> bytes:
    """The credentials in a folder as the line that an agent is given."""
    files = {name: (folder / name).read_text() for name in FILES}
    return json.dumps(_INVITATION.document(**files)).encode() + b"\n"


def read_invitation(line: bytes, where: str) -> dict[str, bytes]:
    """The files of credentials that a line holds, as `write_secrets` takes them.

    Raises:
        ConfigError: It holds none; `where` names where it was read.
    """
    try:
        texts = exact(_INVITATION.parse(line), "credentials", **dict.fromkeys(FILES, str))
    except ValueError:
        raise ConfigError(
            f"credentials {where!r} are none of an agent; take those of psfleet-launch --engine join"
        ) from None
    return {f"agent/{name}": text.encode() for name, text in zip(FILES, texts, strict=True)}


def version_mismatch(theirs: Hello) -> str:
    """Return why an agent cannot work with this launcher, or an empty text if it can."""
    ours = Hello()
    for part, their, our in (
        ("psfleet", theirs.psfleet, ours.psfleet),
        ("Python", theirs.python, ours.python),
        ("agent protocol", str(theirs.protocol), str(ours.protocol)),
    ):
        if their != our:
            return (
                f"it has {part} {their} and the launcher has {our}; install the same version on "
                "every machine"
            )
    return ""


def write_request(request: JobRequest) -> bytes:
    """The request as a JSON document."""
    fields = {entry.name: getattr(request, entry.name) for entry in dataclasses.fields(request)}
    return json.dumps(_REQUEST.document(**fields)).encode()


def read_request(document: bytes) -> JobRequest:
    """The request that a document describes, checked on this machine.

    Raises:
        ConfigError: It cannot be satisfied here, for instance because the script is missing.
        ValueError: It is no such document.
    """
    names = [entry.name for entry in dataclasses.fields(JobRequest)]
    values = exact(_REQUEST.parse(document), "job request", **dict.fromkeys(names, object))
    fields = dict(zip(names, values, strict=True))
    fields_read: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return JobRequest(**fields_read)


def secrets_of(job: Job) -> dict[str, bytes]:
    """The job's credentials, file by file."""
    return {
        f"{role}/{name}": (folder / name).read_bytes()
        for role, folder in job.credentials.items()
        for name in FILES
    }


def write_secrets(folder: Path, files: dict[str, bytes]) -> dict[str, Path]:
    """Write credentials for this user only; the folder of each role."""
    folders: dict[str, Path] = {}
    for name, content in files.items():
        role, _, file = name.partition("/")
        folders[role] = folder / role
        folders[role].mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folders[role] / file
        path.touch(0o600)
        path.write_bytes(content)
    return folders


def user_variables() -> dict[str, str]:
    """Return the environment variables that the launcher's user has set for psfleet."""
    names = [setting.env for setting in settings_of(UserSettings)]
    return {name: os.environ[name] for name in names if name in os.environ}


class JobFiles:
    """Keeps files alike in the folders of two machines: what one side writes the other one gets.

    Args:
        folder: Of the job's logs, on this machine.
        goes: Names of the files that go there.
        comes: Names of the files that come from there.

    Attributes:
        late: What has come and cannot be written yet, as on a full disk.
    """

    def __init__(
        self, folder: Path, goes: Sequence[str] = _TO_LAUNCHER, comes: Sequence[str] = _TO_SERVERS
    ) -> None:
        self.late: dict[str, bytes] = {}
        self._folder = folder
        self._goes, self._comes = goes, comes
        self._seen: dict[str, bytes] = {}

    def clear(self) -> None:
        """Remove all of them, those of an earlier job too."""
        for name in {*self._goes, *self._comes}:
            (self._folder / name).unlink(missing_ok=True)

    def present(self) -> dict[str, bytes]:
        """What the files say that may go there."""
        contents = {}
        for name in self._goes:
            with contextlib.suppress(OSError):  # it is not there
                contents[name] = (self._folder / name).read_bytes()
        return contents

    def changed(self, present: Mapping[str, bytes]) -> Iterator[JobFile]:
        """Yield the files that are to be sent, of those that are present."""
        self._write()
        for name, content in present.items():
            if name not in self.late and content != self._seen.get(name):
                self._seen[name] = content
                yield JobFile(name=name, content=content)

    def take(self, file: JobFile) -> None:
        """Write a file that the other side has sent, now or as soon as that is possible."""
        if file.name in self._comes:
            self._seen[file.name] = self.late[file.name] = file.content
            self._write()

    def _write(self) -> None:
        for name, content in [*self.late.items()]:
            with contextlib.suppress(OSError):
                let_appear(self._folder / name, partial(_fill, content))
                del self.late[name]


def _fill(content: bytes, draft: Path) -> None:
    draft.write_bytes(content)


class LauncherFiles:
    """The same on the launcher's side, for all machines that have a folder of their own.

    Args:
        folder: Of the job's logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._machines: dict[str, JobFiles] = {}

    def add(self, machines: Iterable[str]) -> None:
        """These machines have folders of their own."""
        for machine in machines:
            self._machines[machine] = JobFiles(self._folder, _TO_SERVERS, _TO_LAUNCHER)

    def changed(self) -> Iterator[tuple[str, JobFile]]:
        """Yield the files that are to be sent to a machine."""
        present: dict[str, bytes] | None = None
        for machine, files in self._machines.items():
            present = files.present() if present is None else present  # once for all
            for file in files.changed(present):
                yield machine, file

    def take(self, machine: str, file: JobFile) -> None:
        self._machines[machine].take(file)
