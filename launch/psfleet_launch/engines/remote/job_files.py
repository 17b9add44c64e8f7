"""Requests to a running job, where the launcher and servers have folders of logs of their own."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from psfleet.formats import DONE, REQUEST, SCALE, SCALE_PROMISED, SCALE_READY, SCALED
from psfleet.platform.atomic_files import let_appear
from psfleet.wire.v1 import agent_pb2 as pb

_TO_SERVERS = (REQUEST, SCALE, SCALE_READY, SCALED)
"""What the launcher writes, or a user on its machine."""

_TO_LAUNCHER = (REQUEST, SCALE, DONE, SCALE_PROMISED)
"""What servers write, or a user on their machine."""


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
        """See JobFiles.take."""
        self._machines[machine].take(file)
