"""Inputs, decisions and outcomes of the coordinator.

A decision changes the coordinator's state for good. It goes to the journal before any reply depends on it
(psfleet_server.durability.records encodes it), and replaying all decisions gives the same state again.
Outcomes are replies to calls, which the shell around the coordinator sends.
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
    """Heartbeat of a worker or of a server.

    Attributes:
        index: Seat of the worker, or number of the server.
        server: True for a server.
        incarnation: Incarnation of the worker.
        boot: Number of the process.
        step: Last push or round of the worker, or last closed round of the server.
        snapshot: Number of the last snapshot that the worker has heard of.
    """

    index: int
    server: bool = False
    incarnation: int = 0
    boot: int = 0
    step: int = 0
    snapshot: int = 0


@dataclass
class WorkerRequests:
    """Requests to every worker, which stand until they are withdrawn.

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
    """Reply to a worker's registration: the worker has a seat.

    Attributes:
        call: The call to answer.
        incarnation: Number of the incarnation.
        first: First round in which the incarnation counts.
        view: Number of the last view.
        completed: Number of completed collectives.
        switch: Last mode switch among them, or None. Perhaps no server has made it yet.
        progress: Loop position of the seat's earlier incarnations, or empty.
    """

    call: Call
    incarnation: int
    first: int
    view: int
    completed: int
    switch: ModeSwitch | None = None
    progress: str = ""


class TermStarted(Message, frozen=True):
    """Decision that a process is the coordinator from now on, in this term. Terms count from 1."""

    term: int


class ViewDecided(Message, frozen=True):
    """Decision on a view, with the membership and data dispatch that belong to it."""

    members: Membership
    dispatch: DataDispatch


class WorkerLeft(Message, frozen=True):
    """Decision that a worker has left and takes part in no more collectives."""

    worker: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class PendingMessage:
    """Message that is due to a server, for the process with number `boot`, or 0 if that is not known yet."""

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
