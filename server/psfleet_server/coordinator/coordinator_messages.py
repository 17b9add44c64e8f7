"""Inputs, decisions and outcomes of the coordinator.

A decision changes the coordinator's state durably. The decision goes to the journal before any reply depends
on it (psfleet_server.durability.records encodes it), and replaying all decisions gives the same state again.
Outcomes are replies to calls, which the code around the coordinator sends.
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
        server: True for a server.
        incarnation: Number of the worker's incarnation, which the registration has assigned.
        boot: Random number that identifies the process.
        step: Last push or round of the worker, or last closed round of the server.
        snapshot: Number of the last snapshot whose request the worker has received.
    """

    index: int
    server: bool = False
    incarnation: int = 0
    boot: int = 0
    step: int = 0
    snapshot: int = 0


@dataclass
class WorkerRequests:
    """Requests to every worker. A request is repeated in every reply until the caller clears it.

    Attributes:
        snapshot: A pair: the number of the snapshot that workers have to mark (name their last push before
            it), and the number of the membership for which it is taken. Sent in replies to heartbeats.
        complete: Number and folder of the newest complete snapshot of the job. Sent in replies to heartbeats.
        mode_request: The request of `psfleet mode` for another mode. The next barrier announces it.
    """

    snapshot: tuple[int, int] | None = None
    complete: tuple[int, str] | None = None
    mode_request: ModeRequest | None = None


@dataclass(frozen=True, slots=True)
class Registration:
    """Reply to a worker's registration: the worker is a member of the fleet.

    Attributes:
        incarnation: Number that identifies this process as the worker's present one (*incarnation*). The
            numbers grow over all workers.
        first: First round in which the servers expect pushes of this process.
        view: Number of the last view (membership of the fleet).
        completed: Number of completed collectives.
        switch: Last mode switch among the completed collectives, or None. Perhaps no server has applied the
            switch yet.
        progress: Loop position that an earlier process of the same worker has reached, or empty.
    """

    call: Call
    incarnation: int
    first: int
    view: int
    completed: int
    switch: ModeSwitch | None = None
    progress: str = ""


class TermStarted(Message, frozen=True):
    """Decision that a process becomes the coordinator. Each such process gets a term, numbered from 1."""

    term: int


class ViewDecided(Message, frozen=True):
    """Decision on a view (a numbered membership), with the members and the distribution of data under it."""

    members: Membership
    dispatch: DataDispatch


class WorkerLeft(Message, frozen=True):
    """Decision that a worker has finished its script and takes part in no more collectives."""

    worker: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class PendingMessage:
    """Message to a server during a change of members.

    `boot` identifies the server's process, or is 0 if that is not known yet.
    """

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
"""A durable change of the coordinator's state, and one record of the log."""

Outcome = CollectiveReply | SendError | Registration
