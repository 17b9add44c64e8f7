"""Protocol between a job's launcher and its agents: messages, credentials, and copies of request files.

Each agent makes one gRPC call. It lasts as long as the agent, and has a stream of messages in each direction:

    agent     Hello                                            describes the machine
    launcher  OpenJob, or Refused
    agent     Opened
    launcher  Spawn, Signal, ServerCommand, Expect, ...
    agent     ServerReady, ProcessExited, OutputChunk, ...
    launcher  Sweep                                            at the end of the job
    agent     Swept

When the call ends, the agent kills every process that it has started, and ends. The call needs credentials
of an agent; those of servers or workers are not accepted.

Machines need not share the folder of the job's logs. If they do not, JobFiles and LauncherFiles copy the
request files in this folder: small files by which users and servers request changes of a running job.
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
"""Request files that are sent to agents: the launcher writes them, or a user on the launcher's machine."""
_TO_LAUNCHER = (REQUEST, SCALE, DONE, SCALE_PROMISED)
"""Request files that are sent to the launcher: servers write them, or a user on a server's machine."""


def python_version() -> str:
    """Return the version of this process's Python, such as "3.11"."""
    return ".".join(platform.python_version_tuple()[:2])


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """First message of an agent, which describes its machine.

    The first three fields must keep their names in later versions, and unknown fields are ignored. So a
    launcher can read the versions of any agent and report the difference.

    Attributes:
        name: Name of the machine, unique among the agents of a job.
        address: Address of the machine in the launcher's network. Servers on the machine listen there.
        cores: Number of cores that the agent may use.
        memory: Bytes of memory.
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
    """Description of the job whose processes the agent will run.

    Attributes:
        request: JobRequest as a JSON document.
        token: Unique text in the environment of this agent's processes.
        working_folder: Working folder of the launcher. The agent changes to the folder with the same path.
        logs: Folder of the job's logs.
        variables: Environment variables for the processes.
        workers: Number of workers that run on this machine and share its cores.
        credentials: Content of the credential files, by `role/name`. Empty if the job has no credentials.
        probe: Name of a file in the launcher's folder of logs. An agent that finds the file shares the
            folder.
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
    """Reply to OpenJob.

    Attributes:
        error: Reason why the agent cannot run processes of the job, or "".
        has_shared_logs: True if the agent sees the launcher's folder of logs.
    """

    error: str = ""
    has_shared_logs: bool = False


class Spawn(Message, frozen=True):
    """Start a process for this member, with these parameters."""

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
    """Report a server that was ready once more when it is ready again."""

    member: Member


class Sweep(Message, frozen=True):
    """Kill every process of the job."""


class Swept(Message, frozen=True):
    """Reply to Sweep after all processes of the job were killed.

    Attributes:
        joined: True if a worker on this machine has joined the fleet.
        left_behind: Descriptions of processes that could not be killed.
    """

    joined: bool = False
    left_behind: list[str] = field(default_factory=list)


class Die(Message, frozen=True):
    """Kill every process of the job and the agent at once, as a power failure of the machine would."""


class Connect(Message, frozen=True):
    """Try to connect from this machine to a server that has started, and reply with Connected."""

    endpoint: str


class Connected(Message, frozen=True):
    """Reply to Connect.

    Attributes:
        error: Reason why this machine cannot connect to the server, or "".
    """

    endpoint: str
    error: str


class Relocations(Message, frozen=True):
    """New endpoint of each server that has moved to another machine, by the server's old endpoint."""

    moved: dict[str, str]


class JobFile(Message, frozen=True):
    """New content of a request file, such as scale.json. The receiver writes it to its folder of logs."""

    name: str
    content: bytes


class OutputChunk(Message, frozen=True):
    """Part of the output of a process. The parts are sent in order.

    Attributes:
        data: Bytes of output.
        is_error: True if the bytes were written to standard error. Always False for members other than the
            shown one (worker 0), because these write both streams to the same file.
    """

    member: Member
    data: bytes
    is_error: bool = False


class Ping(Message, frozen=True):
    """Test of the connection. An agent sends a ping once a second, and the launcher sends it back.

    `sent_at` is the time of sending in seconds of the agent's clock. The agent measures silence from
    `sent_at` of the last ping that came back. The launcher received this ping later, so the agent gives the
    connection up first.
    """

    sent_at: float


class Probe(Message, frozen=True):
    """No request. The launcher sends it so that the kernel of the agent's machine acknowledges data."""


class Refused(Message, frozen=True):
    """Reason why the launcher does not accept this agent. The agent ends."""

    why: str


class Leaving(Message, frozen=True):
    """Announcement that the agent ends because of an event on its machine, such as a signal. `why` names
    it."""

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
"""Path of the launcher's gRPC method that agents call."""


def read_agent_message(data: bytes) -> AgentMessage:
    """Decode a message of an agent.

    Raises:
        FrameError: The bytes are no message of an agent.
    """
    message: AgentMessage = decode(AgentMessage, data, "message of an agent")
    return message


def read_launcher_message(data: bytes) -> LauncherMessage:
    """Decode a message of a launcher.

    Raises:
        FrameError: The bytes are no message of a launcher.
    """
    message: LauncherMessage = decode(LauncherMessage, data, "message of a launcher")
    return message


def invitation(folder: Path) -> bytes:
    """Return the credentials in a folder as a line of JSON, for the standard input of an agent."""
    files = {name: (folder / name).read_text() for name in FILES}
    return json.dumps(_INVITATION.document(**files)).encode() + b"\n"


def read_invitation(line: bytes, where: str) -> dict[str, bytes]:
    """Return the credentials in a line made by `invitation`, as files for `write_secrets`.

    Args:
        where: Source of the line, for an error.

    Raises:
        ConfigError: The line does not contain credentials of an agent.
    """
    try:
        texts = exact(_INVITATION.parse(line), "credentials", **dict.fromkeys(FILES, str))
    except ValueError:
        raise ConfigError(
            f"credentials {where!r} are none of an agent; take those of psfleet-launch --engine join"
        ) from None
    return {f"agent/{name}": text.encode() for name, text in zip(FILES, texts, strict=True)}


def version_mismatch(theirs: Hello) -> str:
    """Return why an agent cannot work with this launcher, or "" if the versions are the same."""
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
    """Return the request as a JSON document."""
    fields = {entry.name: getattr(request, entry.name) for entry in dataclasses.fields(request)}
    return json.dumps(_REQUEST.document(**fields)).encode()


def read_request(document: bytes) -> JobRequest:
    """Return the request in a document made by `write_request`, after checking it on this machine.

    Raises:
        ConfigError: The job cannot run on this machine, for example because the script is missing.
        ValueError: The document is no job request.
    """
    names = [entry.name for entry in dataclasses.fields(JobRequest)]
    values = exact(_REQUEST.parse(document), "job request", **dict.fromkeys(names, object))
    fields = dict(zip(names, values, strict=True))
    fields_read: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return JobRequest(**fields_read)


def secrets_of(job: Job) -> dict[str, bytes]:
    """Return the job's credentials: the content of each file by `role/name`."""
    return {
        f"{role}/{name}": (folder / name).read_bytes()
        for role, folder in job.credentials.items()
        for name in FILES
    }


def write_secrets(folder: Path, files: dict[str, bytes]) -> dict[str, Path]:
    """Write files of credentials that only this user can read, and return the folder of each role."""
    folders: dict[str, Path] = {}
    for name, content in files.items():
        role, _, file = name.partition("/")
        folders[role] = folder / role
        folders[role].mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folders[role] / file
        path.touch(0o600)  # before the content, so that no other user can ever read it
        path.write_bytes(content)
    return folders


def user_variables() -> dict[str, str]:
    """Return the environment variables of this process that are settings of the user (UserSettings)."""
    names = [setting.env for setting in settings_of(UserSettings)]
    return {name: os.environ[name] for name in names if name in os.environ}


class JobFiles:
    """Copies request files between the folders of two machines. Each machine has one object.

    Each side sends the files that are written on its machine. Some files may be written on both machines.
    `_seen` has the content of each file that was last sent or received, so that a received file is not sent
    back.

    Args:
        folder: Folder of the job's logs on this machine.
        goes: Names of the files to send.
        comes: Names of the files to receive.

    Attributes:
        late: Received files that could not be written yet, for example because the disk is full.
    """

    def __init__(
        self, folder: Path, goes: Sequence[str] = _TO_LAUNCHER, comes: Sequence[str] = _TO_SERVERS
    ) -> None:
        self.late: dict[str, bytes] = {}
        self._folder = folder
        self._goes, self._comes = goes, comes
        self._seen: dict[str, bytes] = {}

    def clear(self) -> None:
        """Remove all request files from the folder, also those of an earlier job."""
        for name in {*self._goes, *self._comes}:
            (self._folder / name).unlink(missing_ok=True)

    def present(self) -> dict[str, bytes]:
        """Return the contents of the files to send that exist now, by name."""
        contents = {}
        for name in self._goes:
            with contextlib.suppress(OSError):  # the file does not exist
                contents[name] = (self._folder / name).read_bytes()
        return contents

    def changed(self, present: Mapping[str, bytes]) -> Iterator[JobFile]:
        """Yield the files whose content has changed since it was last sent or received.

        A file in `late` is not sent, because the content in the folder is older than the content on the
        other side.
        """
        self._write()
        for name, content in present.items():
            if name not in self.late and content != self._seen.get(name):
                self._seen[name] = content
                yield JobFile(name=name, content=content)

    def take(self, file: JobFile) -> None:
        """Write a received file to the folder. If the disk is full, write it later."""
        if file.name in self._comes:
            self._seen[file.name] = self.late[file.name] = file.content
            self._write()

    def _write(self) -> None:
        for name, content in [*self.late.items()]:
            with contextlib.suppress(OSError):
                let_appear(self._folder / name, partial(Path.write_bytes, data=content))
                del self.late[name]


class LauncherFiles:
    """Launcher's side of the copying of request files, for all machines that do not share its folder of logs.

    Args:
        folder: Folder of the job's logs on the launcher's machine.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._machines: dict[str, JobFiles] = {}

    def add(self, machines: Iterable[str]) -> None:
        """Begin to send files to these machines and to receive files from them."""
        for machine in machines:
            self._machines[machine] = JobFiles(self._folder, _TO_SERVERS, _TO_LAUNCHER)

    def changed(self) -> Iterator[tuple[str, JobFile]]:
        """Yield (name of the machine, file) for each file that must be sent."""
        present: dict[str, bytes] | None = None
        for machine, files in self._machines.items():
            present = files.present() if present is None else present  # read once for all machines
            for file in files.changed(present):
                yield machine, file

    def take(self, machine: str, file: JobFile) -> None:
        self._machines[machine].take(file)
