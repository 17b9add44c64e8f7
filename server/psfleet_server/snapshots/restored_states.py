"""The states of workers in the snapshot from which a job has started."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from psfleet.checkpoint import read_manifest
from psfleet.data.worker_state import redealt
from psfleet_server.durability.recovery import workers_of

__all__ = ["RestoredStates"]


@dataclass(frozen=True)
class RestoredStates:
    """What workers go on with.

    Attributes:
        states: By seat.
        others: How many workers that job had, if not as many as this one; else 0.
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
