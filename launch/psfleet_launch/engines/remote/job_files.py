"""Requests to a running job, where the launcher and server 0 have folders of logs of their own."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from psfleet.formats import DONE, REQUEST, SCALE, SCALE_READY, SCALE_TAKEN, SCALED
from psfleet.platform.atomic_files import let_appear
from psfleet.wire.v1 import agent_pb2 as pb

_NAMES = (REQUEST, DONE, SCALE, SCALE_READY, SCALED)
_ALL = (*_NAMES, SCALE_TAKEN)  # the last one is server 0's own


class JobFiles:
    """Keeps these files alike in two folders: what one side writes the other one gets.

    Args:
        folder: Of the job's logs, on this machine.

    Attributes:
        is_shared: Both sides have the same folder, so that there is nothing to do.
    """

    def __init__(self, folder: Path, is_shared: bool = False) -> None:
        self._folder = folder
        self._seen: dict[str, bytes] = {}
        self.is_shared = is_shared

    def clear(self) -> None:
        """Remove those of an earlier job."""
        for name in () if self.is_shared else _ALL:
            (self._folder / name).unlink(missing_ok=True)

    def changed(self) -> Iterator[pb.JobFile]:
        """Yield the files that are to be sent."""
        for name in () if self.is_shared else _NAMES:
            try:
                content = (self._folder / name).read_bytes()
            except OSError:  # it is not there
                continue
            if content != self._seen.get(name):
                self._seen[name] = content
                yield pb.JobFile(name=name, content=content)

    def take(self, file: pb.JobFile) -> None:
        """Write a file that the other side has sent. On a full disk it is lost; one may ask again."""
        if file.name in _NAMES and not self.is_shared:
            self._seen[file.name] = file.content
            with contextlib.suppress(OSError):  # which is no reason to end a job
                let_appear(self._folder / file.name, lambda draft: draft.write_bytes(file.content))
