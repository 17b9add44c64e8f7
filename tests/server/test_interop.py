"""Any gRPC client can work with a server: generated stubs and stock protobuf all the way."""

import struct
from typing import Any

import numpy as np
import pytest

from psfleet.core.net.v1 import coordinator_pb2, shard_pb2
from psfleet.core.net.v1.frame_pb2 import (
    CONTENT_ID_ROWS,
    CONTENT_IDS,
    CONTENT_ROWS,
    CONTENT_VALUES,
    CONTENT_WHOLE,
    OUTCOME_APPLIED,
    OUTCOME_HELD,
    Frame,
    Header,
    Segment,
)


def push(incarnation: int, sequence: int, *segments: Segment, payload: bytes) -> Frame:
    """A push of worker 0."""
    said: dict[str, Any] = {
        "incarnation": incarnation,
        "sequence": sequence,
        "samples": 4,
        "loss": 0.5,
    }
    return Frame(payload=payload, header=Header(segments=segments, **said))


def padded(*arrays: "np.ndarray[Any, Any]") -> bytes:
    """The bytes of one segment."""
    joined = b"".join(array.tobytes() for array in arrays)
    return joined + bytes(-len(joined) % 8)


def test_a_stock_client_trains(peer: Any) -> None:
    """Register, join, create, pull, push, pull, status, leave with protobuf alone."""
    incarnation = peer.join(0)
    rows = peer.create("rows", "sparse", (3,))
    whole = peer.create("whole", "dense", (5,), struct.pack("<5f", *range(5)))
    ids = np.array([9, -1, 2**62], "<i8")
    pushed = push(
        incarnation,
        1,
        Segment(table=whole, content=CONTENT_VALUES, count=5, learning_rate=1),
        Segment(table=rows, content=CONTENT_ID_ROWS, count=3, learning_rate=0.5),
        payload=padded(np.ones(5, "<f4")) + padded(ids, np.ones((3, 3), "<f4")),
    )
    for _ in range(2):  # a repeat gets the same answer and no effect
        assert peer.shard.Push(pushed).header.outcome == OUTCOME_APPLIED
    reads = [
        Segment(table=rows, content=CONTENT_IDS, count=3),
        Segment(table=whole, content=CONTENT_WHOLE),
    ]
    header = Header(incarnation=incarnation, segments=reads)
    reply = peer.shard.Pull(Frame(payload=ids.tobytes(), header=header))
    assert [(s.table, s.content, s.count) for s in reply.header.segments] == [
        (rows, CONTENT_ROWS, 3),
        (whole, CONTENT_VALUES, 5),
    ]
    values = np.frombuffer(reply.payload, "<f4")
    np.testing.assert_array_equal(values[:9], np.full(9, -0.5))
    np.testing.assert_array_equal(values[10:15], np.arange(5) - 1)  # after 4 bytes that fill up
    status = peer.shard.Status(shard_pb2.StatusRequest())
    assert (status.pushes, status.repeats, dict(status.samples)) == (1, 1, {0: 4})
    assert status.resident_bytes > 1 << 20
    assert status.bytes_in > 0
    leave = shard_pb2.LeaveRequest(incarnation=incarnation, last=1)
    assert peer.shard.Leave(leave).remaining == 0


def test_a_stock_client_in_a_sync_round(peer: Any) -> None:
    """A sync push is held; the pull that commits it waits and sees the closed round."""
    incarnation = peer.join(0, shard_pb2.MODE_SYNC)
    whole = peer.create("whole", "dense", (2,), struct.pack("<2f", 0, 0))
    segment = Segment(table=whole, content=CONTENT_VALUES, count=2, learning_rate=1)
    pushed = push(incarnation, 1, segment, payload=struct.pack("<2f", 1, 2))
    assert peer.shard.Push(pushed).header.outcome == OUTCOME_HELD
    pull = Header(incarnation=incarnation, segments=[Segment(table=whole, content=CONTENT_WHOLE)])
    assert struct.unpack("<2f", peer.shard.Pull(Frame(header=pull)).payload) == (0, 0)
    pull.commit = 1
    assert struct.unpack("<2f", peer.shard.Pull(Frame(header=pull)).payload) == (-1, -2)


@pytest.mark.parametrize("name", ["float32", "float64", "int32", "int64"])
def test_a_stock_client_meets(peer: Any, name: str) -> None:
    """Barrier and reduction with generated messages."""
    incarnation = peer.join(0)
    peer.coordinator.Barrier(coordinator_pb2.BarrierRequest(incarnation=incarnation, number=1))
    value = np.arange(4, dtype=name).tobytes()
    reply = peer.coordinator.AllReduce(
        coordinator_pb2.AllReduceRequest(
            incarnation=incarnation, number=2, mode="max", dtype=name, shape=[2, 2], value=value
        )
    )
    assert reply.value == value
