"""Between what a server keeps beside its tables and its bytes; protos/psfleet/v1/state.proto says them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.consistency import NO_MODE
from psfleet.errors import FrameError
from psfleet.runtime.interface import Gradient
from psfleet.shard.events import Push
from psfleet.shard.membership_view import Position
from psfleet.shard.mode_state import ConsistencyState
from psfleet.shard.pull_gate import PullGate
from psfleet.shard.rounds import Rounds
from psfleet.shard.shard_state import ShardState
from psfleet.shard.workers import Workers
from psfleet.wire import body
from psfleet.wire.frame import Part
from psfleet.wire.mode_messages import mode_fields, read_mode_fields
from psfleet.wire.segments import VALUES, OutgoingSegment
from psfleet.wire.v1 import state_pb2
from psfleet.wire.v1.frame_pb2 import Header, Segment
from psfleet.wire.worker_requests import read_push, write_push

__all__ = [
    "VERSION",
    "ServerState",
    "read_positions",
    "read_state",
    "write_positions",
    "write_state",
]

VERSION = 1
"""Of ServerState and of all messages in it."""

Arrays = Iterator[NDArray[Any]]
Key = Any  # int or str


@dataclass(frozen=True)
class ServerState:
    """What a server keeps beside the content of its tables.

    Attributes:
        shard: Its shard.
        coordinator: On server 0 what the coordinator has decided.
    """

    shard: ShardState
    coordinator: state_pb2.CoordinatorState | None = None


def write_state(state: ServerState) -> list[Part]:
    """The body that holds it."""
    shard, pieces = _write_shard(state.shard)
    arrays = [array for piece in pieces for array in piece.arrays]
    message = state_pb2.ServerState(
        version=VERSION,
        shard=shard,
        coordinator=state.coordinator,
        arrays=map(body.described, arrays),
    )
    return body.pack(message, ([array] for array in arrays))


def read_state(stored: memoryview) -> ServerState:
    """The state in a body; held gradients are views into it.

    Raises:
        FrameError: It is of another version, has a field that this one does not know, or is damaged.
    """
    message, payload = body.unpack(state_pb2.ServerState, stored)
    if message.version != VERSION:
        raise FrameError(
            f"it holds a server's state of version {message.version}; this psfleet reads "
            f"version {VERSION}"
        )
    arrays = iter(body.read_arrays(message.arrays, payload))
    coordinator = message.coordinator if message.HasField("coordinator") else None
    return ServerState(_read_shard(message.shard, arrays), coordinator)


def _write_shard(state: ShardState) -> tuple[state_pb2.ShardState, list[OutgoingSegment]]:
    workers = state.workers
    rounds, gate = state.consistency.rounds, state.consistency.gate
    held = [write_push(push) for push in rounds.held.values()]
    message = state_pb2.ShardState(
        **mode_fields(state.consistency.declared),
        switches=state.consistency.switches,
        cut=state.cut,
        view=workers.view,
        lives=workers.lives,
        newest=workers.newest,
        sequences=workers.sequences,
        writes=workers.writes,
        positions=write_positions(workers.positions),
        progress=workers.progress,
        addressed={
            worker: state_pb2.Addressed(pushes=sent) for worker, sent in workers.addressed.items()
        },
        base=workers.base,
        seats=sorted(rounds.seats),
        closed=rounds.closed,
        first=rounds.first,
        committed=rounds.committed,
        counted=rounds.counted,
        rests=rounds.rests,
        resting=sorted(rounds.resting),
        left=sorted(rounds.left),
        held=[header for header, _ in held],
        clocks=gate.at,
        lead=gate.lead,
        makers=state.makers,
    )
    return message, [piece for _, pieces in held for piece in pieces]


def _read_shard(message: state_pb2.ShardState, arrays: Arrays) -> ShardState:
    workers = Workers(
        server=0,
        count=0,
        lives=_sorted(message.lives),
        sequences=_sorted(message.sequences),
        writes=_sorted(message.writes),
        positions=read_positions(message.positions),
        progress=_sorted(message.progress),
        addressed={
            worker: tuple(sent.pushes) for worker, sent in sorted(message.addressed.items())
        },
        newest=_sorted(message.newest),
        base=message.base,
        view=message.view,
    )
    rounds = Rounds(
        seats=set(message.seats),
        closed=message.closed,
        first=_sorted(message.first),
        held={header.worker: _read_held(header, arrays) for header in message.held},
        committed=_sorted(message.committed),
        counted=_sorted(message.counted),
        resting=set(message.resting),
        rests=_sorted(message.rests),
        left=set(message.left),
    )
    consistency = ConsistencyState(
        server=0,
        rounds=rounds,
        declared=read_mode_fields(message) if message.mode else NO_MODE,
        switches=message.switches,
        gate=PullGate(at=_sorted(message.clocks), lead=message.lead),
    )
    return ShardState(workers, consistency, message.cut, _sorted(message.makers))


def _read_held(header: Header, arrays: Arrays) -> Push:
    try:
        return read_push(header, tuple(_read_gradient(each, arrays) for each in header.segments))
    except (StopIteration, RuntimeError):
        raise FrameError("a held push lacks its arrays") from None


def _read_gradient(segment: Segment, arrays: Arrays) -> Gradient:
    ids = None if segment.content == VALUES else next(arrays).astype(np.int64)
    return Gradient(segment.table, next(arrays), ids, segment.learning_rate)


def write_positions(positions: Mapping[int, Position]) -> dict[int, state_pb2.Position]:
    """How far lives are with their data, by seat."""
    return {
        seat: state_pb2.Position(leases=leases, samples=samples)
        for seat, (leases, samples) in positions.items()
    }


def read_positions(messages: Mapping[int, state_pb2.Position]) -> dict[int, Position]:
    """What `write_positions` was given, in order of seat."""
    return {seat: (at.leases, at.samples) for seat, at in sorted(messages.items())}


def _sorted(message: Mapping[Key, Any]) -> dict[Key, Any]:
    """A map of a message in order of its keys, which protobuf does not keep."""
    return dict(sorted(message.items()))
