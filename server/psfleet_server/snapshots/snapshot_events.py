"""Events of the snapshot coordinator, and its instructions to its runner.

A `call` names a request that waits for an answer; the coordinator only hands it back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psfleet.checkpoint import CutPosition
from psfleet.core.base.errors import CheckpointError
from psfleet.core.engine.shard.events import Call, SendError
from psfleet.core.engine.shard.snapshot_cuts import PendingCut


@dataclass(frozen=True)
class SnapshotTimeouts:
    """Time limits of a snapshot, in seconds.

    Attributes:
        cut: Until every server is cut. Pushes behind a mark wait as long.
        file: Until every file is on the disk.
        worker: Until every worker has delivered its state.
    """

    cut: float = 10.0
    file: float = 600.0
    worker: float = 10.0


@dataclass(frozen=True)
class SnapshotRequest:
    """A request for a snapshot.

    Attributes:
        path: Its folder; empty: a folder of the job, named after the snapshot's number.
        delta: Only what has changed since the last base or delta. It holds everything if a server no
            longer remembers that one, because the server was started again.
        base: The next delta holds the changes since this snapshot.
        every: Sync mode: cut after the next round that is a multiple of this; 0: after any round.
        script_waits: The script of a worker waits for it.
    """

    path: str = ""
    delta: bool = False
    base: bool = False
    every: int = 0
    script_waits: bool = False


class SnapshotPostponed(CheckpointError):
    """A snapshot is not taken now although nothing is wrong: the fleet changes, or another is wanted."""


@dataclass(frozen=True)
class Standing:
    """State of a server when a cut begins.

    Attributes:
        mode: Mode of the fleet; empty: no worker has joined.
        closed: Last closed round.
        incarnations: Incarnations of the workers that have not left, by seat.
        delta_bases: Numbers of the snapshots since which the server can tell what has changed.
    """

    mode: str
    closed: int
    incarnations: Mapping[int, int]
    delta_bases: tuple[int, ...] = ()


@dataclass(frozen=True)
class SnapshotPart:
    """A server's file on the disk.

    Attributes:
        cut: Position of the server's cut.
        content: Entry of the file in the manifest; the coordinator only passes it on.
    """

    cut: CutPosition
    content: Any


# -- events --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SnapshotRequested:
    """Somebody asks for a snapshot. Answered with CompleteSnapshot or Refuse.

    `seen`: the highest number of a snapshot on this server's disk or in its shard.
    """

    call: Call
    request: SnapshotRequest
    seen: int


@dataclass(frozen=True)
class DraftOpened:
    """The snapshot will be at `path`; until it is complete its files go to `folder`."""

    path: str
    folder: str


@dataclass(frozen=True)
class ServersReplied:
    """All servers have answered, in order: BeginCuts with a Standing, AwaitParts with a SnapshotPart."""

    replies: tuple[Any, ...] = ()


@dataclass(frozen=True)
class SnapshotFailed:
    """The last instruction could not be performed."""

    error: Exception


@dataclass(frozen=True)
class SnapshotPublished:
    """The manifest is on the disk: the snapshot is complete."""


@dataclass(frozen=True)
class CutMade:
    """Server 0 has made its cut of this snapshot."""

    number: int


@dataclass(frozen=True)
class CutLost:
    """Server 0 has given up its cut of this snapshot: the fleet has changed, or the server ends."""

    number: int


@dataclass(frozen=True)
class WorkerLearned:
    """A worker has learned of a snapshot. Answered with ReleaseWorker once all workers have."""

    call: Call
    number: int
    worker: int
    incarnation: int


@dataclass(frozen=True)
class WorkerStateArrived:
    """A worker delivers its state in a snapshot.

    Attributes:
        number: Number of the snapshot; 0: the worker leaves, and `state` is a list of [push or round, state]
            for its last steps.
        state: JSON; None: it has none.
        last: Its last push or round in the state.
    """

    number: int
    worker: int
    incarnation: int
    state: Any
    last: int = 0


@dataclass(frozen=True)
class WorkerIntroduced:
    """A worker has started. `keeps`: it has state that belongs into snapshots."""

    worker: int
    incarnation: int
    keeps: bool


@dataclass(frozen=True)
class MembersChanged:
    """A worker has left, or is heard for the first time.

    Attributes:
        left: Seats whose workers have left.
        alive: Those that have sent a heartbeat since this server has started.
        unheard: Those of others that a server 0 before this one knew.
        last: The number of the last snapshot of which any of them has heard, from whichever server 0.
    """

    left: frozenset[int]
    alive: frozenset[int]
    unheard: frozenset[int] = frozenset()
    last: int = 0


@dataclass(frozen=True)
class TimePassed:
    """The coordinator's deadline has come."""


@dataclass(frozen=True)
class StopSnapshots:
    """The server ends: wait for no worker and no round any more. Files that are being written count."""


SnapshotEvent = (
    SnapshotRequested
    | DraftOpened
    | ServersReplied
    | SnapshotFailed
    | SnapshotPublished
    | CutMade
    | CutLost
    | WorkerLearned
    | WorkerStateArrived
    | WorkerIntroduced
    | MembersChanged
    | TimePassed
    | StopSnapshots
)


# -- instructions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenDraft:
    """Make the folder for a snapshot's files. Answered with DraftOpened or SnapshotFailed."""

    number: int
    path: str


@dataclass(frozen=True)
class BeginCuts:
    """Tell every server where to cut. Answered with ServersReplied or SnapshotFailed.

    A cut with neither a round nor members holds the rounds until the next message says where to cut.
    """

    folder: str
    cutting: PendingCut


@dataclass(frozen=True)
class WatchCut:
    """Say when server 0 has made its cut, or has given it up: CutMade or CutLost, once."""

    number: int


@dataclass(frozen=True)
class AwaitParts:
    """Wait until every server is cut, or has written its file. Answered like BeginCuts."""

    number: int
    cut: bool


@dataclass(frozen=True)
class SettleCuts:
    """Send the outcome to every server. Answered with ServersReplied even if servers are away.

    Attributes:
        number: Number of the snapshot.
        complete: Logs and standbys may start from it.
        base: The last snapshot that matters for a delta; 0: none.
    """

    number: int
    complete: bool
    base: int


@dataclass(frozen=True)
class AnnounceSnapshot:
    """Tell all workers of this snapshot, at once and with their heartbeats; None: stop telling them."""

    number: int | None


@dataclass(frozen=True)
class ReleaseWorker:
    """Answer WorkerLearned. `mark`: the worker marks its stream; else `round` is the last in the snapshot."""

    call: Call
    mark: bool
    round: int
    script_waits: bool = False


@dataclass(frozen=True)
class PublishSnapshot:
    """Write the manifest and give the folder its name. Answered with SnapshotPublished or SnapshotFailed.

    Attributes:
        cut: Position of the snapshot in the training.
        parts: File of each server.
        states: States of workers, by seat.
        base: Path of the snapshot that this delta builds on; empty: it is no delta.
    """

    cut: CutPosition
    parts: tuple[Any, ...]
    states: Mapping[int, Any]
    base: str


@dataclass(frozen=True)
class CloseDraft:
    """Remove what is left of the draft folder, and close the connections to the servers."""


@dataclass(frozen=True)
class PruneSnapshots:
    """Remove the oldest of the job's own snapshots."""


@dataclass(frozen=True)
class CompleteSnapshot:
    """Answer SnapshotRequested: the snapshot is complete."""

    call: Call
    number: int
    path: str


@dataclass(frozen=True)
class WarnOperator:
    """Write a line to the console of the job."""

    line: str


SnapshotInstruction = (
    OpenDraft
    | BeginCuts
    | WatchCut
    | AwaitParts
    | SettleCuts
    | AnnounceSnapshot
    | ReleaseWorker
    | SendError
    | PublishSnapshot
    | CloseDraft
    | PruneSnapshots
    | CompleteSnapshot
    | WarnOperator
)
