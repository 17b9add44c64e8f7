"""What travels between the processes of a run."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from psfleet.core.engine.shard.membership_view import InstallView, PrepareView, ViewReport
from psfleet_server.coordinator.data_dispatch import DatasetRequest


class Request(Struct, frozen=True):
    """A worker's call; sent again until it is answered."""

    number: int
    content: Any


class Response(Struct, frozen=True):
    """Its answer. `servers`: where all servers are, if their number has changed."""

    number: int
    content: Any
    servers: tuple[str, ...] = ()


class Register(Struct, frozen=True):
    """A worker process has started."""

    worker: int
    boot: int


class CreateTable(Struct, frozen=True):
    """A worker wants a table."""

    spec: Any
    worker: int


class AssignData(Struct, frozen=True):
    """A worker wants data."""

    worker: int
    incarnation: int
    request: DatasetRequest


class Depart(Struct, frozen=True):
    """A worker comes to no more collectives."""

    worker: int
    incarnation: int


class Silent(Struct, frozen=True):
    """So many seconds pass in which everybody but this worker gives liveness signals."""

    worker: int
    seconds: float


class Told(Struct, frozen=True):
    """The coordinator to a server: for its process `boot`."""

    boot: int
    message: PrepareView | InstallView


class Frozen(Struct, frozen=True):
    """A server to the coordinator."""

    server: int
    boot: int
    view: int
    report: ViewReport


class Installed(Struct, frozen=True):
    """A server to the coordinator."""

    server: int
    boot: int
    view: int


class Other(Struct, frozen=True):
    """A server to the coordinator: its process is another one than was meant."""

    server: int
    boot: int


class Follow(Struct, frozen=True):
    """A standby of one of so many servers to its primary."""

    attach: int
    servers: int


class Part(Struct, frozen=True):
    """The `place`-th message of the stream to a standby: a record, or kind 0 for "required".

    `record`: for the checks of a run what it says; of the end of the copy, all records before it.
    """

    attach: int
    place: int
    number: int
    kind: int
    body: bytes
    record: object


class Took(Struct, frozen=True):
    """A standby to its primary: it has taken the stream up to a place, and the record of a number."""

    attach: int
    place: int
    number: int


class Promote(Struct, frozen=True):
    """The launcher to a standby: take the place of your primary."""


class Release(Struct, frozen=True):
    """The launcher to a primary: no standby up to this attachment will ever take over."""

    attach: int


class AskServers(Struct, frozen=True):
    """A worker wants another number of servers."""

    servers: int


class MoveRows(Struct, frozen=True):
    """A server to another, as the service Scaling has it: a method and its message."""

    method: str
    body: bytes


class Announced(Struct, frozen=True):
    """Server 0 to a worker, all the time: a snapshot is being taken."""

    number: int


class Learned(Struct, frozen=True):
    """A worker to server 0: it has learned of a snapshot."""

    number: int
    worker: int
    incarnation: int


class Mark(Struct, frozen=True):
    """Server 0 to a worker in this incarnation: all have learned of the snapshot; mark it, or (sync) here is
    its last round."""

    number: int
    incarnation: int
    round: int | None


class Delivered(Struct, frozen=True):
    """A worker to server 0: its state in a snapshot, which is the number of its last push or round."""

    number: int
    worker: int
    incarnation: int
    state: int


class Finish(Struct, frozen=True):
    """Server 0 to a server: say when its part of the snapshot is cut, or written. Answered with None: not
    yet."""

    number: int
    cut: bool


class Taken(Struct, frozen=True):
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


class Published(Struct, frozen=True):
    """The manifest of a complete snapshot: the parts of all servers, the states of workers by seat.

    Attributes:
        left: Seats that had left when it was published; their states may be missing.
    """

    number: int
    parts: tuple[Taken, ...]
    states: Mapping[int, int]
    left: frozenset[int]
