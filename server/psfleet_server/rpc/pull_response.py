"""Answers to pulls: laid out where they will travel, then filled by the tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import FrameError
from psfleet.runtime.interface import Read
from psfleet.settings.choices import Format
from psfleet.wire import frame, segments
from psfleet.wire.shared_memory import SharedMemory
from psfleet.wire.v1.frame_pb2 import Header, Outcome
from psfleet.wire.value_formats import CompressedValues

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
        message = placed(outcome, view)
        self.size += len(message)
        return message


@lru_cache(64)
def push_response(outcome: Outcome) -> bytes:
    """The answer to a push."""
    return frame.encode(Header(outcome=outcome))


@lru_cache(64)
def placed(outcome: Outcome, view: int) -> bytes:
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
        header: Header of the response, without its segments.
        reads: Reads to answer.
        shape_of: The shape of a read's values.

    Raises:
        FrameError: The message is too long.
    """
    parts = tuple([(read.table, read.format, shape_of(read)) for read in reads])
    opening, rooms, size = _opening(header.SerializeToString(), parts)
    message, payload = frame.reserve_behind(opening, size)
    response = PullResponse(message, len(message))
    for read, (_, _, shape), (start, end, filled) in zip(reads, parts, rooms, strict=True):
        payload[end:filled] = 0
        response.add(read, shape, payload[start:end])
    return response


@lru_cache(256)
def _opening(
    fields: bytes, parts: tuple[tuple[int, Format, tuple[int, ...]], ...]
) -> tuple[bytes, list[tuple[int, int, int]], int]:
    """Lay out a response, which mostly looks like the one before.

    Args:
        fields: Its header without the segments.
        parts: Table, format and shape of each read.

    Returns:
        The bytes before the payload; in that of each read the first byte of the values, their end, and the
        end of what fills them up; and the size of the payload.
    """
    header, rooms, end = Header.FromString(fields), [], 0
    for table, form, shape in parts:
        content = segments.VALUES if len(shape) == 1 else segments.ROWS
        precision = segments.PRECISIONS[form]
        header.segments.add(table=table, content=content, count=shape[0], precision=precision)
        start, end = end, end + CompressedValues.size_of(form, shape)
        rooms.append((start, end, end := end + -end % frame.ALIGNMENT))
    return frame.opening(header, end), rooms, end
