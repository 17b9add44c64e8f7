"""Encodes the records of a shard and the decisions of the coordinator for logs, standbys and moves of rows.

A record is a kind, which is a number, and a body (psfleet/core/net/body.py) with the event or decision
itself. `durability/log.py` defines how records are stored in a file. A reader refuses an unknown kind, and a
body whose fields differ from those of its class.
"""

import enum
from dataclasses import replace
from typing import Any, get_args

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from psfleet.core.base.errors import LogError
from psfleet.core.engine.shard.events import (
    CloseRound,
    CreateTable,
    Evict,
    Join,
    Leave,
    MakeCut,
    Push,
    Record,
    RestorePart,
    Shrink,
    Tick,
    WriteState,
)
from psfleet.core.engine.shard.membership_view import InstallView
from psfleet.core.engine.shard.shard_state import ShardState
from psfleet.core.net.body import pack, parse, unpack
from psfleet.core.net.frame import Part
from psfleet.core.net.membership_messages import agreed_numbers, read_agreed_numbers
from psfleet.core.net.server_state import ServerState, write_state
from psfleet.core.net.table_messages import read_spec, write_spec
from psfleet.core.net.v1.shard_pb2 import TableSpec
from psfleet_server.coordinator.barriers import CollectiveState
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.coordinator_messages import Decision
from psfleet_server.coordinator.data_dispatch import DataDispatch
from psfleet_server.coordinator.membership import Membership
from psfleet_server.durability.log_shipping import joined


class CoordinatorState(Struct, frozen=True):
    """State of a coordinator: the result of all its decisions."""

    term: int
    members: Membership
    collectives: CollectiveState
    dispatch: DataDispatch


def write_coordinator(coordinator: Coordinator) -> bytes:
    """Encode the state of a coordinator, the result of all its decisions."""
    state = CoordinatorState(
        coordinator.term, coordinator.members, coordinator.collectives, coordinator.dispatch
    )
    return joined(pack(state))


def server_state(shard: ShardState, coordinator: Coordinator | None) -> ServerState:
    """Collect a server's state without its tables. On server 0 the state includes the coordinator's."""
    return ServerState(shard, None if coordinator is None else write_coordinator(coordinator))


def become(coordinator: Coordinator, content: bytes) -> None:
    """Replace a coordinator's state by a saved one.

    Args:
        coordinator: The coordinator to change.
        content: State that `write_coordinator` has encoded.

    Raises:
        PsfleetError: The content is invalid. The coordinator is unchanged.
    """
    state: CoordinatorState = unpack(CoordinatorState, memoryview(content))
    coordinator.term, coordinator.members = state.term, state.members
    coordinator.collectives, coordinator.dispatch = state.collectives, state.dispatch


class RecordKind(enum.IntEnum):
    """Kinds of records in a log. The numbers are stored there, so a number is never reused; 9 is unused."""

    CREATE = 1
    JOIN = 2
    LEAVE = 3
    PUSH = 4
    WRITE = 5
    CLOSE = 6
    DECISION = 7  # of the coordinator
    VIEW = 8
    READY = (
        10  # without a body: the server has been ready, or a standby has all that its primary has
    )
    FILL = 11
    CUT = 12
    SHRINK = 13
    TICK = 14
    EVICT = 15
    CORE = 16  # a ServerState: what an earlier job was, from whose snapshot this one goes on
    COPIED = 17  # a ServerState: what the primary is, at the end of a standby's copy


class StoredTable(Struct, frozen=True):
    """Stored form of a CreateTable event.

    The table's definition is encoded as in protos/psfleet/v1/shard.proto.
    """

    spec: bytes
    value: NDArray[np.float32]
    maker: int | None


class StoredJoin(Struct, frozen=True):
    """Stored form of a Join event (a worker process joins a server).

    The mode is stored as its number and those of its settings that servers need.
    """

    worker: int
    incarnation: int
    mode: tuple[int, ...]
    switch: int
    last: int


_NAMES = {kind.value: kind.name.lower() for kind in RecordKind}
_TYPES: dict[int, Any] = {
    RecordKind.CREATE: StoredTable,
    RecordKind.JOIN: StoredJoin,
    RecordKind.LEAVE: Leave,
    RecordKind.PUSH: Push,
    RecordKind.WRITE: WriteState,
    RecordKind.CLOSE: CloseRound,
    RecordKind.VIEW: InstallView,
    RecordKind.FILL: RestorePart,
    RecordKind.CUT: MakeCut,
    RecordKind.SHRINK: Shrink,
    RecordKind.TICK: Tick,
    RecordKind.EVICT: Evict,
}
_KINDS = {
    **{kind: number for number, kind in _TYPES.items()},
    CreateTable: RecordKind.CREATE,
    Join: RecordKind.JOIN,
}
if {*get_args(Record)} != {*_KINDS} - {StoredTable, StoredJoin}:
    raise TypeError("a record of a shard has no kind, or a kind no record")


def name_of(kind: int) -> str:
    """Return the name of a record kind, as `psfleet log` shows it."""
    return _NAMES.get(kind, f"kind {kind}")


def encode(record: Record) -> tuple[int, list[Part]]:
    """Return the kind and the encoded body of a shard's record."""
    stored: Any = record
    match record:
        case CreateTable(spec, value, maker):
            stored = StoredTable(
                write_spec(spec).SerializeToString(deterministic=True), value, maker
            )
        case Join(worker, incarnation, mode, switch, last):
            stored = StoredJoin(worker, incarnation, agreed_numbers(mode), switch, last)
    return _KINDS[type(record)], pack(stored)


def encode_change(decision: Decision) -> tuple[int, list[Part]]:
    """Return the kind and the encoded body of a coordinator's decision."""
    return RecordKind.DECISION, pack(decision)


def encode_state(kind: RecordKind, state: ServerState) -> tuple[int, list[Part]]:
    """Return `kind`, and the body of a record that holds a server's state without its tables."""
    return kind, write_state(state)


def decode(kind: int, body: memoryview) -> Record:
    """Return the record of a shard that a body contains. Arrays of the record are views of the body.

    Raises:
        LogError: The kind is unknown.
        FrameError: The body has an unknown field or is damaged.
    """
    if kind not in _TYPES:
        raise LogError(f"its kind {kind} is unknown to this version of psfleet")
    stored: Any = unpack(_TYPES[kind], body)
    match stored:
        case StoredTable(spec, value, maker):
            return CreateTable(read_spec(parse(TableSpec, spec)), value, maker)
        case StoredJoin(worker, incarnation, mode, switch, last):
            return Join(worker, incarnation, read_agreed_numbers(mode), switch, last)
        case Push() if stored.cut is not None:
            return replace(
                stored, cut=None
            )  # the record of the cut says where that snapshot was cut
    record: Record = stored
    return record


def read_decision(body: memoryview) -> Decision:
    """Return the coordinator's decision that a body contains.

    Raises:
        FrameError: The body is not a decision, or has an unknown field.
        UsageError: The decision has invalid values.
    """
    decision: Decision = unpack(Decision, body, "decision")
    return decision


def cut_of(body: memoryview) -> int:
    """Return the snapshot's number from the body of a CUT record, which says that a snapshot was taken."""
    cut: MakeCut = unpack(MakeCut, body)
    return cut.number
