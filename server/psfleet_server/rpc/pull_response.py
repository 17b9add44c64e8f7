"""Answers to pulls: laid out where they will travel, then filled by the tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import FrameError
from psfleet.runtime.interface import Read
from psfleet.wire import frame, segments
from psfleet.wire.compression import CompressedValues, pack
from psfleet.wire.shared_memory import SharedMemory
from psfleet.wire.v1.frame_pb2 import Header, Segment

__all__ = ["PullResponse", "ResponsePlaces", "lay_out"]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_WORD = 4  # bytes: kernels of packed values want their arrays to begin on it


@dataclass(frozen=True, slots=True)
class ResponsePlaces:
    """Where the values of each read go in the memory that a worker shares."""

    memory: SharedMemory
    offsets: tuple[int, ...]

    def check(self, reads: Sequence[Read], shapes: Sequence[tuple[int, ...]]) -> None:
        """Refuse places that lie outside of the memory."""
        for offset, read, shape in zip(self.offsets, reads, shapes, strict=True):
            _check_word(offset)
            self.memory.check(offset, CompressedValues.size_of(read.format, shape))

    def rooms(self, sizes: Sequence[int]) -> list[Bytes]:
        """The places, of so many bytes each.

        Raises:
            FrameError: One lies outside of the memory, or across its words.
        """
        for offset in self.offsets:
            _check_word(offset)
        return [
            self.memory.array(offset, (size,), np.uint8)
            for offset, size in zip(self.offsets, sizes, strict=True)
        ]


def _check_word(offset: int) -> None:
    if offset % _WORD:
        raise FrameError(f"a place at {offset} is no multiple of {_WORD}")


@dataclass(slots=True)
class PullResponse:
    """The answer to a pull.

    Attributes:
        message: What is sent, once all is in place.
        values: An array for the values of each read, to be filled by the tables.
        bytes: That travel, in the message or in shared memory.
        saved: By which they would be more in float32.
    """

    message: bytes
    bytes: int
    saved: int = 0
    values: list[Floats] = field(default_factory=list)
    _packed: list[tuple[Floats, CompressedValues]] = field(default_factory=list)

    def add(self, read: Read, shape: tuple[int, ...], room: Bytes) -> None:
        """The values of a read are to go to this room."""
        if read.format == "float32":
            self.values.append(room.view(np.float32).reshape(shape))
            return
        values = np.empty(shape, np.float32)
        self.saved += values.nbytes - room.nbytes
        self.values.append(values)
        self._packed.append((values, CompressedValues.over(room, read.format, shape)))

    def finish(self) -> None:
        """The tables have filled `values`: put those that are packed in their rooms."""
        for values, packed in self._packed:
            pack(values, packed)


def lay_out(
    header: Header,
    reads: Sequence[Read],
    shape_of: Callable[[Read], tuple[int, ...]],
    places: ResponsePlaces | None,
) -> PullResponse:
    """The message that answers the reads, and an array for the values of each.

    Args:
        header: Of the answer; the segments are added to it.
        shape_of: The shape of a read's values.
        places: None: the values go into the message. They must be there before it is sent.

    Raises:
        FrameError: A place lies outside of the shared memory, or the message is too long.
    """
    shapes = [shape_of(read) for read in reads]
    sizes = [
        CompressedValues.size_of(read.format, s) for read, s in zip(reads, shapes, strict=True)
    ]
    if places is not None:
        header.lane.SetInParent()
        message, rooms = frame.encode(header), places.rooms(sizes)
        laid = PullResponse(message, len(message) + sum(sizes))
    else:
        for read, shape in zip(reads, shapes, strict=True):
            header.segments.append(_segment(read, shape))
        message, rooms = _rooms(header, sizes)
        laid = PullResponse(message, len(message))
    for read, shape, room in zip(reads, shapes, rooms, strict=True):
        laid.add(read, shape, room)
    return laid


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
