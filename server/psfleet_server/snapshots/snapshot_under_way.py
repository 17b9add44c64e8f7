"""The snapshot that is being taken: how far it has come, and what it is to become."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from psfleet.errors import CheckpointError, PsfleetError
from psfleet.shard.events import Call
from psfleet.shard.snapshot_cuts import PendingCut
from psfleet_server.snapshots.snapshot_events import ReleaseWorker, SnapshotPart, SnapshotRequested

__all__ = ["ANNOUNCED", "NEVER", "SnapshotUnderWay", "Stage"]

NEVER = float("inf")


class Stage(Enum):
    """What the snapshot under way waits for."""

    IDLE = "there is none"
    OPENING = "its folder"
    HOLDING = "where every server stands"
    DISAGREEING = "servers that do not agree on who is in the fleet"
    PLACING = "every server to know where to cut"
    AWAITING_ROUND = "the round to cut after"
    AWAITING_WORKERS = "workers to learn of it"
    CUTTING = "every server's cut"
    WRITING = "every server's file"
    AWAITING_STATES = "the states of workers"
    PUBLISHING = "its manifest"
    SETTLING = "every server to know how it ended"


ANNOUNCED = (
    Stage.AWAITING_WORKERS,
    Stage.CUTTING,
    Stage.WRITING,
    Stage.AWAITING_STATES,
    Stage.PUBLISHING,
)
"""Workers are told of the snapshot."""


@dataclass
class SnapshotUnderWay:
    """The snapshot under way.

    Attributes:
        asked: Who wants which.
        number: Its own; numbers only rise.
        path, folder: Where it will be, and where its files are until then.
        agree_by: When the servers must agree on who is in the fleet.
        members: Incarnations of the workers in it, by seat.
        round: Sync mode: the last round in it; None in other modes.
        base: Number and path of the snapshot that this delta builds on.
        learned: Calls of workers that have learned of it and wait for the others.
        states: What members have delivered.
        parts: Of all servers, in order.
        failure: Why it is given up.
    """

    asked: SnapshotRequested
    number: int
    path: str = ""
    folder: str = ""
    agree_by: float = NEVER
    members: dict[int, int] = field(default_factory=dict)
    round: int | None = None
    base: tuple[int, str] | None = None
    learned: dict[int, Call] = field(default_factory=dict)
    states: dict[int, Any] = field(default_factory=dict)
    parts: tuple[SnapshotPart, ...] = ()
    failure: PsfleetError | None = None

    @property
    def is_own(self) -> bool:
        """Whether the job keeps it, so that logs may start from it."""
        return not self.asked.request.path

    def cutting(self) -> PendingCut:
        """A cut of this snapshot, at a place that is still to be said."""
        request = self.asked.request
        since = self.base[0] if self.base else 0
        return PendingCut(self.number, since=since, remember=request.base or request.delta)

    def release(self, call: Call) -> ReleaseWorker:
        """Tell a worker what to do for this snapshot."""
        return ReleaseWorker(call, mark=self.round is None, round=self.round or 0)

    def explained(self, error: Exception) -> PsfleetError:
        """What is told to whoever asked for the snapshot."""
        if isinstance(error, PsfleetError):
            return type(error)(f"snapshot {self.number} was not taken: {error}")
        why = str(error) if isinstance(error, OSError) else repr(error)
        return CheckpointError(f"snapshot {self.number} was not taken: {why}")
