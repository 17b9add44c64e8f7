"""One call to one server: its tensors laid out where they will travel."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import FrameError
from psfleet.kernels.streaming import copy_over
from psfleet.runtime.interface import Format
from psfleet.schema.table import TableSpec
from psfleet.wire import frame, segments
from psfleet.wire.compression import CompressedValues, value_format
from psfleet.wire.v1.frame_pb2 import Content, Header, Segment
from psfleet_worker.connection.placed_segment import PlacedSegment
from psfleet_worker.connection.tensor_memory import LaneMemory, LentArray

__all__ = ["ServerRequest"]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
SpecOf = Callable[[int], TableSpec]
Values = Floats | CompressedValues

_EMPTY = np.empty(0, np.uint8)
_SMALL = 64 << 10
_TOLD = 64  # bytes of an answer that may hold no values: they are in shared memory
_BLOCK = 2 << 10  # bytes of shared memory for several small tensors of one call
_LINE = 64  # bytes of a cache line, on which each begins


class ServerRequest:
    """Gradients for a server and reads from it, in shared memory if there is room, else in arrays.

    Args:
        header: Says who speaks and in which order; the parcel adds the segments.
        held: The memory that is shared with the server, if any.
        wanted: The form in which values are asked for.

    Attributes:
        bytes: Of all tensors that go to the server.
        view: Of the members, at the server when it answered.
    """

    def __init__(self, header: Header, held: LaneMemory | None, wanted: Format = "float32") -> None:
        self._header = header
        self._layout: list[bytes] = []  # its segments, as fields
        self._held = held
        self._wanted = wanted
        self._arrays: list[tuple[NDArray[Any], ...]] = []  # the bytes of each segment
        self._places: list[int] = []
        self._block: tuple[NDArray[np.uint8], int] | None = (
            None  # for what is small: bytes and place
        )
        self._used = 0  # bytes of it
        self._last: PlacedSegment | None = None  # what was laid out last, if all lies in that block
        self._answers: list[Values] = []
        self._reads = 0
        self._answer_bytes = 0
        self._inline = held is None
        self._missed = 0  # bytes without a place in the memory
        self._borrowed: list[int] = []  # segments whose arrays are views of the caller's arrays
        self.bytes = 0
        self.view = 0

    @property
    def reads(self) -> int:
        """How many reads are in it."""
        return self._reads

    @property
    def is_empty(self) -> bool:
        """Whether it has neither gradients nor reads."""
        return not self._arrays

    @property
    def held(self) -> LaneMemory | None:
        """The memory that is shared with the server, if any."""
        return self._held

    @property
    def number(self) -> int:
        """Of the push."""
        return int(self._header.sequence)

    @property
    def packs(self) -> bool:
        """Whether values are asked for in fewer bytes."""
        return self._wanted != "float32"

    @property
    def is_inline(self) -> bool:
        """Whether the tensors travel in the message."""
        return self._inline

    @property
    def is_small(self) -> bool:
        """Whether request and answer fit into the buffers of a socket."""
        return not self._inline or self.bytes + self._answer_bytes <= _SMALL

    def say(self, **fields: int | str) -> None:
        """Set fields of the header."""
        for name, value in fields.items():
            setattr(self._header, name, value)

    def say_addressed(self, pushes: Sequence[int]) -> None:
        """Say which push was sent last to each server."""
        self._header.addressed.extend(pushes)

    def rows(self, spec: TableSpec, ids: Ids, learning_rate: float) -> Floats:
        """Add a sparse gradient; returns the array [n, push_width] that the caller fills with its rows."""
        placed = self._lay(segments.ID_ROWS, spec, len(ids), spec.push_width, learning_rate)
        placed.ids[:] = ids
        return placed.values

    def values(self, spec: TableSpec, values: Floats, learning_rate: float) -> None:
        """Add this server's part of a dense gradient; without shared memory as a view, see `own`."""
        if not self._inline:
            copy_over(
                self._lay(segments.VALUES, spec, len(values), 1, learning_rate).values, values
            )
            return
        self._borrowed.append(len(self._arrays))
        self._miss(values.nbytes)
        segment = segments.field_of(spec.key, segments.VALUES, len(values), learning_rate)
        self._add(segment, values)

    def packed(self, segment: Segment, *arrays: NDArray[Any]) -> None:
        """Add a segment whose bytes are these arrays, side by side."""
        mine = self.reserve(segment, sum(array.nbytes for array in arrays))
        at = 0
        for array in arrays:
            mine[at : at + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
            at += array.nbytes

    def reserve(self, segment: Segment, size: int) -> NDArray[np.uint8]:
        """Add a segment of so many bytes; returns the array that the caller fills with them."""
        mine, segment.offset = self._room(size)
        self._add(segments.written(segment), mine)
        return mine

    def read_rows(self, spec: TableSpec, ids: Ids) -> None:
        """Add a pull of rows."""
        self._lay(segments.IDS, spec, len(ids), 0, asked=(len(ids), spec.dim)).ids[:] = ids

    def read_values(
        self, spec: TableSpec, low: int, high: int, lent: LentArray | None = None
    ) -> None:
        """Add a pull of this server's values of a dense table.

        Args:
            low, high: Which of the whole table's they are.
            lent: The whole table's array, in the memory of this parcel; None: a place of its own.
        """
        if lent is None:
            self._lay(segments.WHOLE, spec, 0, 0, asked=(high - low,))
            return
        answer = lent.offset + 4 * low
        self._add(segments.field_of(spec.key, segments.WHOLE, 0, 0.0, 0, answer))
        self._answers.append(lent.array[low:high])
        self._reads += 1

    def request(self) -> bytes:
        """The message of the call. With shared memory it holds places only."""
        if self._inline or self._held is None:
            return self._message()
        lane = self._header.lane
        lane.generation, lane.turn = self._held.generation, self._held.next_turn()
        return frame.encode(self._header, (), b"".join(self._layout))

    def fallback(self) -> bytes:
        """The message with the tensors in it, for a call that has failed with shared memory."""
        self.lose()
        return self._message()

    def answer(self, message: bytes, spec_of: SpecOf) -> list[Values]:
        """What the server has read, in the order of the reads; valid until `close`."""
        if len(message) <= _TOLD:
            self.view, is_placed = _told(message)
            if is_placed:
                return self._answers
        header, payload = frame.decode(message)
        self.view = header.view
        found = segments.read_values(header, payload, spec_of)
        if len(found) != self._reads:
            raise FrameError(f"a server answers {len(found)} of {self._reads} reads")
        return found

    def own(self) -> None:
        """Copy what is still a view of the caller's arrays: the call is made later."""
        for i in self._borrowed:
            self._arrays[i] = tuple(array.copy() for array in self._arrays[i])
        self._borrowed.clear()

    def lose(self) -> None:
        """The call has failed: the server may still be using the places."""
        if self._held is not None:
            self._held.lost = True

    def close(self) -> None:
        """Answer and places are no longer used."""
        places, self._places, self._answers, self._arrays = self._places, [], [], []
        if self._held is not None:
            for place in places:
                self._held.give(place)
            missed, self._missed = self._missed, 0
            self._held.ended(self.bytes + self._answer_bytes, missed)

    def _message(self) -> bytes:
        self._header.ClearField("lane")
        return segments.joined(self._header, self._arrays, b"".join(self._layout))

    def _add(self, segment: bytes, *arrays: NDArray[Any]) -> None:
        """A segment, and the arrays that are its bytes."""
        self._layout.append(segment)
        self._arrays.append(arrays)
        self._last = None
        for array in arrays:
            self.bytes += array.nbytes

    def _lay(
        self,
        content: Content,
        spec: TableSpec,
        count: int,
        width: int,
        learning_rate: float = 0.0,
        asked: tuple[int, ...] | None = None,
    ) -> PlacedSegment:
        """Add a segment with a place for its bytes.

        Args:
            content: Of the segment; VALUES have no ids.
            spec: Of its table.
            count: Of its ids, or values.
            width: Values beside each.
            learning_rate: Of a gradient.
            asked: The shape of the values that are asked for; None: none are.
        """
        key = content, spec.key, count, width, learning_rate, asked, self._wanted
        held, before = self._held, self._last if self._arrays else self._begin()
        placed = None if before is None else before.next.get(key)
        if placed is not None:
            self._used = placed.end
        else:
            placed = self._laid(content, spec, count, width, learning_rate, asked)
            if before is not None and held is not None:
                if len(self._places) == 1 and not self._inline:
                    held.learn(before, key, placed)
                else:
                    before = None
        self._add(placed.segment, *placed.arrays)
        self._last = placed if before is not None else None
        if asked is not None:
            self._reads += 1
            self._answer_bytes += placed.answer_bytes
            if placed.answer is not None:
                self._answers.append(placed.answer)
        return placed

    def _begin(self) -> PlacedSegment | None:
        """Have the block for what is small; what earlier calls had in it. None: there is none."""
        held = self._held
        taken = None if held is None else held.take(_BLOCK)
        if held is None or taken is None:
            return None
        self._places.append(taken[1])
        self._block = taken
        return held.block(taken[1])

    def _laid(
        self,
        content: Content,
        spec: TableSpec,
        count: int,
        width: int,
        learning_rate: float,
        asked: tuple[int, ...] | None,
    ) -> PlacedSegment:
        """As `_lay`, of what was not there before."""
        start = 0 if content in (segments.VALUES, segments.WHOLE) else 8 * count
        arrays: tuple[NDArray[np.uint8], ...] = ()
        at = answer = size = 0
        mine, answers = _EMPTY, None
        if content != segments.WHOLE:
            mine, at = self._room(start + 4 * count * width)
            arrays = (mine,)
        form = value_format(spec, self._wanted)
        if asked is not None:
            size = CompressedValues.size_of(form, asked)
            if self._held is not None:
                out, answer = self._room(size)
                answers = (
                    out.view(np.float32).reshape(asked)
                    if form == "float32"
                    else CompressedValues.over(out, form, asked)
                )
        precision = segments.PRECISIONS["float32" if asked is None else form]
        segment = segments.field_of(spec.key, content, count, learning_rate, at, answer, precision)
        values = mine[start:].view(np.float32)
        if content == segments.ID_ROWS:
            values = values.reshape(count, width)
        return PlacedSegment(
            segment, mine[:start].view(np.int64), values, arrays, answers, size, self._used
        )

    def _miss(self, size: int) -> None:
        if self._held is not None:
            self._missed += size
            self._held.miss(size)

    def _room(self, size: int) -> tuple[NDArray[np.uint8], int]:
        """So many bytes to fill, and their place if they are in shared memory."""
        if self._held is not None:
            start = self._used
            end = start + (size + _LINE - 1 & -_LINE)
            if self._block is None or end > _BLOCK:
                taken = self._held.take(max(size, _BLOCK))
                if taken is None:
                    self._miss(max(size, _BLOCK))
                    self._inline = True  # what is in the memory already is sent from there
                    return np.empty(size, np.uint8), 0
                self._places.append(taken[1])
                if size >= _BLOCK:
                    return taken
                self._block, start, end = taken, 0, end - start
            self._used = end
            block, at = self._block
            return block[start : start + size], at + start
        return np.empty(size, np.uint8), 0


@lru_cache(16)
def _told(message: bytes) -> tuple[int, bool]:
    """The view that an answer tells of, and whether its values are in shared memory."""
    header, _ = frame.decode(message)
    return header.view, header.HasField("lane")
