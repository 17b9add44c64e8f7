"""A call to one server with tensors, which are written directly to the memory from which they are sent.

Gradients are written into shared memory if the server is on this host, otherwise into arrays that are joined
to one message when the call is sent. The layout depends only on tables and counts, and mostly repeats in the
next step, so both directions take shortcuts. For requests, encoded segments and their positions are cached
per block of shared memory (`PlacedSegment`). A reply of the same form as an earlier one is read without
decoding its header (`_PlainReply`).

Life of a request: it is filled (`rows`, `values`, `packed`, `read_rows`, `read_values`), its client calls
`encode` for each attempt, `values_of` reads the reply, and `close` frees its memory. Only one thread at a
time may use it.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import FrameError
from psfleet.core.base.settings.kinds import Format
from psfleet.core.engine.kernels.initial_values import address_of, copy_over
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.net import frame, segments
from psfleet.core.net.gradient_compressor import value_format
from psfleet.core.net.v1.frame_pb2 import Content, Header, Segment
from psfleet.core.net.value_formats import CompressedValues
from psfleet.core.net.worker_requests import write_withdrawal
from psfleet_worker.connection.call import Call
from psfleet_worker.connection.tensor_memory import BLOCK, LaneMemory, LentArray, PlacedSegment

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
SpecOf = Callable[[int], TableSpec]
Values = Floats | CompressedValues

_EMPTY = np.empty(0, np.uint8)
_SMALL = 64 << 10  # most bytes of tensors in a small call (`Call.is_small`)
_TOLD = 64  # longest reply in bytes that is looked up whole: its values are in shared memory
_MOST_REPLIES = 64  # forms of replies that are remembered
_FLOAT32 = np.dtype("<f4")
_LINE = 64  # bytes of a cache line, at the beginning of which each array lies


class ServerRequest(Call):
    """A call with gradients and reads, in shared memory if there is space, otherwise in the message.

    Args:
        header: Header with the worker and the sequence. The request adds the segments.
        memory: Memory that is shared with the server, or None.
        form: Format in which the server sends the values of reads.

    Attributes:
        bytes: Bytes of all tensors that are sent to the server.
        reads: Number of reads.
        held: Memory that is shared with the server, or None.
        trace: Trace of the push that the request carries, or None if it is not traced.
        view: Number of the fleet's membership at the server when it replied.
    """

    trace: Any = None

    def __init__(self, header: Header, memory: LaneMemory | None, form: Format = "float32") -> None:
        self._header = header
        self._layout: list[bytes] = []  # segments, as encoded fields of the header
        self.held = memory
        self._form = form
        self._arrays: list[tuple[NDArray[Any], ...]] = []  # the bytes of each segment
        self._places: list[int] = []  # offsets of all places that are to be freed
        self._block: tuple[NDArray[np.uint8], int] | None = None  # its bytes and offset
        self._used = 0  # bytes of that block
        # The last segment, as long as all segments of this request came from the cache of its first block.
        self._last: PlacedSegment | None = None
        self._replies: list[Values] = []  # arrays in shared memory for the values of each read
        self._shapes: list[tuple[int, ...]] = []  # key and shape of the values of each read
        self.reads = 0
        self._reply_bytes = 0
        self.is_inline = memory is None
        self._missed = 0  # bytes without a place in the memory
        self._borrowed: list[int] = []  # segments whose arrays are views of the caller's arrays
        self.bytes = 0
        self.view = 0

    @property
    def is_empty(self) -> bool:
        """True if the request has neither gradients nor reads."""
        return not self._arrays

    @property
    def number(self) -> int:
        """Sequence number of the push that the request carries."""
        return int(self._header.sequence)

    @property
    def packs(self) -> bool:
        """True if the request wants values in a shorter format than float32."""
        return self._form != "float32"

    def say(self, **fields: int | str) -> None:
        """Set fields of the header."""
        for name, value in fields.items():
            setattr(self._header, name, value)

    def say_addressed(self, pushes: Sequence[int]) -> None:
        """Put into the header the number of the last push that was sent to each server."""
        self._header.addressed.extend(pushes)

    def rows(self, spec: TableSpec, ids: Ids, learning_rate: float) -> Floats:
        """Add a sparse gradient. Returns the array [n, push_width], to be filled with the gradient's rows."""
        segment = self._lay(segments.ID_ROWS, spec, len(ids), spec.push_width, learning_rate)
        segment.ids[:] = ids
        return segment.values

    def values(self, spec: TableSpec, values: Floats, learning_rate: float) -> None:
        """Add this server's part of a dense gradient.

        The values are copied to shared memory. Without shared memory the request keeps a view of `values`.
        Then the caller must not change them before the call is sent, or must call `own`.
        """
        if not self.is_inline:
            copy_over(
                self._lay(segments.VALUES, spec, len(values), 1, learning_rate).values, values
            )
            return
        self._borrowed.append(len(self._arrays))
        self._miss(values.nbytes)
        segment = segments.field_of(spec.key, segments.VALUES, len(values), learning_rate)
        self._add(segment, values)

    def packed(self, segment: Segment, *arrays: NDArray[Any]) -> None:
        """Add a segment (one table's tensor) whose bytes are these arrays, one after the other."""
        target = self.reserve(segment, sum(array.nbytes for array in arrays))
        at = 0
        for array in arrays:
            target[at : at + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
            at += array.nbytes

    def reserve(self, segment: Segment, size: int) -> NDArray[np.uint8]:
        """Add a segment (one table's tensor) of `size` bytes. Returns the array for the caller to fill."""
        target, segment.offset = self._room(size)
        self._add(segments.written(segment), target)
        return target

    def read_rows(self, spec: TableSpec, ids: Ids) -> None:
        """Add a pull of rows."""
        self._lay(segments.IDS, spec, len(ids), 0, shape=(len(ids), spec.dim)).ids[:] = ids

    def read_values(
        self, spec: TableSpec, low: int, high: int, lent: LentArray | None = None
    ) -> None:
        """Add a pull of this server's values of a dense table.

        Args:
            spec: The table.
            low: First position of the values in the flattened table.
            high: Position after the last of the values.
            lent: Array of the whole table in the request's shared memory, into which the server writes its
                values. None gives the values separate memory.
        """
        if lent is None:
            self._lay(segments.WHOLE, spec, 0, 0, shape=(high - low,))
            return
        reply = lent.offset + 4 * low
        self._add(segments.field_of(spec.key, segments.WHOLE, 0, 0.0, 0, reply))
        self._replies.append(lent.array[low:high])
        self._shapes.append((spec.key, high - low))
        self.reads += 1

    @override
    def encode(self) -> bytes:
        """Return the message of the call. With shared memory the message contains offsets, but no tensors.

        Each attempt gets the next turn number in the memory, because a server refuses a turn that is not
        newer than the last one.
        """
        if self.trace is not None and self.span is None:
            self.span = self.trace.leave(self)
        layout, memory = b"".join(self._layout), self.held
        if self.is_inline or memory is None:
            self.is_small = self.bytes + self._reply_bytes <= _SMALL
            self._header.ClearField("lane")
            return segments.joined(self._header, self._arrays, layout)
        self.is_small = True
        lane = self._header.lane
        lane.generation, lane.turn = memory.generation, next(memory.turns)
        return frame.encode_header(self._header, layout)

    @override
    def fall_back(self) -> None:
        self.lose()
        self.is_inline = True

    def withdrawal(self) -> bytes:
        """Return the message that makes the server drop the push of this request."""
        return write_withdrawal(frame.encode(self._header))

    def values_of(self, message: bytes, spec_of: SpecOf) -> list[Values]:
        """Return the values of a reply, in the order of the reads, and set `view`.

        The values are valid until `close`.
        """
        # Shortcuts first: a reply without values mostly has the same bytes as the last one, and a reply with
        # its values in the message mostly has the same bytes up to the values.
        if len(message) <= _TOLD:
            self.view, is_placed = _told(message)
            if is_placed:
                return self._replies
        shapes = tuple(self._shapes)
        plain = _plain_replies.get(shapes)
        if plain is not None and len(message) == plain.size and message.startswith(plain.opening):
            self.view = plain.view
            return plain.values(message)
        header, payload = frame.decode(message)
        self.view = header.view
        values = segments.read_values(header, payload, spec_of)
        if len(values) != self.reads:
            raise FrameError(f"a server answers {len(values)} of {self.reads} reads")
        if values and len(message) <= _SMALL:
            _remember(shapes, message, header.view, values)
        return values

    def own(self) -> None:
        """Copy the arrays that are views of the caller's arrays, because the call will be sent later."""
        for i in self._borrowed:
            self._arrays[i] = tuple(array.copy() for array in self._arrays[i])
        self._borrowed.clear()

    @override
    def lose(self) -> None:
        if self.held is not None:
            self.held.lost = True

    def close(self) -> None:
        """Free the memory of the request and of its reply. The reply's values must not be used afterwards."""
        offsets, self._places, self._replies, self._arrays = self._places, [], [], []
        if self.held is not None:
            for offset in offsets:
                self.held.give(offset)
            if self._missed or self.bytes + self._reply_bytes > self.held.largest:
                self.held.ended(self.bytes + self._reply_bytes, self._missed)
                self._missed = 0

    def _add(self, segment: bytes, *arrays: NDArray[Any]) -> None:
        """Add a segment, and the arrays that are its bytes."""
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
        shape: tuple[int, ...] | None = None,
    ) -> PlacedSegment:
        """Add a segment, with memory for its bytes and for the values that it reads.

        Args:
            content: Content of the segment. VALUES and WHOLE have no ids.
            spec: The table.
            count: Number of ids, or of values if the content has no ids.
            width: Number of values for each id, or 1 for VALUES, or 0 for a read.
            learning_rate: Learning rate of this push for the table. Not used by a read.
            shape: Shape of the values that are read, or None for a gradient.
        """
        # The key has everything that the encoded segment depends on, besides the block and the segments
        # before it.
        key = content, spec.key, count, width, learning_rate, shape, self._form
        memory, before = self.held, self._last
        if memory is not None and not self._arrays and (block := memory.begin()) is not None:
            before, self._block = block, block.block
            self._places.append(block.block[1])
        segment = None if before is None else before.next.get(key)
        if segment is not None:
            self._used = segment.end
        else:
            segment = self._place_segment(content, spec, count, width, learning_rate, shape)
            if before is not None and memory is not None:
                # A segment outside the first block is not cached, and neither is any segment after it,
                # because its position differs from step to step.
                if len(self._places) == 1 and not self.is_inline:
                    memory.learn(before, key, segment)
                else:
                    before = None
        self._layout.append(segment.segment)
        self._arrays.append(segment.arrays)
        self._last = segment if before is not None else None
        self.bytes += segment.bytes
        if shape is not None:
            self.reads += 1
            self._shapes.append((spec.key, *shape))
            self._reply_bytes += segment.reply_bytes
            if segment.reply is not None:
                self._replies.append(segment.reply)
        return segment

    def _place_segment(
        self,
        content: Content,
        spec: TableSpec,
        count: int,
        width: int,
        learning_rate: float,
        shape: tuple[int, ...] | None,
    ) -> PlacedSegment:
        """Find memory for a segment and encode it. The memory holds the ids, and the values after them."""
        start = 0 if content in (segments.VALUES, segments.WHOLE) else 8 * count
        arrays: tuple[NDArray[np.uint8], ...] = ()
        at = reply = size = 0
        segment_bytes, replies = _EMPTY, None
        if content != segments.WHOLE:
            segment_bytes, at = self._room(start + 4 * count * width)
            arrays = (segment_bytes,)
        form = value_format(spec, self._form)
        if shape is not None:
            size = CompressedValues.size_of(form, shape)
            if self.held is not None:
                out, reply = self._room(size)
                replies = (
                    out.view(np.float32).reshape(shape)
                    if form == "float32"
                    else CompressedValues.over(out, form, shape)
                )
        precision = segments.PRECISIONS["float32" if shape is None else form]
        segment = segments.field_of(spec.key, content, count, learning_rate, at, reply, precision)
        values = segment_bytes[start:].view(np.float32)
        if content == segments.ID_ROWS:
            values = values.reshape(count, width)
        return PlacedSegment(
            segment, segment_bytes[:start].view(np.int64), values, arrays, replies, size, self._used
        )

    def _miss(self, size: int) -> None:
        if self.held is not None:
            self._missed += size
            self.held.miss(size)

    def _room(self, size: int) -> tuple[NDArray[np.uint8], int]:
        """Return `size` bytes to fill, and their offset in shared memory, or 0 outside shared memory.

        Small sizes share a block of memory. When a block is full, the next block is begun. A size of a block
        or more gets separate memory.
        """
        if self.held is not None:
            start = self._used
            end = start + (size + _LINE - 1 & -_LINE)
            if self._block is None or end > BLOCK:
                block_and_offset = self.held.take(max(size, BLOCK))
                if block_and_offset is None:
                    self._miss(max(size, BLOCK))
                    # All tensors are then sent in the message. Tensors that are already in the shared memory
                    # are copied from there.
                    self.is_inline = True
                    return np.empty(size, np.uint8), 0
                self._places.append(block_and_offset[1])
                if size >= BLOCK:
                    return block_and_offset
                self._block, start, end = block_and_offset, 0, end - start
            self._used = end
            block, at = self._block
            return block[start : start + size], at + start
        return np.empty(size, np.uint8), 0


@lru_cache(16)
def _told(message: bytes) -> tuple[int, bool]:
    """Return the view number in a reply, and whether the reply's values are in shared memory."""
    header, _ = frame.decode(message)
    return header.view, header.HasField("lane")


class _PlainReply(NamedTuple):
    """Form of a short reply with float32 values. The next reply to the same reads mostly has the same form.

    Attributes:
        opening: Bytes of the reply before the first value.
        size: Length of the whole reply in bytes.
        view: View number in the reply.
        places: For each read, a triple: offset of the first byte, number of values, shape of the values.
    """

    opening: bytes
    size: int
    view: int
    places: list[tuple[int, int, tuple[int, ...]]]

    def values(self, message: bytes) -> list[Values]:
        """Return the values of a message of this form, as views if they are aligned."""
        arrays: list[Values] = []
        for first, count, shape in self.places:
            array = np.frombuffer(message, _FLOAT32, count, first)
            arrays.append((array if array.flags.aligned else array.copy()).reshape(shape))
        return arrays


_plain_replies: dict[tuple[tuple[int, ...], ...], _PlainReply] = {}  # by tables and shapes


def _remember(
    reads: tuple[tuple[int, ...], ...], message: bytes, view: int, values: Sequence[Values]
) -> None:
    """Cache the form of a reply to reads of these tables and shapes."""
    # The values are views of the message, so their positions follow from their addresses.
    start = address_of(np.frombuffer(message, np.uint8))
    positions = []
    for array in values:
        if isinstance(array, CompressedValues):
            return
        positions.append((address_of(array) - start, array.size, array.shape))
    first, last = positions[0][0], positions[-1]
    if first <= 0 or last[0] + 4 * last[1] > len(message):  # the values are copies
        return
    if len(_plain_replies) >= _MOST_REPLIES:
        _plain_replies.clear()
    _plain_replies[reads] = _PlainReply(message[:first], len(message), view, positions)
