"""Messages with large arrays are written past the caches; nobody can tell from their bytes."""

import numpy as np

from psfleet.kernels.initial_values import STREAM_FROM
from psfleet.wire import frame, segments
from psfleet.wire.segments import OutgoingSegment
from psfleet.wire.v1.frame_pb2 import Header, Segment


def test_large_arrays_give_the_same_message() -> None:
    """A large array among small, odd, empty and two-dimensional ones: the bytes that joining gives."""
    values = np.random.default_rng(0).standard_normal(STREAM_FROM // 4 + 1).astype(np.float32)
    ids, rows = np.arange(7), values[:10].reshape(5, 2)
    slices = [
        OutgoingSegment(Segment(table=1, count=3), (ids, values)),
        OutgoingSegment(Segment(table=2)),
        OutgoingSegment(Segment(table=3), (rows[:, :1],)),
        OutgoingSegment(Segment(table=4), (values[:0],)),
    ]
    header = Header(worker=1, segments=[part.segment for part in slices])
    parts = [ids.tobytes(), values.tobytes(), bytes(4), rows[:, :1].tobytes(), bytes(4)]
    assert segments.message(Header(worker=1), slices) == frame.encode(header, parts)
