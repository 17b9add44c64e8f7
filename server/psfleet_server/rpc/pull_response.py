"""Answers to pulls: laid out where they will travel, then filled by the tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import FrameError
from psfleet.runtime.interface import Read
from psfleet.wire import frame, segments
from psfleet.wire.shared_memory import SharedMemory
from psfleet.wire.v1.frame_pb2 import Header, Outcome, Segment
from psfleet.wire.wire_formats import CompressedValues

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_WORD = 4  # bytes: kernels of packed values want their arrays to begin on it


@dataclass(slots=True)
class PullResponse:
    """The answer to a pull.

    Attributes:
        message: Message to send, once all is in place; empty: the values are in shared memory.
        size: Bytes that travel, in the message or in shared memory.
        saved: By which they would be more in float32.
        values: An array for the values of each read, to be filled by the tables.
    """

    message: bytes = b""
    size: int = 0
    saved: int = 0
    values: list[Floats] = field(default_factory=list)
    _packed: list[tuple[Floats, CompressedValues]] = field(default_factory=list)

    def add(self, read: Read, shape: tuple[int, ...], room: Bytes) -> None:
        """The values of a read are to go to this room."""
        if read.format == "float32":
            values = room.view(np.float32)
            self.values.append(values if len(shape) == 1 else values.reshape(shape))
            return
        values = np.empty(shape, np.float32)
        self.saved += values.nbytes - room.nbytes
        self.values.append(values)
        self._packed.append((values, CompressedValues.over(room, read.format, shape)))

    def again(self) -> "PullResponse":
        """Another answer in the same places."""
        return PullResponse(self.message, self.size, self.saved, self.values, self._packed)

    def finish(self, outcome: Outcome, view: int) -> bytes:
        """The tables have filled `values`: put those that are packed in their rooms. What is sent."""
        for values, target in self._packed:
            target.pack(values)
        if self.message:
            return self.message
        message = _placed(outcome, view)
        self.size += len(message)
        return message


@lru_cache(64)
def push_response(outcome: Outcome) -> bytes:
    """The answer to a push."""
    return frame.encode(Header(outcome=outcome))


@lru_cache(64)
def _placed(outcome: Outcome, view: int) -> bytes:
    """The message which says that all values are in shared memory."""
    header = Header(outcome=outcome, view=view)
    header.lane.SetInParent()
    return frame.encode(header)


def lay_out_in(
    memory: SharedMemory,
    places: Sequence[int],
    reads: Sequence[Read],
    shape_of: Callable[[Read], tuple[int, ...]],
) -> PullResponse:
    """An answer whose values go to these places of the memory that a worker shares.

    Raises:
        FrameError: One lies outside of the memory, or across its words.
    """
    response = PullResponse()
    for place, read in zip(places, reads, strict=True):
        if place % _WORD:
            raise FrameError(f"a place at {place} is no multiple of {_WORD}")
        shape = shape_of(read)
        size = CompressedValues.size_of(read.format, shape)
        response.add(read, shape, memory.part(place, size))
        response.size += size
    return response


def lay_out(
    header: Header, reads: Sequence[Read], shape_of: Callable[[Read], tuple[int, ...]]
) -> PullResponse:
    """An answer with the values in its message. They must be there before it is sent.

    Args:
        header: Header of the response; the segments are added to it.
        reads: Reads to answer.
        shape_of: The shape of a read's values.

    Raises:
        FrameError: The message is too long.
    """
    shapes = [shape_of(read) for read in reads]
    sizes = [
        CompressedValues.size_of(read.format, s) for read, s in zip(reads, shapes, strict=True)
    ]
    header.segments.extend(map(_segment, reads, shapes))
    message, rooms = _rooms(header, sizes)
    response = PullResponse(message, len(message))
    for read, shape, room in zip(reads, shapes, rooms, strict=True):
        response.add(read, shape, room)
    return response


def _segment(read: Read, shape: tuple[int, ...]) -> Segment:
    content = segments.VALUES if read.ids is None else segments.ROWS
    precision = segments.PRECISIONS[read.format]
    return Segment(table=read.table, content=content, count=shape[0], precision=precision)


def _rooms(header: Header, sizes: Sequence[int]) -> tuple[bytes, list[Bytes]]:
    """The message, and the room for each segment in it."""
    ends = np.cumsum([size + -size % frame.ALIGNMENT for size in sizes], dtype=np.int64).tolist()
    message, payload = frame.reserve(header, ends[-1] if ends else 0)
    rooms, start = [], 0
    for size, end in zip(sizes, ends, strict=True):
        payload[start + size : end] = 0
        rooms.append(payload[start : start + size])
        start = end
    return message, rooms
