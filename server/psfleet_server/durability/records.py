"""Records of a shard and decisions of the coordinator, as a log, a standby and a move of rows get them.

A record is a kind, which is a number, and a body (psfleet/core/net/body.py) that holds the event or decision
itself. `durability/log.py` says how both lie in a file. A reader refuses a kind that it does not know, and a
body with other fields than those of its class.
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
    """Collect a server's state without its tables; on server 0 with the coordinator's decisions."""
    return ServerState(shard, None if coordinator is None else write_coordinator(coordinator))


def become(coordinator: Coordinator, content: bytes) -> None:
    """Take over the decisions of an earlier coordinator.

    Raises:
        PsfleetError: The body holds what cannot have been; nothing was changed.
    """
    state: CoordinatorState = unpack(CoordinatorState, memoryview(content))
    coordinator.term, coordinator.members = state.term, state.members
    coordinator.collectives, coordinator.dispatch = state.collectives, state.dispatch


class RecordKind(enum.IntEnum):
    """Kinds of records. A number is never used for another kind; 9 stands for none."""

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
    """A CreateTable whose definition is the message of protos/psfleet/v1/shard.proto."""

    spec: bytes
    value: NDArray[np.float32]
    maker: int | None


class StoredJoin(Struct, frozen=True):
    """A Join whose mode is its number and the settings that servers know."""

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
    """Return the name that `psfleet log` gives to a kind of records."""
    return _NAMES.get(kind, f"kind {kind}")


def encode(record: Record) -> tuple[int, list[Part]]:
    """Return the kind and the body of a record of a shard."""
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
    """Return the kind and the body of a record of a coordinator."""
    return RecordKind.DECISION, pack(decision)


def encode_state(kind: RecordKind, state: ServerState) -> tuple[int, list[Part]]:
    """Return the kind and the body of a record of what a server is beside its tables."""
    return kind, write_state(state)


def decode(kind: int, body: memoryview) -> Record:
    """Return the record of a shard in a body, in which its arrays lie.

    Raises:
        LogError: There are no records of that kind.
        FrameError: It has a field that this version does not know, or is damaged.
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
    """Return the decision in a body.

    Raises:
        FrameError: It holds none, or has a field that this version does not know.
        UsageError: It holds one that cannot have been.
    """
    decision: Decision = unpack(Decision, body, "decision")
    return decision


def cut_of(body: memoryview) -> int:
    """Return the snapshot's number in the record of a cut."""
    cut: MakeCut = unpack(MakeCut, body)
    return cut.number
