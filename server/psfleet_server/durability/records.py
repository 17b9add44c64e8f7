"""Records as bytes: of shards and coordinators, as the log keeps them and a standby gets them.

Each has a kind and a body. What a record is in a call (a table that is made, a join, a view) is written
as that message; gradients and states as a frame; the rest as JSON, with arrays after it.
"""

import dataclasses
import enum
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from psfleet.errors import FrameError, LogError
from psfleet.runtime.interface import Gradient
from psfleet.schema.table import TableSpec
from psfleet.shard.events import (
    Close,
    Correction,
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
from psfleet.shard.shard_state import Core
from psfleet.tables.row_data import Clock
from psfleet.wire import segments
from psfleet.wire.membership_messages import read_install, read_position, write_install
from psfleet.wire.table_messages import read_mode, read_spec, write_mode, write_spec
from psfleet.wire.v1 import membership_pb2, shard_pb2
from psfleet.wire.v1.frame_pb2 import Header
from psfleet_server.coordinator.coordinator import Decision
from psfleet_server.durability.bodies import (
    LENGTH,
    frame,
    pack_arrays,
    pack_json,
    split,
    unpack_arrays,
)
from psfleet_server.durability.decisions import encode_decision
from psfleet_server.durability.log import Part

__all__ = [
    "Kind",
    "decode",
    "decode_core",
    "encode",
    "encode_change",
    "encode_core",
    "name_of",
    "read_push",
]

SpecOf = Callable[[int], TableSpec]


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
_PLAIN: dict[int, Callable[..., Record]] = {Kind.SHRINK: Shrink, Kind.TICK: Tick}


def name_of(kind: int) -> str:
    """What `psfleet log` calls a kind of records."""
    return _NAMES.get(kind, f"kind {kind}")


def encode(record: Record) -> tuple[int, list[Part]]:
    """The kind and the body of a record of a shard."""
    match record:
        case Create(spec, value, maker):
            return Kind.CREATE, [
                _bytes(
                    shard_pb2.CreateTableRequest(
                        spec=write_spec(spec),
                        value=value.tobytes(),
                        worker=maker or 0,
                        incarnation=int(maker is not None),
                    )
                )
            ]
        case Join():
            return Kind.JOIN, [
                _bytes(
                    shard_pb2.JoinRequest(
                        worker=record.worker,
                        incarnation=record.incarnation,
                        mode=write_mode(record.mode),
                        staleness=record.staleness,
                        switch=record.switch,
                        last=record.last,
                    )
                )
            ]
        case Leave(worker, incarnation, last, rest):
            return Kind.LEAVE, [
                _bytes(
                    shard_pb2.LeaveRequest(
                        worker=worker, incarnation=incarnation, last=last, rest=rest
                    )
                )
            ]
        case Push():
            header = Header(
                worker=record.worker,
                incarnation=record.incarnation,
                sequence=record.sequence,
                samples=record.samples,
                loss=record.loss,
                clock=record.clock,
                leases=record.position[0] if record.position else 0,
                lease_samples=record.position[1] if record.position else 0,
                progress=record.progress,
            )
            return Kind.PUSH, frame(header, map(segments.write_gradient, record.gradients))
        case Write(states, worker, incarnation, number):
            header = Header(worker=worker, incarnation=incarnation, sequence=number)
            return Kind.WRITE, frame(header, map(segments.write_state, states))
        case Fill(table, clock, columns):
            said = {"table": table, "clock": [clock.step, clock.shrinks, clock.ticks]}
            return Kind.FILL, pack_arrays(said, columns)
        case Shrink():
            return Kind.SHRINK, [pack_json(**dataclasses.asdict(record))]
        case Tick(seconds):
            return Kind.TICK, [pack_json(seconds=seconds)]
        case Evict(table, ids):
            return Kind.EVICT, [LENGTH.pack(table), ids]
        case Cut(number):
            return Kind.CUT, [pack_json(number=number)]
        case Install():
            return Kind.VIEW, [_bytes(write_install(record))]
        case Close(number, members, progress):
            said = {"progress": progress} if progress else {}
            return Kind.CLOSE, [pack_json(round=number, members=members, **said)]


def encode_change(decision: Decision) -> tuple[int, list[Part]]:
    """The kind and the body of a record of a coordinator."""
    return Kind.DECISION, [*encode_decision(decision)]


def decode(kind: int, body: memoryview, spec_of: SpecOf) -> Record:
    """A record of a shard again; its arrays lie in the body.

    Raises:
        LogError: There are no records of that kind.
        FrameError: It does not fit its table.
    """
    asked: Any
    if kind == Kind.CREATE:
        asked = shard_pb2.CreateTableRequest.FromString(bytes(body))
        return Create(
            read_spec(asked.spec),
            np.frombuffer(asked.value, "<f4"),
            asked.worker if asked.incarnation else None,
        )
    if kind == Kind.JOIN:
        asked = shard_pb2.JoinRequest.FromString(bytes(body))
        return Join(
            asked.worker,
            asked.incarnation,
            read_mode(asked.mode),
            asked.staleness,
            asked.switch,
            asked.last,
        )
    if kind == Kind.LEAVE:
        asked = shard_pb2.LeaveRequest.FromString(bytes(body))
        return Leave(asked.worker, asked.incarnation, asked.last, asked.rest)
    if kind == Kind.VIEW:
        return read_install(membership_pb2.InstallRequest.FromString(bytes(body)))
    if kind == Kind.CLOSE:
        said = json.loads(bytes(body))
        progress = {int(seat): text for seat, text in said.get("progress", {}).items()}
        return Close(said["round"], tuple(said["members"]), progress)
    if kind == Kind.CUT:
        return Cut(json.loads(bytes(body))["number"])
    if kind in _PLAIN:
        return _PLAIN[kind](**json.loads(bytes(body)))
    if kind == Kind.EVICT:
        (key,) = LENGTH.unpack_from(body)
        return Evict(key, np.frombuffer(body, "<i8", offset=LENGTH.size))
    if kind == Kind.FILL:
        return _decode_fill(body)
    if kind not in (Kind.PUSH, Kind.WRITE):
        raise LogError(f"its kind {kind} is unknown")
    head, payload = split(body)
    header = Header.FromString(head)
    if kind == Kind.WRITE:
        states = segments.read_states(header, payload, spec_of)
        return Write(tuple(states), header.worker, header.incarnation, header.sequence)
    return read_push(header, segments.read_gradients(header, payload, spec_of))


def read_push(
    header: Header, gradients: tuple[Gradient, ...], cut: tuple[int, int] | None = None
) -> Push:
    """The push that a header tells of, in a call or in a record. A record is of no cut."""
    return Push(
        header.worker,
        header.incarnation,
        header.sequence,
        gradients,
        header.samples,
        header.loss if header.HasField("loss") else None,
        header.clock,
        cut,
        read_position(header),
        _read_correction(header),
        header.progress,
    )


def _read_correction(header: Header) -> Correction | None:
    """How a call wants its push to be corrected. A record has been corrected.

    Raises:
        FrameError: By no number, or one below 0.
    """
    damping, compensation = header.staleness_damping, header.delay_compensation
    if not damping and not compensation:
        return None
    for name, value in ("staleness_damping", damping), ("delay_compensation", compensation):
        if not 0 <= value < math.inf:
            raise FrameError(f"the header says {name} = {value}; it must be a number from 0 on")
    return Correction(damping, compensation)


def _decode_fill(body: memoryview) -> Fill:
    said, columns = unpack_arrays(body)
    step, shrinks, ticks = said["clock"]
    clock = Clock(step, tuple(shrinks), tuple((t, s) for t, s in ticks))
    return Fill(said["table"], clock, columns)


def encode_core(core: Core) -> list[Part]:
    """The body of a record of what a server is beside its tables."""
    arrays = {str(i): array for i, array in enumerate(core.arrays)}
    return pack_arrays({"fields": core.fields}, arrays)


def decode_core(body: memoryview) -> Core:
    """What a server was beside its tables."""
    said, arrays = unpack_arrays(body)
    return Core(said["fields"], list(arrays.values()))


def _bytes(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded
