"""State of a server beside the content of its tables, as a snapshot, a log and a standby's copy hold it.

It is one body (see body.py): the tensor "server" in each file of a snapshot, and records 16 and 17 of a log.
The coordinator's part is known to the program of servers alone and is a body within that body.
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
"""Version of a server's state and of all that it contains."""
_PROTOBUF = b"\x08\x01"
"""Beginning of the message that held a state of version 1."""
_HEAD = 8  # bytes of a body before its message


@dataclass(frozen=True)
class ServerState:
    """State of a server without the content of its tables.

    Attributes:
        shard: State of its shard.
        coordinator: On server 0 the decisions of the coordinator, as a body.
    """

    shard: ShardState
    coordinator: bytes | None = None


class _Stored(Struct, frozen=True):
    """A ServerState without what starts anew with each process.

    Attributes:
        mode: Mode of the fleet: its number and the settings that servers know.
        clocks, leading_steps: State of the mode's gate.
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
    """Return whether a body holds a state as psfleet wrote it before version 2, of which nothing is read."""
    return content[_HEAD : _HEAD + len(_PROTOBUF)] == _PROTOBUF


def write_state(state: ServerState) -> list[Part]:
    """Return the body that holds a server's state."""
    shard, consistency = state.shard, state.shard.consistency
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
    """Return the state in a body; held gradients are views into it.

    Raises:
        FrameError: It is of another version, has a field that this one does not know, or is damaged.
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
