"""What travels between the processes of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psfleet.core.engine.shard.membership_view import InstallView, PrepareView, ViewReport
from psfleet_server.coordinator.data_dispatch import DatasetRequest


@dataclass(frozen=True)
class Request:
    """A worker's call; sent again until it is answered."""

    number: int
    content: Any


@dataclass(frozen=True)
class Response:
    """Its answer. `servers`: where all servers are, if their number has changed."""

    number: int
    content: Any
    servers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Register:
    """A worker process has started."""

    worker: int
    boot: int


@dataclass(frozen=True)
class CreateTable:
    """A worker wants a table."""

    spec: Any
    worker: int


@dataclass(frozen=True)
class AssignData:
    """A worker wants data."""

    worker: int
    incarnation: int
    request: DatasetRequest


@dataclass(frozen=True)
class Depart:
    """A worker comes to no more collectives."""

    worker: int
    incarnation: int


@dataclass(frozen=True)
class Silent:
    """So many seconds pass in which everybody but this worker gives liveness signals."""

    worker: int
    seconds: float


@dataclass(frozen=True)
class Told:
    """The coordinator to a server: for its process `boot`."""

    boot: int
    message: PrepareView | InstallView


@dataclass(frozen=True)
class Frozen:
    """A server to the coordinator."""

    server: int
    boot: int
    view: int
    report: ViewReport


@dataclass(frozen=True)
class Installed:
    """A server to the coordinator."""

    server: int
    boot: int
    view: int


@dataclass(frozen=True)
class Other:
    """A server to the coordinator: its process is another one than was meant."""

    server: int
    boot: int


@dataclass(frozen=True)
class Follow:
    """A standby of one of so many servers to its primary."""

    attach: int
    servers: int


@dataclass(frozen=True)
class Part:
    """The `place`-th message of the stream to a standby: a record, or kind 0 for "required".

    `record`: for the checks of a run what it says; of the end of the copy, all records before it.
    """

    attach: int
    place: int
    number: int
    kind: int
    body: bytes
    record: object


@dataclass(frozen=True)
class Took:
    """A standby to its primary: it has taken the stream up to a place, and the record of a number."""

    attach: int
    place: int
    number: int


@dataclass(frozen=True)
class Promote:
    """The launcher to a standby: take the place of your primary."""


@dataclass(frozen=True)
class Release:
    """The launcher to a primary: no standby up to this attachment will ever take over."""

    attach: int


@dataclass(frozen=True)
class AskServers:
    """A worker wants another number of servers."""

    servers: int


@dataclass(frozen=True)
class MoveRows:
    """A server to another, as the service Scaling has it: a method and its message."""

    method: str
    body: bytes


@dataclass(frozen=True)
class Announced:
    """Server 0 to a worker, all the time: a snapshot is being taken."""

    number: int


@dataclass(frozen=True)
class Learned:
    """A worker to server 0: it has learned of a snapshot."""

    number: int
    worker: int
    incarnation: int


@dataclass(frozen=True)
class Mark:
    """Server 0 to a worker in this incarnation: all have learned of the snapshot; mark it, or (sync) here is
    its last round."""

    number: int
    incarnation: int
    round: int | None


@dataclass(frozen=True)
class Delivered:
    """A worker to server 0: its state in a snapshot, which is the number of its last push or round."""

    number: int
    worker: int
    incarnation: int
    state: int


@dataclass(frozen=True)
class Finish:
    """Server 0 to a server: say when its part of the snapshot is cut, or written. Answered with None: not
    yet."""

    number: int
    cut: bool


@dataclass(frozen=True)
class Taken:
    """A server's part of a snapshot.

    Attributes:
        round: Sync: after which it was cut.
        pushes: By seat the incarnation and its last push in it.
        left: Seats whose workers had left.
        rows: By table the weights by id.
        counts: How often each sample was used.
    """

    round: int
    pushes: Mapping[int, tuple[int, int]]
    left: frozenset[int]
    rows: Mapping[str, Mapping[int, bytes]]
    counts: Mapping[int, float]


@dataclass(frozen=True)
class Published:
    """The manifest of a complete snapshot: the parts of all servers, the states of workers by seat.

    Attributes:
        left: Seats that had left when it was published; their states may be missing.
    """

    number: int
    parts: tuple[Taken, ...]
    states: Mapping[int, int]
    left: frozenset[int]
