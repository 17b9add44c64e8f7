"""Answers to pulls: laid out where they will travel, then filled by the tables."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from psfleet.runtime import Read
from psfleet.wire import frame, segments
from psfleet.wire.shared import SharedMemory
from psfleet.wire.v1.frame_pb2 import Header, Segment

__all__ = ["Places", "lay_out"]

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the values of each read go in the memory that a worker shares."""

    memory: SharedMemory
    offsets: tuple[int, ...]

    def check(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Refuse places that lie outside of the memory."""
        for offset, shape in zip(self.offsets, shapes, strict=True):
            self.memory.array(offset, shape, np.float32)


def lay_out(
    header: Header,
    reads: Sequence[Read],
    shape_of: Callable[[Read], tuple[int, ...]],
    places: Places | None,
) -> tuple[bytes, list[Floats]]:
    """The message that answers the reads, and an array for the values of each.

    Args:
        header: Of the answer; the segments are added to it.
        shape_of: The shape of a read's values.
        places: None: the values go into the message. They must be there before it is sent.

    Raises:
        FrameError: A place lies outside of the shared memory, or the message is too long.
    """
    shapes = [shape_of(read) for read in reads]
    if places is not None:
        header.lane.SetInParent()
        out: list[Floats] = [
            places.memory.array(offset, shape, np.float32)
            for offset, shape in zip(places.offsets, shapes, strict=True)
        ]
        return frame.encode(header), out
    for read, shape in zip(reads, shapes, strict=True):
        content = segments.VALUES if read.ids is None else segments.ROWS
        header.segments.append(Segment(table=read.table, content=content, count=shape[0]))
    sizes = [math.prod(shape) for shape in shapes]
    even = [size + size % 2 for size in sizes]  # segments begin on multiples of 8 bytes
    message, payload = frame.reserve(header, 4 * sum(even))
    values = payload.view(np.float32)
    ends = np.cumsum(even, dtype=np.int64)
    for end, size, padded in zip(ends, sizes, even, strict=True):
        values[end - padded + size : end] = 0
    return message, [
        values[end - padded : end - padded + size].reshape(shape)
        for end, padded, size, shape in zip(ends, even, sizes, shapes, strict=True)
    ]
