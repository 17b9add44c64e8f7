"""Between what a server keeps beside its tables and its bytes; protos/psfleet/v1/state.proto says them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import FrameError
from psfleet.core.engine.consistency import NO_MODE
from psfleet.core.engine.interface import Gradient
from psfleet.core.engine.shard.events import Push
from psfleet.core.engine.shard.rounds import Rounds
from psfleet.core.engine.shard.shard_state import ConsistencyState, PullGate, ShardState
from psfleet.core.engine.shard.workers import Workers
from psfleet.core.net import body
from psfleet.core.net.frame import Part
from psfleet.core.net.membership_messages import MODE, mode_fields, read_mode_fields
from psfleet.core.net.message_converter import Converter, check_shared
from psfleet.core.net.segments import VALUES, OutgoingSegment
from psfleet.core.net.v1 import state_pb2
from psfleet.core.net.v1.frame_pb2 import Header, Segment
from psfleet.core.net.worker_requests import read_push, write_push

VERSION = 1
"""Version of ServerState and of all messages in it."""

Arrays = Iterator[NDArray[Any]]


_WORKERS = Converter(
    Workers,
    state_pb2.ShardState,
    omitted=("server", "count", "promised", "frozen", "refused"),
    others=None,
)
_ROUNDS = Converter(Rounds, state_pb2.ShardState, omitted=("held", "reached"), others=None)
_BY_HAND = {*MODE.fields, "switches", "cut", "held", "clocks", "leading_steps", "makers"}


@dataclass(frozen=True)
class ServerState:
    """State of a server without the content of its tables.

    Attributes:
        shard: Its shard.
        coordinator: On server 0 what the coordinator has decided.
    """

    shard: ShardState
    coordinator: state_pb2.CoordinatorState | None = None


def write_state(state: ServerState) -> list[Part]:
    """Return the body that holds it."""
    shard, segments = _write_shard(state.shard)
    arrays = [array for segment in segments for array in segment.arrays]
    message = state_pb2.ServerState(
        version=VERSION,
        shard=shard,
        coordinator=state.coordinator,
        arrays=map(body.described, arrays),
    )
    return body.pack(message, ([array] for array in arrays))


def read_state(content: memoryview) -> ServerState:
    """Return the state in a body; held gradients are views into it.

    Raises:
        FrameError: It is of another version, has a field that this one does not know, or is damaged.
    """
    message, payload = body.unpack(state_pb2.ServerState, content)
    if message.version != VERSION:
        raise FrameError(
            f"it holds a server's state of version {message.version}; this psfleet reads "
            f"version {VERSION}"
        )
    arrays = iter(body.read_arrays(message.arrays, payload))
    coordinator = message.coordinator if message.HasField("coordinator") else None
    return ServerState(_read_shard(message.shard, arrays), coordinator)


check_shared(state_pb2.ShardState, (_WORKERS, _ROUNDS), _BY_HAND)


def _write_shard(state: ShardState) -> tuple[state_pb2.ShardState, list[OutgoingSegment]]:
    rounds, gate = state.consistency.rounds, state.consistency.gate
    pushes = [write_push(push) for push in rounds.held.values()]
    message = state_pb2.ShardState(
        **_WORKERS.stored(state.workers),
        **_ROUNDS.stored(rounds),
        **mode_fields(state.consistency.declared),
        switches=state.consistency.switches,
        cut=state.cut,
        held=[header for header, _ in pushes],
        clocks=gate.at,
        leading_steps=gate.leading_steps,
        makers=state.makers,
    )
    return message, [segment for _, segments in pushes for segment in segments]


def _read_shard(message: state_pb2.ShardState, arrays: Arrays) -> ShardState:
    pushes = {header.worker: _read_held(header, arrays) for header in message.held}
    clocks = dict(sorted(message.clocks.items()))
    consistency = ConsistencyState(
        server=0,
        rounds=_ROUNDS.read(message, held=pushes),
        declared=read_mode_fields(message) if message.mode else NO_MODE,
        switches=message.switches,
        gate=PullGate(at=clocks, leading_steps=message.leading_steps),
    )
    workers = _WORKERS.read(message, server=0, count=0)
    return ShardState(workers, consistency, message.cut, dict(sorted(message.makers.items())))


def _read_held(header: Header, arrays: Arrays) -> Push:
    try:
        return read_push(header, tuple(_read_gradient(each, arrays) for each in header.segments))
    except (StopIteration, RuntimeError):
        raise FrameError("a held push lacks its arrays") from None


def _read_gradient(segment: Segment, arrays: Arrays) -> Gradient:
    ids = None if segment.content == VALUES else next(arrays).astype(np.int64)
    return Gradient(segment.table, next(arrays), ids, segment.learning_rate)
