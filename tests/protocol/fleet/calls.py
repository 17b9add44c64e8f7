"""What travels between the processes of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psfleet.shard.membership_view import Freeze, Install, Report
from psfleet_server.coordinator.data_dispatch import Order

__all__ = [
    "Begun",
    "CreateTable",
    "Deal",
    "Depart",
    "Finish",
    "Follow",
    "Frozen",
    "Installed",
    "Mark",
    "Other",
    "Part",
    "Promote",
    "Register",
    "Release",
    "Request",
    "Response",
    "Silent",
    "Taken",
    "Told",
    "Took",
]


@dataclass(frozen=True)
class Request:
    """A worker's call; sent again until it is answered."""

    number: int
    content: Any


@dataclass(frozen=True)
class Response:
    """Its answer."""

    number: int
    content: Any


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
class Deal:
    """A worker wants data."""

    worker: int
    incarnation: int
    order: Order


@dataclass(frozen=True)
class Depart:
    """A worker comes to no more meetings."""

    worker: int
    incarnation: int


@dataclass(frozen=True)
class Silent:
    """So many seconds pass in which everybody but this worker gives signs of life."""

    worker: int
    seconds: float


@dataclass(frozen=True)
class Told:
    """The coordinator to a server: for its process `boot`."""

    boot: int
    message: Freeze | Install


@dataclass(frozen=True)
class Frozen:
    """A server to the coordinator."""

    server: int
    boot: int
    view: int
    report: Report


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
    """A standby to its primary."""

    attach: int


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
class Begun:
    """Answer of a server that knows of a snapshot: where it stands, and the lives that are in it."""

    closed: int
    mode: str
    lives: Mapping[int, int]


@dataclass(frozen=True)
class Mark:
    """The lead of snapshots to a worker: mark this one, if you are in this life."""

    number: int
    life: int


@dataclass(frozen=True)
class Finish:
    """The lead to a server: say when your part of the snapshot is written. Answered with Taken or None."""

    number: int


@dataclass(frozen=True)
class Taken:
    """A server's part of a snapshot.

    Attributes:
        round: Sync: after which it was cut.
        pushes: By seat the life and its last push in it.
        weights, counts: Rows of the tables, by id.
    """

    round: int
    pushes: Mapping[int, tuple[int, int]]
    weights: Mapping[int, bytes]
    counts: Mapping[int, float]
