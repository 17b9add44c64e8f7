"""Between the coordinator's state and decisions and their messages (state.proto, log.proto).

Each has a kind and a body; protos/psfleet/v1/log.proto says what the body of each kind is.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from psfleet.core.base.errors import FrameError, LogError
from psfleet.core.engine.schema.table import TableSpec
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
from psfleet.core.net import segments
from psfleet.core.net.body import described, dtype_of, pack, read_alone, read_arrays, unpack
from psfleet.core.net.frame import Part
from psfleet.core.net.membership_messages import INSTALL, MODE
from psfleet.core.net.message_converter import Converter, MessageCodec, codec_of
from psfleet.core.net.server_state import ServerState, write_state
from psfleet.core.net.table_messages import CLOCK, read_spec, write_spec
from psfleet.core.net.v1 import log_pb2, shard_pb2, state_pb2
from psfleet.core.net.v1.frame_pb2 import Header
from psfleet.core.net.v1.log_pb2 import DecisionRecord
from psfleet.core.net.worker_requests import JOIN, LEAVE, SHRINK, read_push, write_push
from psfleet_server.coordinator.barriers import Array, CollectiveCompleted, CollectiveState
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.coordinator_messages import (
    Decision,
    TermStarted,
    ViewDecided,
    WorkerLeft,
)
from psfleet_server.coordinator.data_dispatch import (
    DataDispatch,
    DatasetBegun,
    DatasetEnded,
    LeaseGranted,
    TornStep,
)
from psfleet_server.coordinator.membership import Membership

MEMBERS = Converter(Membership, state_pb2.Members)
DISPATCH = Converter(DataDispatch, state_pb2.DataDispatch)
TORN_STEP = Converter(TornStep, shard_pb2.TornStep)
_FIELDS: dict[type, str] = {
    TermStarted: "started",
    ViewDecided: "view_decided",
    CollectiveCompleted: "completed",
    WorkerLeft: "left",
    DatasetBegun: "begun",
    LeaseGranted: "leased",
    DatasetEnded: "ended",
}
_STORED: Any = DecisionRecord.DESCRIPTOR.fields_by_name
SpecOf = Callable[[int], TableSpec]
Arrays = Sequence[NDArray[Any]]


def write_tensor(array: Array) -> state_pb2.Tensor:
    """The message of a small array."""
    return state_pb2.Tensor(dtype=array.dtype.str, shape=array.shape, data=array.tobytes())


def read_tensor(message: state_pb2.Tensor) -> Array:
    """The array that a message holds.

    Raises:
        FrameError: Its bytes are not of its shape.
    """
    try:
        values: NDArray[np.generic] = np.frombuffer(message.data, dtype_of(message.dtype))
        return values.reshape(tuple(message.shape)).copy()
    except ValueError:
        raise FrameError(
            f"an array of {message.dtype} and shape {list(message.shape)} has "
            f"{len(message.data)} bytes"
        ) from None


TENSOR = MessageCodec(state_pb2.Tensor, write_tensor, read_tensor)
COLLECTIVES = Converter(CollectiveState, state_pb2.Collectives, TENSOR, MODE)


def write_coordinator(coordinator: Coordinator) -> state_pb2.CoordinatorState:
    """All that a coordinator has decided."""
    return state_pb2.CoordinatorState(
        term=coordinator.term,
        members=MEMBERS.write(coordinator.members),
        collectives=COLLECTIVES.write(coordinator.collectives),
        dispatch=DISPATCH.write(coordinator.dispatch),
    )


def server_state(shard: ShardState, coordinator: Coordinator | None) -> ServerState:
    """Collect a server's state without its tables; on server 0 with the coordinator's decisions."""
    coordination = None if coordinator is None else write_coordinator(coordinator)
    return ServerState(shard, coordination)


def become(coordinator: Coordinator, message: state_pb2.CoordinatorState) -> None:
    """Take over the decisions of an earlier coordinator.

    Raises:
        PsfleetError: The message holds what cannot have been; nothing was changed.
    """
    members, dispatch = MEMBERS.read(message.members), DISPATCH.read(message.dispatch)
    coordinator.collectives = COLLECTIVES.read(message.collectives)
    coordinator.term, coordinator.members, coordinator.dispatch = message.term, members, dispatch


if {*_FIELDS} != {*get_args(Decision)} or {*_FIELDS.values()} != {*_STORED}:
    raise TypeError("a decision has no field in DecisionRecord, or a field no decision")
_CODECS = {
    name: codec_of(decision, _STORED[name], (TENSOR, MODE)) for decision, name in _FIELDS.items()
}


def write_decision(decision: Decision) -> DecisionRecord:
    """The message of a record."""
    name = _FIELDS[type(decision)]
    fields: dict[str, Any] = {name: _CODECS[name].write(decision)}
    return DecisionRecord(**fields)


def read_decision(message: DecisionRecord) -> Decision:
    """The decision that a message holds.

    Raises:
        FrameError: It holds none.
        UsageError: It holds one that cannot have been.
    """
    name = message.WhichOneof("decision")
    if name is None:
        raise FrameError("it holds no decision")
    decision: Decision = _CODECS[name].read(getattr(message, name))
    return decision


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
    """Return the name that `psfleet log` gives to a kind of records."""
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
            header, parts = write_push(record)
            return RecordKind.PUSH, header, [segment.arrays for segment in parts]
        case CreateTable(spec, value, maker):
            create = log_pb2.CreateRecord(
                spec=write_spec(spec), maker=maker, value=described(value)
            )
            return RecordKind.CREATE, create, [[value]]
        case WriteState(states, worker, incarnation, number):
            parts = [segments.write_state(state) for state in states]
            header = Header(
                worker=worker,
                incarnation=incarnation,
                sequence=number,
                segments=[segment.segment for segment in parts],
            )
            return RecordKind.WRITE, header, [segment.arrays for segment in parts]
        case RestorePart(table, clock, columns):
            fill = log_pb2.FillRecord(
                table=table,
                clock=CLOCK.write(clock),
                columns=[described(column, name) for name, column in columns.items()],
            )
            return RecordKind.FILL, fill, [[column] for column in columns.values()]
        case Evict(table, ids):
            return RecordKind.EVICT, log_pb2.EvictRecord(table=table, ids=described(ids)), [[ids]]
        case _:
            kind, converter = _BY_NAMES[type(record)]
            return kind, converter.write(record), ()


def decode(kind: int, body: memoryview, spec_of: SpecOf) -> Record:
    """A record of a shard again; its arrays lie in the body.

    Raises:
        LogError: There are no records of that kind.
        FrameError: It has a field that this version does not know, or does not fit its table.
    """
    if kind in _PLAIN:
        converter = _PLAIN[kind]
        record: Record = converter.read(read_alone(converter.message, body))
        return record
    if kind not in _BULKY:
        raise LogError(f"its kind {kind} is unknown to this version of psfleet")
    expected, read_bulky = _BULKY[kind]
    return read_bulky(*unpack(expected, body), spec_of)


def cut_of(body: memoryview) -> int:
    """Return the number of the snapshot to which a cut's record belongs."""
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
    return RestorePart(message.table, CLOCK.read(message.clock), columns)


def _read_evict(message: log_pb2.EvictRecord, payload: memoryview, _: SpecOf) -> Evict:
    [ids] = read_arrays([message.ids], payload)
    return Evict(message.table, ids)


_BY_NAMES: dict[type, tuple[RecordKind, Converter[Any, Any]]] = {
    Join: (RecordKind.JOIN, JOIN),
    Leave: (RecordKind.LEAVE, LEAVE),
    CloseRound: (RecordKind.CLOSE, Converter(CloseRound, log_pb2.CloseRecord)),
    InstallView: (RecordKind.VIEW, INSTALL),
    MakeCut: (RecordKind.CUT, Converter(MakeCut, log_pb2.CutRecord)),
    Shrink: (RecordKind.SHRINK, SHRINK),
    Tick: (RecordKind.TICK, Converter(Tick, log_pb2.TickRecord)),
}
_PLAIN: dict[int, Converter[Any, Any]] = dict(_BY_NAMES.values())
"""Kinds without arrays."""

_BULKY: dict[int, tuple[type[Message], Callable[[Any, memoryview, SpecOf], Record]]] = {
    RecordKind.CREATE: (log_pb2.CreateRecord, _read_create),
    RecordKind.PUSH: (Header, _read_push),
    RecordKind.WRITE: (Header, _read_write),
    RecordKind.FILL: (log_pb2.FillRecord, _read_fill),
    RecordKind.EVICT: (log_pb2.EvictRecord, _read_evict),
}
"""Kinds with arrays."""
