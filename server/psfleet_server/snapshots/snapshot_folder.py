"""The folder in which a job keeps its own snapshots, and the states of workers in the one it started from."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psfleet.checkpoint import own_name, own_snapshots, read_manifest
from psfleet.runtime.worker_state import redealt
from psfleet_server.durability.recovery import workers_of


class SnapshotFolder:
    """A job's own snapshots.

    Args:
        path: Path of the folder, which may not exist yet.
        keep: Number of snapshots that stay in it.
    """

    def __init__(self, path: Path, keep: int = 3) -> None:
        self._path = path
        self._keep = keep

    def last(self) -> int:
        """The highest number of a snapshot; 0: there is none."""
        return max((int(path.name[-6:]) for path in own_snapshots(self._path)), default=0)

    def path_of(self, number: int) -> Path:
        """Where the snapshot of this number lies."""
        return self._path / own_name(number)

    def place(self, number: int) -> Path:
        """Make room for a snapshot; its path."""
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)  # for the job's user only
        for left in self._path.glob(".snapshot-*.partial"):  # of a process that died
            shutil.rmtree(left, ignore_errors=True)
        return self.path_of(number)

    def prune(self) -> None:
        """Remove all but the last few snapshots and what they build on."""
        snapshots = own_snapshots(self._path)
        needed = {folder for path in snapshots[-self._keep :] for folder in _chain(path)}
        for path in snapshots:
            if path.absolute() not in needed:
                shutil.rmtree(path, ignore_errors=True)


def _chain(path: Path) -> list[Path]:
    """A snapshot and those that it builds on."""
    folder = path.absolute()
    chain = [folder]
    while (base := read_manifest(folder).base) is not None:
        folder = (folder / base.path).resolve()
        chain.append(folder)
    return chain


@dataclass(frozen=True)
class RestoredStates:
    """States from which workers continue.

    Attributes:
        states: By seat.
        others: Number of workers of that job, if not as many as this one; else 0.
    """

    states: Mapping[int, Any] = field(default_factory=dict)
    others: int = 0

    @classmethod
    def read(cls, snapshot: str, workers: int) -> "RestoredStates":
        """Those of a snapshot, for a job with so many workers."""
        before = workers_of(snapshot)
        return cls(read_manifest(snapshot).workers, before if before != workers else 0)

    def of(self, worker: int) -> bytes:
        """The state of a worker as JSON; empty: it has none."""
        state: Any = self.states.get(worker)
        if self.others:
            state = redealt(self.states, self.others, worker) or None
        return b"" if state is None else json.dumps(state).encode()
