"""Layout of a call: its segments, the room for its response, and the plan of one without arrays.

The segments of a small step mostly have the same bytes as those of the step before: the same tables, counts
and places in shared memory. Then the arrays are the same views of that memory, and are made once. Only what
follows from the segments alone is kept; the values that lie there now are looked at in each call.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import FrameError, PsfleetError
from psfleet.core.base.memory import content_address
from psfleet.core.base.settings.kinds import Format
from psfleet.core.engine.interface import Gradient, Read
from psfleet.core.engine.kernels.initial_values import address_of, floats_at
from psfleet.core.engine.shard.shard_tables import ShardTables, Table
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.row_update import PlacedRows
from psfleet.core.net import frame, segments
from psfleet.core.net.frame import ALIGNMENT, read_header
from psfleet.core.net.segments import ELEMENTS, TensorRequest
from psfleet.core.net.shared_memory import SharedMemory
from psfleet.core.net.v1.frame_pb2 import PRECISION_FLOAT32, Header, Outcome
from psfleet.core.net.value_formats import CompressedValues

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_WORD = 4  # bytes: kernels of packed values want their arrays to begin on it


_MOST_IDS = 512  # of a table: others wait for Python's lock meanwhile
_LONGEST = 256 << 10  # bytes of values in a message, whose beginning is copied with room for them
_MOST_OPENINGS = 8
_Opening = tuple[bytes | bytearray, list[int], int]
"""What is sent, where the values of each read go, and how many bytes both are."""
_MOST_LAYOUTS = 64
_LONGEST_PARSED = (
    64 << 10
)  # bytes of a payload; beyond, to parse the segments takes next to nothing
_Place = tuple[np.dtype[Any], int, int]
"""Type of an array's elements, their number, and the place of the first one in the payload."""


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


@dataclass(slots=True)
class _TablePart:
    """One table's part of a call.

    Attributes:
        rows: Rows of a sparse table; None: it is dense.
        ids, count: Place and number of its ids.
        values, rate: Place of the values of a gradient, and its learning rate.
    """

    table: Table
    rows: PlacedRows | None = None
    ids: int = 0
    count: int = 0
    values: int = 0
    rate: float = 0.0


class CallPlan:
    """A call of a known layout. Places count from its payload; in shared memory they are addresses.

    Attributes:
        size: Bytes of its payload; 0: its tensors are in shared memory.
        gradient_bytes: Bytes of its gradients.
        pushes, pulls: True if it has gradients, and reads.
        version: Version of the tables for which it holds.
    """

    def __init__(
        self,
        tables: ShardTables,
        request: TensorRequest,
        room: PullResponse | None,
        payload: memoryview,
    ) -> None:
        """Plan calls like one whose tensors lie in this payload, or in shared memory that has this room.

        Raises:
            PsfleetError: The call is not in order.
            ValueError: Calls like it have no plan.
        """
        shapes = map(tables.shape_of, request.reads)
        if room is None and 4 * sum(map(math.prod, shapes)) > _LONGEST:
            raise ValueError("its response is long")
        self.size = len(payload) if room is None else 0
        self.gradient_bytes = request.gradient_bytes
        self.pushes, self.pulls = bool(request.gradients), bool(request.reads)
        self.version = tables.version
        self._tables, self._asked = tables, request.reads
        self._first = address_of(np.frombuffer(payload, np.uint8)) if room is None else 0
        self._updates = [self._update(one) for one in request.gradients]
        self._reads = [self._part(one.table, one.ids) for one in request.reads]
        self._outs = [] if room is None else [address_of(values) for values in room.values]
        # A worker's memory goes with the last array in it, and a worker may die during a call.
        self._lent = () if room is None else (*request.gradients, *room.values)
        self._bytes = 0 if room is None else room.size
        self._openings: dict[tuple[Outcome, int], _Opening] = {}

    def _place(self, array: NDArray[Any]) -> int:
        place = address_of(array) - self._first
        if self.size and not 0 <= place <= self.size - array.nbytes:
            raise ValueError("it is a copy")  # as of arrays that are not aligned
        return place

    def _part(self, key: int, ids: NDArray[np.int64] | None) -> _TablePart:
        table = self._tables[key]
        if isinstance(table, DenseTable):
            if ids is not None:
                raise ValueError("it has positions")
            return _TablePart(table)
        rows = None if ids is None or len(ids) > _MOST_IDS else table.placed()
        if ids is None or rows is None:
            raise ValueError("its table needs arrays")
        return _TablePart(table, rows, self._place(ids), len(ids))

    def _update(self, gradient: Gradient) -> _TablePart:
        self._tables.check_gradient(gradient)
        part = self._part(gradient.table, gradient.ids)
        part.values, part.rate = self._place(gradient.values), gradient.learning_rate
        return part

    def fit(self, base: int) -> bool:
        for part in self._updates:
            if part.rows is not None and not part.rows.fits(base + part.ids, part.count):
                return False
        return True

    def apply(self, base: int) -> None:
        for part in self._updates:
            values = base + part.values
            if part.rows is not None:
                part.rows.push(base + part.ids, part.count, values, part.rate)
            else:
                table = cast("DenseTable", part.table)
                table.push(floats_at(values, table.count), part.rate)

    def respond(self, base: int, outcome: Outcome, view: int) -> tuple[bytes, int]:
        """Read its tables; return the response, and how many bytes of values and message that is."""
        opening, outs, size = self._openings.get((outcome, view)) or self._open(outcome, view)
        message = bytes(opening)  # of a bytearray a new one
        place = content_address(message) if self.size else 0
        for part, out in zip(self._reads, outs, strict=True):
            if part.rows is not None:
                part.rows.pull(base + part.ids, part.count, place + out)
            else:
                table = cast("DenseTable", part.table)
                table.pull_into(floats_at(place + out, table.count))
        return message, size

    def _open(self, outcome: Outcome, view: int) -> _Opening:
        """Lay out a response."""
        if self.size:
            header = Header(outcome=outcome, view=view)
            response = lay_out(header, self._asked, self._tables.shape_of)
            first = content_address(response.message)
            outs = [address_of(values) - first for values in response.values]
            opening: _Opening = bytearray(response.message), outs, response.size
        else:
            message = placed(outcome, view)
            opening = message, self._outs, self._bytes + len(message)
        if len(self._openings) >= _MOST_OPENINGS:
            self._openings.clear()
        self._openings[outcome, view] = opening
        return opening


def plan_of(
    tables: ShardTables, request: TensorRequest, room: PullResponse | None, payload: memoryview
) -> CallPlan | None:
    """Return the plan of calls like this one; None: they have none."""
    try:
        return CallPlan(tables, request, room, payload)
    except (PsfleetError, ValueError):
        return None


@dataclass(slots=True)
class CallLayout:
    """A call's segments.

    Attributes:
        tensors: Gradients and reads of the call; shared between calls, so read-only.
        room: Room for the response, in the memory that the worker shares; None: its values go into the
            message.
        plan: For calls like it; None: they have none.
    """

    tensors: TensorRequest
    room: PullResponse | None = None
    plan: CallPlan | None = None


class MessageLayouts:
    """Layouts of calls with their tensors in the message, by the bytes of their segments.

    Each message is other memory, so each call gets arrays of its own, at the places of those before. Any
    thread may call.
    """

    def __init__(self) -> None:
        self._layouts: dict[bytes, _MessageLayout] = {}

    def known(self, header: Header, layout: bytes, payload: memoryview) -> CallLayout | None:
        """Return the layout of a call, made as for an earlier one with these bytes; None: there was none."""
        known = self._layouts.get(layout)
        if known is None or known.size != len(payload) or header.HasField("lane"):
            return None
        return CallLayout(known.over(payload))

    def plan(self, layout: bytes, size: int) -> CallPlan | None:
        """Return the plan of calls with these bytes and a payload of this size, if there is one."""
        known = self._layouts.get(layout)
        return None if known is None or known.size != size else known.plan

    def keep(
        self,
        layout: bytes,
        payload: memoryview,
        tensors: TensorRequest,
        plan: CallPlan | None = None,
    ) -> None:
        """Calls may come with the same bytes as this one again."""
        if 0 < len(payload) <= _LONGEST_PARSED:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[layout] = _MessageLayout(payload, tensors, plan)

    def forget(self) -> None:
        """Tables are others: calls with the same bytes are laid out anew."""
        self._layouts.clear()


class _MessageLayout:
    """Places of the arrays of a call in its payload, and what its segments say of them.

    Attributes:
        size: Bytes of the payload.
        plan: For calls of this layout; None: there is none.
    """

    def __init__(self, payload: memoryview, tensors: TensorRequest, plan: CallPlan | None) -> None:
        self.size = len(payload)
        self.plan = plan
        at = 0

        def next_place(array: NDArray[Any]) -> _Place:
            nonlocal at
            place = array.dtype, array.size, at
            at += array.nbytes
            return place

        self._gradients = []
        for one in tensors.gradients:
            at += -at % ALIGNMENT
            ids = None if one.ids is None else next_place(one.ids)
            values = next_place(one.values)
            self._gradients.append((one.table, ids, values, one.values.shape, one.learning_rate))
        self._reads = []
        for read in tensors.reads:
            at += -at % ALIGNMENT
            self._reads.append((read.table, None if read.ids is None else next_place(read.ids)))

    def over(self, payload: memoryview) -> TensorRequest:
        """Return the request of a call whose arrays lie in this payload."""
        request = TensorRequest()
        for table, ids, values, shape, rate in self._gradients:
            rows = None if ids is None else _array(payload, *ids)
            gradient = _array(payload, *values).reshape(shape)
            request.gradients.append(Gradient(table, gradient, rows, rate))
        for table, ids in self._reads:
            request.reads.append(Read(table, None if ids is None else _array(payload, *ids)))
        return request


def _array(payload: memoryview, dtype: np.dtype[Any], count: int, at: int) -> NDArray[Any]:
    array = np.frombuffer(payload, dtype, count, at)
    return array if array.flags.aligned else array.copy()


def lay_out_call(
    tensors: TensorRequest, memory: SharedMemory | None, shape_of: Callable[[Read], tuple[int, ...]]
) -> CallLayout:
    """The layout of a call whose segments are these, in this memory or in its message."""
    if memory is None:
        return CallLayout(tensors)
    return CallLayout(tensors, lay_out_in(memory, tensors.places, tensors.reads, shape_of))


def is_lasting(layout: bytes, header: Header) -> bool:
    """Return whether all arrays of a call are as they travel, and follow from this layout alone.

    Args:
        layout: The first part of its header.
        header: All of it.
    """
    part = read_header(layout)
    if len(part.ListFields()) != 1 or len(part.segments) != len(header.segments):
        return False
    return all(
        segment.precision == PRECISION_FLOAT32
        and segment.content != ELEMENTS
        and segment.offset % ALIGNMENT == 0
        for segment in part.segments
    )
