"""Messages, decisions and replies of the coordinator.

Each decision goes to the journal before any reply depends on it; psfleet_server.durability.records
writes and reads them.
"""

from dataclasses import dataclass

from psfleet.core.engine.shard.events import Call, SendError
from psfleet.core.engine.shard.membership_view import InstallView, PrepareView
from psfleet.core.net.message_codec import Message
from psfleet_server.coordinator.barriers import (
    CollectiveCompleted,
    CollectiveReply,
    ModeRequest,
    ModeSwitch,
)
from psfleet_server.coordinator.data_dispatch import (
    DataDispatch,
    DatasetBegun,
    DatasetEnded,
    LeaseGranted,
)
from psfleet_server.coordinator.membership import Membership


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat of a worker (of its `incarnation`) or of a server.

    `step`: of a worker the last one it has started, of a server the last closed round. `snapshot`: the last
    one of which a worker has heard.
    """

    index: int
    server: bool = False
    incarnation: int = 0
    boot: int = 0
    step: int = 0
    snapshot: int = 0


@dataclass
class WorkerRequests:
    """Requests to every worker, until withdrawn.

    Attributes:
        snapshot: Number of the snapshot to mark, and its view. Sent in replies to heartbeats.
        complete: Number and folder of the newest complete snapshot of the job. Sent in replies to heartbeats.
        mode_request: The mode request from outside, which is announced at the next barrier.
    """

    snapshot: tuple[int, int] | None = None
    complete: tuple[int, str] | None = None
    mode_request: ModeRequest | None = None


@dataclass(frozen=True, slots=True)
class Registration:
    """Reply to `call`: the worker has this incarnation, which counts from round `first` on.

    `completed`: completed collectives. `switch`: the last mode switch among them, which perhaps no server has
    made yet. `progress`: the loop position of the seat's earlier incarnations.
    """

    call: Call
    incarnation: int
    first: int
    view: int
    completed: int
    switch: ModeSwitch | None = None
    progress: str = ""


class TermStarted(Message, frozen=True):
    """A process has become the coordinator, the `term`-th one."""

    term: int


class ViewDecided(Message, frozen=True):
    """A view is decided, with its membership and data dispatch."""

    members: Membership
    dispatch: DataDispatch


class WorkerLeft(Message, frozen=True):
    """A worker has left and takes part in no more collectives."""

    worker: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class PendingMessage:
    """A message for the process `boot` of a server. 0 means that the process is not known yet."""

    server: int
    boot: int
    message: PrepareView | InstallView


Decision = (
    TermStarted
    | ViewDecided
    | CollectiveCompleted
    | WorkerLeft
    | DatasetBegun
    | LeaseGranted
    | DatasetEnded
)
"""A durable change of the coordinator."""

Outcome = CollectiveReply | SendError | Registration
