"""Folder or URL of a job's own snapshots, and the states of workers in the snapshot that a job resumes.

Server 0 numbers new snapshots above those in the folder, and removes old ones after each complete snapshot. A
worker that starts requests its state from server 0. The state comes from the snapshot that the fleet was
started from.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from psfleet.checkpoint import read_manifest
from psfleet.core.base.object_store import (
    base_of,
    is_whole,
    own_place,
    own_snapshots,
    remove_snapshot,
)
from psfleet.core.base.settings.kinds import local_path, place_or_url, url_of
from psfleet.core.engine.worker_state import redealt
from psfleet_server.durability.recovery import workers_of


class SnapshotFolder:
    """Location of the snapshots that a job takes by its schedule, or on request without a path.

    Args:
        place: Folder, which may not exist yet, or URL of an object store.
        keep: Number of finished snapshots that `prune` leaves.
    """

    def __init__(self, place: str, keep: int = 3) -> None:
        self._place = place
        self._keep = keep

    def last(self) -> int:
        """Return the highest number of a snapshot, or 0 if there is none."""
        return max((int(snapshot[-6:]) for snapshot in own_snapshots(self._place)), default=0)

    def path_of(self, number: int) -> str:
        """Return the folder or URL of the snapshot with this number."""
        return own_place(self._place, number)

    def prepare(self, number: int) -> str:
        """Make the folder if it does not exist, and return the path of the snapshot with this number."""
        if url_of(self._place) is None:
            folder = local_path(self._place)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # for the job's user only
            for draft in folder.glob(".snapshot-*.partial"):  # of a process that died
                shutil.rmtree(draft, ignore_errors=True)
        return self.path_of(number)

    def prune(self) -> None:
        """Remove old snapshots and unfinished drafts.

        The last `keep` finished snapshots stay. If one of them is a delta (changes only), the snapshots
        that it builds on stay too. Call it while no snapshot is under way.
        """
        snapshots = [place_or_url(name) for name in own_snapshots(self._place)]
        whole = list(filter(is_whole, snapshots))
        keep = {link for snapshot in whole[-self._keep :] for link in _chain(snapshot)}
        for snapshot in snapshots:
            if snapshot not in keep:
                remove_snapshot(snapshot)


def _chain(snapshot: str) -> list[str]:
    """Return a snapshot and, if it is a delta (changes only), those that it builds on, newest first."""
    chain = [snapshot]
    while base := base_of(chain[-1]):
        chain.append(base)
    return chain


@dataclass(frozen=True)
class RestoredStates:
    """States (schedules, generators, position in the data) from which the workers of a resumed job continue.

    Attributes:
        states: State of each worker, by worker number.
        others: Number of workers of the job that took the snapshot, or 0 if this job has the same number.
    """

    states: Mapping[int, Any] = field(default_factory=dict)
    others: int = 0

    @classmethod
    def read(cls, snapshot: str, workers: int) -> "RestoredStates":
        """Read the states in a snapshot, for a job with this number of workers."""
        before = workers_of(snapshot)
        return cls(read_manifest(snapshot).workers, before if before != workers else 0)

    def of(self, worker: int) -> bytes:
        """Return the state of a worker as JSON, or b"" if it has none."""
        state: Any = self.states.get(worker)
        if self.others:
            state = redealt(self.states, self.others, worker) or None
        return b"" if state is None else json.dumps(state).encode()
