"""Decisions of the coordinator as records of a log: JSON, then the bytes of the arrays in it."""

import json
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.data import assignment
from psfleet.shard import membership_view
from psfleet.shard.plain_state import from_plain, to_plain
from psfleet.shard.shard_state import dataclasses_of
from psfleet_server.coordinator import barriers, coordinator, data_dispatch, membership
from psfleet_server.coordinator.coordinator import Decision

__all__ = ["CLASSES", "decode_decision", "encode_decision"]

_LENGTH = struct.Struct("<Q")
CLASSES: list[type] = [
    cls
    for module in (coordinator, barriers, membership, data_dispatch, assignment, membership_view)
    for cls in dataclasses_of(module)
]


def encode_decision(decision: Decision) -> list[bytes]:
    """The body of the record."""
    arrays: list[NDArray[Any]] = []
    plain = to_plain(decision, arrays)
    shapes = [(array.dtype.str, array.shape) for array in arrays]
    head = json.dumps({"decision": plain, "arrays": shapes}).encode()
    return [_LENGTH.pack(len(head)), head, *(array.tobytes() for array in arrays)]


def decode_decision(body: memoryview) -> Decision:
    """The decision again.

    Raises:
        CheckpointError: The record is not what `encode_decision` makes.
        ValueError: It is too short.
    """
    (length,) = _LENGTH.unpack_from(body)
    at = _LENGTH.size + length
    said = json.loads(bytes(body[_LENGTH.size : at]))
    arrays = []
    for dtype, shape in said["arrays"]:
        array = np.frombuffer(body[at:], dtype, int(np.prod(shape))).reshape(shape).copy()
        arrays.append(array)
        at += array.nbytes
    decision: Decision = from_plain(said["decision"], arrays, CLASSES)
    return decision
