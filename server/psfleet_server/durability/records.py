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
    Close,
    Create,
    Cut,
    Evict,
    Fill,
    Join,
    Leave,
    Push,
    Record,
    Shrink,
    Tick,
    Write,
)
from psfleet.shard.membership_view import Install
from psfleet.tables.row_data import Clock
from psfleet.wire import segments
from psfleet.wire.body import described, pack, read_alone, read_arrays, unpack
from psfleet.wire.frame import Part
from psfleet.wire.membership_messages import read_install, write_install
from psfleet.wire.server_state import ServerState, write_state
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
from psfleet_server.coordinator.coordinator import Decision
from psfleet_server.durability.decisions import write_decision

__all__ = ["Kind", "cut_of", "decode", "encode", "encode_change", "encode_state", "name_of"]

SpecOf = Callable[[int], TableSpec]
Arrays = Sequence[NDArray[Any]]


class Kind(enum.IntEnum):
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


_NAMES = {kind.value: kind.name.lower() for kind in Kind}


def name_of(kind: int) -> str:
    """What `psfleet log` calls a kind of records."""
    return _NAMES.get(kind, f"kind {kind}")


def encode(record: Record) -> tuple[int, list[Part]]:
    """The kind and the body of a record of a shard."""
    kind, message, groups = _encode(record)
    return kind, pack(message, groups)


def encode_change(decision: Decision) -> tuple[int, list[Part]]:
    """The kind and the body of a record of a coordinator."""
    return Kind.DECISION, pack(write_decision(decision))


def encode_state(kind: Kind, state: ServerState) -> tuple[int, list[Part]]:
    """The kind and the body of a record of what a server is beside its tables."""
    return kind, write_state(state)


def _encode(record: Record) -> tuple[Kind, Message, Sequence[Arrays]]:
    match record:
        case Push():
            header, pieces = write_push(record)
            return Kind.PUSH, header, [piece.arrays for piece in pieces]
        case Close(number, members, progress):
            close = log_pb2.CloseRecord(round=number, members=members, progress=progress)
            return Kind.CLOSE, close, ()
        case Create(spec, value, maker):
            create = log_pb2.CreateRecord(
                spec=write_spec(spec), maker=maker, value=described(value)
            )
            return Kind.CREATE, create, [[value]]
        case Join():
            return Kind.JOIN, write_join(record), ()
        case Leave():
            return Kind.LEAVE, write_leave(record), ()
        case Write(states, worker, incarnation, number):
            pieces = [segments.write_state(state) for state in states]
            header = Header(
                worker=worker,
                incarnation=incarnation,
                sequence=number,
                segments=[piece.segment for piece in pieces],
            )
            return Kind.WRITE, header, [piece.arrays for piece in pieces]
        case Fill(table, clock, columns):
            fill = log_pb2.FillRecord(
                table=table,
                clock=_write_clock(clock),
                columns=[described(column, name) for name, column in columns.items()],
            )
            return Kind.FILL, fill, [[column] for column in columns.values()]
        case Shrink():
            return Kind.SHRINK, write_shrink(record), ()
        case Tick(seconds):
            return Kind.TICK, log_pb2.TickRecord(seconds=seconds), ()
        case Evict(table, ids):
            return Kind.EVICT, log_pb2.EvictRecord(table=table, ids=described(ids)), [[ids]]
        case Cut(number):
            return Kind.CUT, log_pb2.CutRecord(number=number), ()
        case Install():
            return Kind.VIEW, write_install(record), ()


def _write_clock(clock: Clock) -> log_pb2.TableClock:
    ticks = [log_pb2.TableTick(seconds=seconds, step=step) for seconds, step in clock.ticks]
    return log_pb2.TableClock(step=clock.step, shrinks=clock.shrinks, ticks=ticks)


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


def _read_write(header: Header, payload: memoryview, spec_of: SpecOf) -> Write:
    states = tuple(segments.read_states(header, payload, spec_of))
    return Write(states, header.worker, header.incarnation, header.sequence)


def _read_create(message: log_pb2.CreateRecord, payload: memoryview, _: SpecOf) -> Create:
    [value] = read_arrays([message.value], payload)
    maker = message.maker if message.HasField("maker") else None
    return Create(read_spec(message.spec), value, maker)


def _read_fill(message: log_pb2.FillRecord, payload: memoryview, _: SpecOf) -> Fill:
    said = message.clock
    ticks = tuple((tick.seconds, tick.step) for tick in said.ticks)
    arrays = read_arrays(message.columns, payload)
    columns = {each.name: array for each, array in zip(message.columns, arrays, strict=True)}
    return Fill(message.table, Clock(said.step, tuple(said.shrinks), ticks), columns)


def _read_evict(message: log_pb2.EvictRecord, payload: memoryview, _: SpecOf) -> Evict:
    [ids] = read_arrays([message.ids], payload)
    return Evict(message.table, ids)


def _read_close(message: log_pb2.CloseRecord) -> Close:
    return Close(message.round, tuple(message.members), dict(sorted(message.progress.items())))


_PLAIN: dict[int, tuple[type[Message], Callable[[Any], Record]]] = {
    Kind.JOIN: (shard_pb2.JoinRequest, read_join),
    Kind.LEAVE: (shard_pb2.LeaveRequest, read_leave),
    Kind.CLOSE: (log_pb2.CloseRecord, _read_close),
    Kind.VIEW: (membership_pb2.InstallRequest, read_install),
    Kind.CUT: (log_pb2.CutRecord, lambda message: Cut(message.number)),
    Kind.SHRINK: (shard_pb2.ShrinkRequest, read_shrink),
    Kind.TICK: (log_pb2.TickRecord, lambda message: Tick(message.seconds)),
}
"""Kinds without arrays."""

_BULKY: dict[int, tuple[type[Message], Callable[[Any, memoryview, SpecOf], Record]]] = {
    Kind.CREATE: (log_pb2.CreateRecord, _read_create),
    Kind.PUSH: (Header, _read_push),
    Kind.WRITE: (Header, _read_write),
    Kind.FILL: (log_pb2.FillRecord, _read_fill),
    Kind.EVICT: (log_pb2.EvictRecord, _read_evict),
}
"""Kinds with arrays."""
