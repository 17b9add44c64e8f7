"""Converts the tensors of a call to segments of a frame and back: gradients, ids and values.

    Header    segment 0: table, content, count ... | segment 1 ...
    payload   ids of 0 | rows of 0 | zeros | ids of 1 | rows of 1 | zeros ...       padded to 8 bytes each

A segment is one table's tensor. A writer passes segments with their arrays and gets a frame. A reader passes
the definitions of tables and gets arrays that are views into the payload. Nothing from the network is
trusted: the length of a segment is computed from the table's definition and the segment's count, and is
checked against the bytes present before it is used.

If the call has a lane (Header.lane), worker and server share memory (see shared_memory.py). That memory then
replaces the payload, and each segment contains its offset there, so that nothing has to be copied.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import FrameError
from psfleet.core.base.settings.kinds import Format
from psfleet.core.engine.kernels.initial_values import STREAM_FROM, address_of, copy_over
from psfleet.core.engine.runtime_interface import Gradient, Precision, Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.events import PartState
from psfleet.core.net import frame
from psfleet.core.net.protobuf_fields import ALIGNMENT
from psfleet.core.net.protobuf_fields import field as field_bytes
from psfleet.core.net.v1 import frame_pb2
from psfleet.core.net.v1.frame_pb2 import Content, Header, Segment
from psfleet.core.net.value_formats import FORMATS, NUMBERED, CompressedValues

__all__ = [
    "PRECISIONS",
    "Bytes",
    "OutgoingSegment",
    "PartState",
    "TensorRequest",
    "field_of",
    "joined",
    "message",
    "read_request",
    "read_states",
    "read_values",
    "write_state",
    "written",
]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
SpecOf = Callable[[int], TableSpec]
Bytes = memoryview | NDArray[np.uint8]

IDS = frame_pb2.CONTENT_IDS
ID_ROWS = frame_pb2.CONTENT_ID_ROWS
ROWS = frame_pb2.CONTENT_ROWS
WHOLE = frame_pb2.CONTENT_WHOLE
VALUES = frame_pb2.CONTENT_VALUES
STATE = frame_pb2.CONTENT_STATE
ELEMENTS = frame_pb2.CONTENT_ELEMENTS
_GRADIENTS = (ID_ROWS, VALUES, ELEMENTS)
_READS = (IDS, WHOLE)
_INT64, _UINT32 = np.dtype("<i8"), np.dtype("<u4")
_FLOAT32, _BYTE = np.dtype("<f4"), np.dtype("u1")
PRECISIONS = {name: form.number for name, form in FORMATS.items()}


@dataclass(frozen=True, slots=True)
class OutgoingSegment:
    """Segment to send, and the arrays that hold its content."""

    segment: Segment
    arrays: tuple[NDArray[Any], ...] = ()


# A step encodes the same few segments as the step before, unless its number of ids changes. The limit only
# keeps such steps from filling the memory.
@lru_cache(1024)
def field_of(
    table: int,
    content: Content,
    count: int,
    learning_rate: float = 0.0,
    offset: int = 0,
    reply: int = 0,
    precision: frame_pb2.Precision = frame_pb2.PRECISION_FLOAT32,
) -> bytes:
    """Return an encoded segment with these values, to be appended to an encoded Header.

    Results are cached, because the segments of consecutive steps are usually equal.
    """
    return written(
        Segment(
            table=table,
            content=content,
            count=count,
            learning_rate=learning_rate,
            offset=offset,
            reply=reply,
            precision=precision,
        )
    )


def written(segment: Segment) -> bytes:
    """Return an encoded segment, to be appended to an encoded Header."""
    return field_bytes(Header.SEGMENTS_FIELD_NUMBER, segment.SerializeToString())


def message(header: Header, segments: Iterable[OutgoingSegment]) -> bytes:
    """Return the frame with these segments. Adds the segments to `header`."""
    segments = list(segments)
    header.segments.extend(segment.segment for segment in segments)
    return joined(header, [segment.arrays for segment in segments])


def joined(
    header: Header, contents: Iterable[Sequence[NDArray[Any]]], layout: bytes = b""
) -> bytes:
    """Return the frame with this header and payload.

    Args:
        contents: Arrays of each segment, in the order of the segments.
        layout: Encoded segments, if `header` does not contain the segments.
    """
    parts: list[Any] = []
    is_large = False
    for arrays in contents:
        size = 0
        for array in arrays:
            parts.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
            size += array.nbytes
            # Each array by itself, because `copy_over` streams only arrays of that size.
            is_large = is_large or array.nbytes >= STREAM_FROM
        if odd := size % ALIGNMENT:
            parts.append(bytes(ALIGNMENT - odd))
    if is_large:
        return _streamed(header, parts, layout)
    return frame.encode(header, parts, layout)


def _streamed(header: Header, parts: Sequence[NDArray[Any] | bytes], layout: bytes) -> bytes:
    """Do the same as frame.encode, but write large arrays past the CPU's caches.

    The frame is copied again when it is sent, so keeping it in the caches would only displace other data.
    """
    views = [
        part.reshape(-1).view(np.uint8)
        if isinstance(part, np.ndarray)
        else np.frombuffer(part, np.uint8)
        for part in parts
    ]
    message, payload = frame.reserve(header, sum(len(view) for view in views), layout)
    start = 0
    for view in views:
        copy_over(payload[start : start + len(view)], view)
        start += len(view)
    return message


def write_state(state: PartState) -> OutgoingSegment:
    """Return the segment with a part of a table and its optimizer state, for snapshots and moves of rows.

    A dense table has one array, float32 [1 + slots, n]. A sparse table has these, in this order: the ids,
    optionally the step of each row's last push, the rows [n, dim * (1 + slots)], and optionally the scores of
    the rows. The arrays of int64 come first, so that all are aligned without padding between them.
    """
    if state.ids is None:
        count = state.values.shape[1]
        arrays: tuple[NDArray[Any], ...] = (state.values,)
    else:
        count = len(state.ids)
        arrays = (state.ids, state.values)
        # Both or none, because one flag of the segment (`touched`) stands for both.
        if state.touched is not None and state.scores is not None:
            arrays = (state.ids, state.touched, state.values, state.scores)
    segment = Segment(
        table=state.table,
        content=STATE,
        count=count,
        step=state.step,
        touched=len(arrays) > 2,
        start=state.start,
    )
    return OutgoingSegment(segment, arrays)


@dataclass(slots=True)
class TensorRequest:
    """Push and pull that one call requests. The arrays are views into the call's payload.

    Attributes:
        gradient_bytes: Bytes of the payload that the gradients occupy.
        places: For each read, the offset in shared memory at which its values are to be written. Used only
            if the call has a lane (memory that worker and server share).
    """

    gradients: list[Gradient] = field(default_factory=list)
    gradient_bytes: int = 0
    reads: list[Read] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


def read_request(header: Header, payload: Bytes, spec_of: SpecOf) -> TensorRequest:
    """Parse a call's request: a push, a pull, or both.

    Raises:
        FrameError: The segments do not fit the tables or the payload.
    """
    request = TensorRequest()
    for segment, spec, cursor in _segments(header, payload, spec_of):
        if segment.content in _READS:
            request.reads.append(_read(segment, spec, cursor))
            request.places.append(segment.reply)
        elif request.reads:
            # `gradient_bytes` below and `_MessageLayout` (server/rpc/call_layout.py) rely on this order.
            raise FrameError("the frame has a gradient after a read; gradients come first")
        else:
            request.gradients.append(_gradient(segment, spec, cursor))
            # At this point the cursor has read only gradients, because gradients come first.
            request.gradient_bytes = cursor.taken
    return request


def read_values(header: Header, payload: Bytes, spec_of: SpecOf) -> list[Floats | CompressedValues]:
    """Return the values in the reply to a pull, as views into the payload.

    Returns:
        For each segment (one table's part of the reply), rows [n, dim] of a sparse table, or the server's
        slice [n] of a dense table.
    """
    values: list[Floats | CompressedValues] = []
    for segment, spec, cursor in _segments(header, payload, spec_of):
        _expect(segment, spec, VALUES if spec.kind == "dense" else ROWS)
        shape = (segment.count,) if spec.kind == "dense" else (segment.count, spec.dim)
        form = _format(segment, spec)
        values.append(cursor.floats(*shape) if form == "float32" else cursor.packed(form, shape))
    return values


def read_states(header: Header, payload: memoryview, spec_of: SpecOf) -> list[PartState]:
    """Return the parts of tables that `write_state` has written: weights and optimizer state.

    Arrays are views into the payload.
    """
    states = []
    for segment, spec, cursor in _segments(header, payload, spec_of):
        _expect(segment, spec, STATE)
        planes = 1 + len(spec.rule.slots)
        if spec.kind == "dense":
            ids = touched = scores = None
            values = cursor.floats(planes, segment.count)
        else:
            ids = cursor.take(segment.count, _INT64)
            touched = cursor.take(segment.count, _INT64) if segment.touched else None
            values = cursor.floats(segment.count, spec.dim * planes)
            scores = cursor.floats(segment.count, spec.scores) if segment.touched else None
        states.append(
            PartState(segment.table, segment.step, values, ids, touched, scores, segment.start)
        )
    return states


def _read(segment: Segment, spec: TableSpec, cursor: "_Cursor") -> Read:
    ids = None
    if spec.kind == "dense":
        _expect(segment, spec, WHOLE)
    else:
        _expect(segment, spec, IDS)
        ids = cursor.take(segment.count, _INT64)
    return Read(spec.key, ids, _format(segment, spec))


def _format(segment: Segment, spec: TableSpec) -> Format:
    """Return the format in which a worker requests values of a table, from the segment's precision."""
    form = NUMBERED.get(segment.precision)
    if form is None or not form.is_for_pulls:
        choices = [
            f"{choice.name} ({choice.number})" for choice in FORMATS.values() if choice.is_for_pulls
        ]
        raise FrameError(
            f"table {spec.name!r}: values cannot travel in precision {segment.precision}; "
            f"choose one of {', '.join(choices)}"
        )
    return cast(Format, form.name)


def _gradient(segment: Segment, spec: TableSpec, cursor: "_Cursor") -> Gradient:
    count, ids = segment.count, None
    shape: tuple[int, ...] = (count,)
    if spec.kind == "sparse":
        _expect(segment, spec, ID_ROWS)
        ids, shape = cursor.take(count, _INT64), (count, spec.push_width)
    elif segment.content == ELEMENTS:
        ids = cursor.positions(count)
    else:
        _expect(segment, spec, VALUES)
    if segment.precision == frame_pb2.PRECISION_FLOAT32:
        values = cursor.floats(*shape)
    else:
        values = _short_values(segment, spec, cursor, shape)
    return Gradient(spec.key, values, ids, segment.learning_rate)


def _short_values(
    segment: Segment, spec: TableSpec, cursor: "_Cursor", shape: tuple[int, ...]
) -> Floats:
    form = NUMBERED.get(segment.precision)
    if form is None or (segment.content == ELEMENTS and not form.has_elements):
        raise FrameError(f"table {spec.name!r}: precision {segment.precision} is unknown")
    compressed = cursor.packed(form.name, shape)
    # A segment without a scale has 0, as protobuf does not send absent fields. It means no scaling.
    return form.decode_gradient(compressed, segment.scale or 1.0, spec.name)


class _Cursor:
    """Reader of the arrays in a payload, one after the other.

    Attributes:
        at: Offset of the next array.
        taken: Total bytes of the arrays read so far.
    """

    def __init__(self, payload: Bytes) -> None:
        self._payload = payload
        self._size = len(payload)
        self.at = 0
        self.taken = 0

    def positions(self, count: int) -> Ids:
        """Return the next `count` indices of elements of a dense gradient.

        In the payload they are uint32, which halves their bytes. Code that uses them expects int64, as for
        ids.
        """
        return self.take(count, _UINT32).astype(np.int64)

    def floats(self, *shape: int) -> Floats:
        """Return the next float32 array of this shape."""
        values = self.take(math.prod(shape), _FLOAT32)
        return values if len(shape) == 1 else values.reshape(shape)

    def packed(self, form: Precision | Format, shape: Sequence[int]) -> CompressedValues:
        """Return the next values of this shape and format, without decompressing them."""
        buffer = self.take(CompressedValues.size_of(form, shape), _BYTE)
        # NumPy takes bytes as aligned anywhere, but int8 begins with float32 scales.
        if address_of(buffer) % np.dtype(np.float32).alignment:  # from a client that does not pad
            buffer = buffer.copy()
        return CompressedValues.over(buffer, form, shape)

    def take(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the next `count` elements: a view of the payload, or a copy if they are misaligned.

        Raises:
            FrameError: The payload is too short.
        """
        size = count * dtype.itemsize
        remaining = self._size - self.at
        if size > remaining:
            raise FrameError(
                f"a segment announces {size} bytes, but the payload has {remaining} left"
            )
        array = np.frombuffer(self._payload, dtype, count, self.at)
        self.at += size
        self.taken += size
        return array if array.flags.aligned else array.copy()

    def finish(self) -> None:
        """Check that no bytes of the payload are left."""
        # The payload may be shorter than this: the last segment needs no padding.
        self.at += -self.at % ALIGNMENT
        if self.at < self._size:
            raise FrameError(f"the segments take {self.at} bytes of a payload of {self._size}")


def _segments(
    header: Header, payload: Bytes, spec_of: SpecOf
) -> Iterator[tuple[Segment, TableSpec, _Cursor]]:
    cursor, has_lane = _Cursor(payload), header.HasField("lane")
    tables: set[int] = set()
    for segment in header.segments:
        table = segment.table

        # `update` (shard/updates.py) relies on a push having one gradient per table. Reads may repeat one.
        if table in tables and segment.content in _GRADIENTS:
            raise FrameError(f"the frame names table {table:#x} twice")
        tables.add(table)
        # With a lane, segments may lie anywhere in the shared memory, which has one worker's tensors only.
        # `take` checks the bounds. Without a lane they follow each other.
        cursor.at = segment.offset if has_lane else cursor.at + -cursor.at % ALIGNMENT
        yield segment, spec_of(table), cursor
    if not has_lane:  # else the memory also holds tensors of other calls, and space for the reply
        cursor.finish()


def _expect(segment: Segment, spec: TableSpec, content: Content) -> None:
    if segment.content != content:
        raise FrameError(
            f"table {spec.name!r} is {spec.kind}; its segment has content "
            f"{segment.content}, expected {Content.Name(content)}"
        )
