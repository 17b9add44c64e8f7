"""Messages between launcher and agents, as in protos/psfleet/v1/agent.proto, and requests as files."""

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

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.files import let_appear
from psfleet.core.base.job_files import DONE, REQUEST
from psfleet.core.base.json_documents import Format, exact
from psfleet.core.base.scaling_files import SCALE, SCALE_PROMISED, SCALE_READY, SCALED
from psfleet.core.base.settings.declaration import settings_of
from psfleet.core.base.settings.declared_settings import UserSettings
from psfleet.core.net.connections.credentials import FILES
from psfleet.core.net.v1 import agent_pb2 as pb
from psfleet_launch.job.job_plan import Job, Member
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.supervision.job_events import (
    Event,
    LivenessSignal,
    Output,
    ProcessEnding,
    ProcessExited,
    Said,
    ServerReady,
    Shown,
    usage_text,
)

PROTOCOL = 1
"""Version of the protocol between launcher and agent."""

_REQUEST = Format("job request")
_INVITATION = Format("agent credentials")


_TO_SERVERS = (REQUEST, SCALE, SCALE_READY, SCALED)
"""What the launcher writes, or a user on its machine."""
_TO_LAUNCHER = (REQUEST, SCALE, DONE, SCALE_PROMISED)
"""What servers write, or a user on their machine."""


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


def versions() -> pb.Hello:
    """Return the versions of this process's software, in a message without the machine's description."""
    python = ".".join(platform.python_version_tuple()[:2])
    return pb.Hello(protocol=PROTOCOL, psfleet=version("psfleet"), python=python)


def version_mismatch(theirs: pb.Hello) -> str:
    """Why an agent cannot work with this launcher; empty: it can."""
    ours = versions()
    for what, their, our in (
        ("psfleet", theirs.psfleet, ours.psfleet),
        ("Python", theirs.python, ours.python),
        ("agent protocol", str(theirs.protocol), str(ours.protocol)),
    ):
        if their != our:
            return (
                f"it has {what} {their} and the launcher has {our}; install the same version on "
                "every machine"
            )
    return ""


def member_message(member: Member) -> pb.AgentMember:
    """A member as a message."""
    return pb.AgentMember(role=member.role, rank=member.rank, stage=member.stage, copy=member.copy)


def member_of(message: pb.AgentMember) -> Member:
    """The member that a message names."""
    role: Any = message.role
    return Member(role, message.rank, message.stage, message.copy)


def write_request(request: JobRequest) -> bytes:
    """The request as a JSON document."""
    fields = {one.name: getattr(request, one.name) for one in dataclasses.fields(request)}
    return json.dumps(_REQUEST.document(**fields)).encode()


def read_request(document: bytes) -> JobRequest:
    """The request that a document describes, checked on this machine.

    Raises:
        ConfigError: It cannot be satisfied here, for instance because the script is missing.
        ValueError: It is no such document.
    """
    names = [one.name for one in dataclasses.fields(JobRequest)]
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


def message_of(event: Event | Shown, shown: Member) -> pb.AgentMessage:
    """An event of an agent's own engine as a message; `shown`: whose output its events hold."""
    match event:
        case ServerReady(member, endpoint):
            ready = pb.Ready(member=member_message(member), endpoint=endpoint)
            return pb.AgentMessage(ready=ready)
        case LivenessSignal(member):
            return pb.AgentMessage(alive=member_message(member))
        case ProcessEnding(member):
            return pb.AgentMessage(ending=member_message(member))
        case Output(data, is_error):
            chunk = pb.OutputChunk(member=member_message(shown), data=data, is_error=is_error)
            return pb.AgentMessage(output=chunk)
        case Said(who, text):
            member_said = None if who is None else member_message(who)
            return pb.AgentMessage(notice=pb.Notice(member=member_said, text=text))
        case _:
            raise AssertionError(f"no engine tells of {event}")


def event_of(message: pb.AgentMessage) -> Event | Said | None:
    """Return the event in a message; None: it holds something else."""
    match message.WhichOneof("kind"):
        case "ready":
            return ServerReady(member_of(message.ready.member), message.ready.endpoint)
        case "exited":
            return _exit_of(message.exited)
        case "alive":
            return LivenessSignal(member_of(message.alive))
        case "ending":
            return ProcessEnding(member_of(message.ending))
        case "notice":
            notice = message.notice
            return Said(
                member_of(notice.member) if notice.HasField("member") else None, notice.text
            )
        case _:
            return None


def _exit_of(message: pb.Exited) -> ProcessExited:
    usage = usage_text(message.cpu_seconds, message.peak_memory)
    return ProcessExited(
        member_of(message.member), message.code, message.left, message.cause, usage
    )


def user_variables() -> dict[str, str]:
    """Return the environment variables that the launcher's user has set for psfleet."""
    names = [one.env for one in settings_of(UserSettings)]
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
        found = {}
        for name in self._goes:
            with contextlib.suppress(OSError):  # it is not there
                found[name] = (self._folder / name).read_bytes()
        return found

    def changed(self, present: Mapping[str, bytes]) -> Iterator[pb.JobFile]:
        """Yield the files that are to be sent, of those that are present."""
        self._write()
        for name, content in present.items():
            if name not in self.late and content != self._seen.get(name):
                self._seen[name] = content
                yield pb.JobFile(name=name, content=content)

    def take(self, file: pb.JobFile) -> None:
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

    def changed(self) -> Iterator[tuple[str, pb.JobFile]]:
        """Yield the files that are to be sent to a machine."""
        present: dict[str, bytes] | None = None
        for machine, files in self._machines.items():
            present = files.present() if present is None else present  # once for all
            for file in files.changed(present):
                yield machine, file

    def take(self, machine: str, file: pb.JobFile) -> None:
        self._machines[machine].take(file)
