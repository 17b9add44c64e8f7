"""State of a server apart from the rows of its tables, as stored in snapshots, logs and on standbys.

The state is stored as one body (see body.py): as the tensor "server" in each file of a snapshot, and in
records 16 and 17 of a log. The coordinator's part is opaque here: a body within the body, which only
psfleet_server can read. If you add a field to ShardState, add it here too and raise VERSION.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import Struct

from psfleet.core.base.errors import FrameError
from psfleet.core.engine.shard.rounds import Rounds
from psfleet.core.engine.shard.shard_state import ConsistencyState, PullGate, ShardState
from psfleet.core.engine.shard.workers import Workers
from psfleet.core.net.body import pack, unpack
from psfleet.core.net.frame import Part
from psfleet.core.net.membership_messages import agreed_numbers, read_agreed_numbers

VERSION = 2
"""Version of the stored form of a server's state."""
_PROTOBUF = b"\x08\x01"
"""First bytes of the protobuf message in which version 1 stored a state."""
_HEAD = 8  # bytes of a body before its MessagePack head


@dataclass(frozen=True)
class ServerState:
    """State of a server without the content of its tables.

    Attributes:
        coordinator: Decisions of the coordinator, encoded as a body. None on all servers but server 0.
    """

    shard: ShardState
    coordinator: bytes | None = None


class _Stored(Struct, frozen=True):
    """Fields of a ServerState that are written to logs and snapshots.

    All other fields start again with each process.

    Attributes:
        mode: Whole numbers: the number of the fleet's consistency mode, then the values of its settings that
            servers know, as [3, 4] for ssp with staleness 4.
        clocks: For each worker, the number of its pushes since the last collective (PullGate.at).
        leading_steps: Largest number of pushes that a worker was ahead of the slowest worker at a pull.
    """

    version: int
    workers: Workers
    rounds: Rounds
    mode: Sequence[int]
    switches: int
    clocks: dict[int, int]
    leading_steps: int
    cut: int
    makers: dict[int, int]
    coordinator: bytes | None


def is_of_version_1(content: memoryview) -> bool:
    """Return whether a body holds a state of version 1, which this psfleet cannot read."""
    return content[_HEAD : _HEAD + len(_PROTOBUF)] == _PROTOBUF


def write_state(state: ServerState) -> list[Part]:
    """Return the body that holds a server's state."""
    shard, consistency = state.shard, state.shard.consistency
    # These fields start over with each process, so they are stored with their initial values.
    workers = replace(shard.workers, server=0, count=0, promised=0, frozen=False, refused=set())
    stored = _Stored(
        VERSION,
        workers,
        replace(consistency.rounds, reached=0),
        agreed_numbers(consistency.declared),
        consistency.switches,
        consistency.gate.at,
        consistency.gate.leading_steps,
        shard.cut,
        shard.makers,
        state.coordinator,
    )
    return pack(stored)


def read_state(content: memoryview) -> ServerState:
    """Decode the state of a server. Gradients that wait for the end of a round are views into the body.

    Raises:
        FrameError: The body is of another version, has an unknown field, or is damaged.
    """
    is_old = is_of_version_1(content)
    stored: _Stored | None = None if is_old else unpack(_Stored, content, "server's state")
    if stored is None or stored.version != VERSION:
        raise FrameError(
            f"it holds a server's state of version {stored.version if stored else 1}; this psfleet reads "
            f"version {VERSION}"
        )
    consistency = ConsistencyState(
        server=0,
        rounds=stored.rounds,
        declared=read_agreed_numbers(stored.mode),
        switches=stored.switches,
        gate=PullGate(at=stored.clocks, leading_steps=stored.leading_steps),
    )
    shard = ShardState(stored.workers, consistency, stored.cut, stored.makers)
    return ServerState(shard, stored.coordinator)
