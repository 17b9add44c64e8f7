"""Between records and their bytes: of shards and coordinators, in the log and on the way to a standby.

Each has a kind and a body; protos/psfleet/v1/log.proto says what the body of each kind is.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import Message
from numpy.typing import NDArray

from psfleet.errors import LogError
from psfleet.schema.table import TableSpec
from psfleet.shard.events import (
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
from psfleet.shard.membership_view import InstallView
from psfleet.wire import segments
from psfleet.wire.body import described, pack, read_alone, read_arrays, unpack
from psfleet.wire.frame import Part
from psfleet.wire.membership_messages import read_install, write_install
from psfleet.wire.server_state import ServerState, write_state
from psfleet.wire.table_clocks import clock_message, read_clock_message
from psfleet.wire.table_messages import read_spec, write_spec
from psfleet.wire.v1 import log_pb2, membership_pb2, shard_pb2
from psfleet.wire.v1.frame_pb2 import Header
from psfleet.wire.worker_requests import (
    read_join,
    read_leave,
    read_push,
    read_shrink,
    write_join,
    write_leave,
    write_push,
    write_shrink,
)
from psfleet_server.coordinator.coordinator_messages import Decision
from psfleet_server.durability.decisions import write_decision

__all__ = ["RecordKind", "cut_of", "decode", "encode", "encode_change", "encode_state", "name_of"]

SpecOf = Callable[[int], TableSpec]
Arrays = Sequence[NDArray[Any]]


class RecordKind(enum.IntEnum):
    """Of records. A number is never used for another kind; 9 stands for none."""

    CREATE = 1
    JOIN = 2
    LEAVE = 3
    PUSH = 4
    WRITE = 5
    CLOSE = 6
    DECISION = 7  # of the coordinator
    VIEW = 8
    READY = 10  # the server has been ready, or a standby has all that its primary has
    FILL = 11
    CUT = 12
    SHRINK = 13
    TICK = 14
    EVICT = 15
    CORE = 16  # what an earlier job was, from whose snapshot this one goes on
    COPIED = 17  # what the primary is, at the end of a standby's copy


_NAMES = {kind.value: kind.name.lower() for kind in RecordKind}


def name_of(kind: int) -> str:
    """What `psfleet log` calls a kind of records."""
    return _NAMES.get(kind, f"kind {kind}")


def encode(record: Record) -> tuple[int, list[Part]]:
    """The kind and the body of a record of a shard."""
    kind, message, groups = _encode(record)
    return kind, pack(message, groups)


def encode_change(decision: Decision) -> tuple[int, list[Part]]:
    """The kind and the body of a record of a coordinator."""
    return RecordKind.DECISION, pack(write_decision(decision))


def encode_state(kind: RecordKind, state: ServerState) -> tuple[int, list[Part]]:
    """The kind and the body of a record of what a server is beside its tables."""
    return kind, write_state(state)


def _encode(record: Record) -> tuple[RecordKind, Message, Sequence[Arrays]]:
    match record:
        case Push():
            header, pieces = write_push(record)
            return RecordKind.PUSH, header, [piece.arrays for piece in pieces]
        case CloseRound(number, members, progress):
            close = log_pb2.CloseRecord(round=number, members=members, progress=progress)
            return RecordKind.CLOSE, close, ()
        case CreateTable(spec, value, maker):
            create = log_pb2.CreateRecord(
                spec=write_spec(spec), maker=maker, value=described(value)
            )
            return RecordKind.CREATE, create, [[value]]
        case Join():
            return RecordKind.JOIN, write_join(record), ()
        case Leave():
            return RecordKind.LEAVE, write_leave(record), ()
        case WriteState(states, worker, incarnation, number):
            pieces = [segments.write_state(state) for state in states]
            header = Header(
                worker=worker,
                incarnation=incarnation,
                sequence=number,
                segments=[piece.segment for piece in pieces],
            )
            return RecordKind.WRITE, header, [piece.arrays for piece in pieces]
        case RestorePart(table, clock, columns):
            fill = log_pb2.FillRecord(
                table=table,
                clock=clock_message(clock),
                columns=[described(column, name) for name, column in columns.items()],
            )
            return RecordKind.FILL, fill, [[column] for column in columns.values()]
        case Shrink():
            return RecordKind.SHRINK, write_shrink(record), ()
        case Tick(seconds):
            return RecordKind.TICK, log_pb2.TickRecord(seconds=seconds), ()
        case Evict(table, ids):
            return RecordKind.EVICT, log_pb2.EvictRecord(table=table, ids=described(ids)), [[ids]]
        case MakeCut(number):
            return RecordKind.CUT, log_pb2.CutRecord(number=number), ()
        case InstallView():
            return RecordKind.VIEW, write_install(record), ()


def decode(kind: int, body: memoryview, spec_of: SpecOf) -> Record:
    """A record of a shard again; its arrays lie in the body.

    Raises:
        LogError: There are no records of that kind.
        FrameError: It has a field that this version does not know, or does not fit its table.
    """
    if kind in _PLAIN:
        expected, read = _PLAIN[kind]
        return read(read_alone(expected, body))
    if kind not in _BULKY:
        raise LogError(f"its kind {kind} is unknown to this version of psfleet")
    expected, read_bulky = _BULKY[kind]
    return read_bulky(*unpack(expected, body), spec_of)


def cut_of(body: memoryview) -> int:
    """Of which snapshot a record of a cut is."""
    return read_alone(log_pb2.CutRecord, body).number


def _read_push(header: Header, payload: memoryview, spec_of: SpecOf) -> Push:
    return read_push(header, segments.read_gradients(header, payload, spec_of))


def _read_write(header: Header, payload: memoryview, spec_of: SpecOf) -> WriteState:
    states = tuple(segments.read_states(header, payload, spec_of))
    return WriteState(states, header.worker, header.incarnation, header.sequence)


def _read_create(message: log_pb2.CreateRecord, payload: memoryview, _: SpecOf) -> CreateTable:
    [value] = read_arrays([message.value], payload)
    maker = message.maker if message.HasField("maker") else None
    return CreateTable(read_spec(message.spec), value, maker)


def _read_fill(message: log_pb2.FillRecord, payload: memoryview, _: SpecOf) -> RestorePart:
    arrays = read_arrays(message.columns, payload)
    columns = {each.name: array for each, array in zip(message.columns, arrays, strict=True)}
    return RestorePart(message.table, read_clock_message(message.clock), columns)


def _read_evict(message: log_pb2.EvictRecord, payload: memoryview, _: SpecOf) -> Evict:
    [ids] = read_arrays([message.ids], payload)
    return Evict(message.table, ids)


def _read_close(message: log_pb2.CloseRecord) -> CloseRound:
    return CloseRound(message.round, tuple(message.members), dict(sorted(message.progress.items())))


_PLAIN: dict[int, tuple[type[Message], Callable[[Any], Record]]] = {
    RecordKind.JOIN: (shard_pb2.JoinRequest, read_join),
    RecordKind.LEAVE: (shard_pb2.LeaveRequest, read_leave),
    RecordKind.CLOSE: (log_pb2.CloseRecord, _read_close),
    RecordKind.VIEW: (membership_pb2.InstallRequest, read_install),
    RecordKind.CUT: (log_pb2.CutRecord, lambda message: MakeCut(message.number)),
    RecordKind.SHRINK: (shard_pb2.ShrinkRequest, read_shrink),
    RecordKind.TICK: (log_pb2.TickRecord, lambda message: Tick(message.seconds)),
}
"""Kinds without arrays."""

_BULKY: dict[int, tuple[type[Message], Callable[[Any, memoryview, SpecOf], Record]]] = {
    RecordKind.CREATE: (log_pb2.CreateRecord, _read_create),
    RecordKind.PUSH: (Header, _read_push),
    RecordKind.WRITE: (Header, _read_write),
    RecordKind.FILL: (log_pb2.FillRecord, _read_fill),
    RecordKind.EVICT: (log_pb2.EvictRecord, _read_evict),
}
"""Kinds with arrays."""
