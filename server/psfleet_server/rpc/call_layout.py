"""Caches the layout of pushes and pulls: the positions of a request's tensors and of the reply's values.

A training step mostly sends the same segments as the step before: same tables, same numbers of ids, same
offsets. So a server caches the parsed request, with the bytes of the segments as the key. For the next call
with the same bytes it reuses one of three levels:

1. no entry: parse the segments and make NumPy arrays over the tensors (`segments.read_request`);
2. `CallLayout`: the arrays are known. For tensors in shared memory the same views are used again; for tensors
  in the message, `_MessageLayout` makes new views at the known offsets;
3. `CallPlan`: no arrays at all, kernels get addresses. Only `PlainCalls` uses it. A small call then takes 32
  instead of 99 us of the server's CPU (docs/decisions/0033-plain-calls.md).

An entry may contain only information that follows from the segments. Everything that depends on values
(repeated ids, space for new rows, the push's sequence) is checked in every call. Layouts in shared memory are
kept in `AttachedMemory`, separately for each worker, so that no worker can name another one's memory.
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
from psfleet.core.engine.kernels.initial_values import address_of, floats_at
from psfleet.core.engine.runtime_interface import Gradient, Read
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

# Alignment in bytes that the kernels of compressed values need.
_WORD = 4

# Maximum number of ids of one table in a planned call. Its kernels keep the GIL, so all other threads wait
# for them: at 35 to 60 ns an id (decision 15), 20 to 30 us, about as long as the rest of the call takes.
_MOST_IDS = 512
# Maximum number of bytes of values in the reply of a planned call. The whole reply, values included, is
# copied from the prepared one, and only then filled.
_LONGEST = 256 << 10
# A plan prepares one reply for each pair of outcome and view number. A new view makes the earlier replies
# useless.
_MOST_OPENINGS = 8
_Opening = tuple[bytes | bytearray, list[int], int]
"""A prepared reply: the message to send, the offset or address of each read's values, and the total bytes."""
# Layouts of all workers together. A training step needs a few, which its workers share.
_MOST_LAYOUTS = 64
# Longest payload in bytes whose layout is kept. For a longer payload, the time to parse segments is
# negligible.
_LONGEST_PARSED = 64 << 10
_Place = tuple[np.dtype[Any], int, int]
"""Position of an array in a payload: dtype, number of elements, and byte offset of the first element."""


@dataclass(slots=True)
class PullResponse:
    """Reply to a pull, laid out before the tables fill it in.

    Values are thereby written only once, into the memory that is sent. First lay out the reply (`lay_out` or
    `lay_out_in`), then let the tables fill `values`, then send the message that `finish` returns.

    Attributes:
        message: Message to send once it is filled, or empty if the values go to shared memory.
        size: Number of bytes sent, in the message or in shared memory.
        saved: Bytes saved compared with sending all values as float32.
        values: One float32 array for each read, which the tables fill: [n] for a dense table, [ids, dim] for
            a sparse table.
    """

    message: bytes = b""
    size: int = 0
    saved: int = 0
    values: list[Floats] = field(default_factory=list)
    _packed: list[tuple[Floats, CompressedValues]] = field(default_factory=list)

    def add(self, read: Read, shape: tuple[int, ...], room: Bytes) -> None:
        """Add a read (of one table). `room` is the memory from which the read's values will be sent."""
        if read.format == "float32":
            values = room.view(np.float32)
            self.values.append(values if len(shape) == 1 else values.reshape(shape))
            return
        # Tables only write float32: `finish` compresses this temporary array into `room`.
        values = np.empty(shape, np.float32)
        self.saved += values.nbytes - room.nbytes
        self.values.append(values)
        self._packed.append((values, CompressedValues.over(room, read.format, shape)))

    def again(self) -> "PullResponse":
        """Return a response for another call of the same layout, which fills the same arrays.

        The response is a copy, because `finish` adds to `size`.
        """
        return PullResponse(self.message, self.size, self.saved, self.values, self._packed)

    def finish(self, outcome: Outcome, view: int) -> bytes:
        """Compress the values that are sent compressed, and return the message to send.

        Call it once, after the tables have filled `values`.
        """
        for values, target in self._packed:
            target.pack(values)
        if self.message:
            return self.message
        message = placed(outcome, view)
        self.size += len(message)
        return message


@lru_cache(64)
def push_response(outcome: Outcome) -> bytes:
    """Encode the reply to a push. Cached, because there are only a few different replies."""
    return frame.encode(Header(outcome=outcome))


@lru_cache(64)
def placed(outcome: Outcome, view: int) -> bytes:
    """Encode the reply to a pull whose values are in shared memory, which an empty lane field indicates."""
    header = Header(outcome=outcome, view=view)
    header.lane.SetInParent()
    return frame.encode(header)


def lay_out_in(
    memory: SharedMemory,
    places: Sequence[int],
    reads: Sequence[Read],
    shape_of: Callable[[Read], tuple[int, ...]],
) -> PullResponse:
    """Lay out a reply in the memory that a worker shares.

    Args:
        memory: The shared memory.
        places: Byte offset of the values of each read, chosen by the worker.
        reads: The reads of the pull.
        shape_of: Returns the shape of a read's values.

    Raises:
        FrameError: An offset is not a multiple of 4, or values would end outside the memory.
    """
    response = PullResponse()
    for offset, read in zip(places, reads, strict=True):
        if offset % _WORD:
            raise FrameError(f"a place at {offset} is no multiple of {_WORD}")
        shape = shape_of(read)
        size = CompressedValues.size_of(read.format, shape)
        response.add(read, shape, memory.part(offset, size))
        response.size += size
    return response


def lay_out(
    header: Header, reads: Sequence[Read], shape_of: Callable[[Read], tuple[int, ...]]
) -> PullResponse:
    """Lay out a reply that carries the values in its message.

    The message is a `bytes` object whose payload is still unwritten memory. Fill `values` before you send it.

    Args:
        header: Header of the response, without its segments.
        reads: The reads of the pull.
        shape_of: Returns the shape of a read's values.

    Raises:
        FrameError: The message is too long.
    """
    parts = tuple([(read.table, read.format, shape_of(read)) for read in reads])
    opening, rooms, size = _opening(header.SerializeToString(), parts)
    message, payload = frame.reserve_behind(opening, size)
    response = PullResponse(message, len(message))
    for read, (_, _, shape), (start, end, filled) in zip(reads, parts, rooms, strict=True):
        payload[end:filled] = 0  # else the padding would send what this memory held before
        response.add(read, shape, payload[start:end])
    return response


@lru_cache(256)
def _opening(
    fields: bytes, parts: tuple[tuple[int, Format, tuple[int, ...]], ...]
) -> tuple[bytes, list[tuple[int, int, int]], int]:
    """Encode the part of a response before its payload. Cached, because most responses repeat the one before.

    Args:
        fields: Encoded header, to which this function adds the segments (tables in the payload). It is in
            bytes because a cache key must be hashable.
        parts: Table, format and shape of each read.

    Returns:
        A triple:

        - the bytes before the payload;
        - for each read three offsets in the payload: the begin of its values, their end, and the end of the
          padding after them;
        - the size of the payload in bytes.
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
    """Gradient or read of a planned call.

    Offsets are relative to the payload; in shared memory they are addresses.

    Attributes:
        table: The table that is pushed or pulled.
        rows: Access to a sparse table's rows by address, or None for a dense table.
        ids: Offset of the ids.
        count: Number of ids.
        values: Offset of a gradient's values; unused for a read.
        rate: Learning rate of a gradient; unused for a read.
    """

    table: Table
    rows: PlacedRows | None = None
    ids: int = 0
    count: int = 0
    values: int = 0
    rate: float = 0.0


class CallPlan:
    """Carries out any call of one known layout by addresses, without making an array.

    A plan stores offsets within the payload. Each call adds its base, the address of its own payload:

        base                                  payload of this call, in its message
        |----------|--------------------|
        | ids      | gradient values    |
        0          part.values            offsets, the same in every call of the layout

    For tensors in shared memory the base is 0 and the offsets are addresses, because that memory does not
    move.

    A plan relies on its caller: the shard's lock is held from `fit` to the end of `apply`, `fit` has returned
    True, and `version` equals the version of the tables.

    Attributes:
        size: Bytes of the payload, or 0 if the tensors are in shared memory.
        gradient_bytes: Bytes of the gradients.
        pushes: True if the call has gradients.
        pulls: True if the call has reads.
        version: Version of the tables that the plan was made for. Tables of another version may have moved in
            memory, so the plan must not be used with them.
    """

    def __init__(
        self,
        tables: ShardTables,
        request: TensorRequest,
        room: PullResponse | None,
        payload: memoryview,
    ) -> None:
        """Make a plan from the first call of a layout.

        Args:
            tables: The shard's tables.
            request: Gradients and reads of that call.
            room: Response of that call in shared memory, or None if its tensors are in the message.
            payload: Payload of its message.

        Raises:
            PsfleetError: The call is invalid, for example a gradient has the wrong shape.
            ValueError: The call is valid, but calls of this layout cannot be planned.
        """
        shapes = map(tables.shape_of, request.reads)
        # 4 bytes a value, because only float32 has lasting layouts (`is_lasting`).
        if room is None and 4 * sum(map(math.prod, shapes)) > _LONGEST:
            raise ValueError("its response is long")
        self.size = len(payload) if room is None else 0
        self.gradient_bytes = request.gradient_bytes
        self.pushes, self.pulls = bool(request.gradients), bool(request.reads)
        self.version = tables.version
        self._tables, self._asked = tables, request.reads
        self._first = address_of(np.frombuffer(payload, np.uint8)) if room is None else 0
        self._updates = [self._update(gradient) for gradient in request.gradients]
        self._reads = [self._part(read.table, read.ids) for read in request.reads]
        self._outs = [] if room is None else [address_of(values) for values in room.values]
        # Shared memory is unmapped when its last array is collected. `AttachedMemory` drops its arrays as
        # soon as the worker dies, which may be during a call: without these references the kernels would
        # write to unmapped addresses. `_asked` keeps the ids of the reads.
        self._lent = () if room is None else (*request.gradients, *room.values)
        self._bytes = 0 if room is None else room.size
        self._openings: dict[tuple[Outcome, int], _Opening] = {}

    def _place(self, array: NDArray[Any]) -> int:
        offset = address_of(array) - self._first
        if self.size and not 0 <= offset <= self.size - array.nbytes:
            # The array is not in the payload, so it is a copy, for example of an unaligned array. Later calls
            # would need new copies.
            raise ValueError("it is a copy")
        return offset

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
        # Once for all calls: it checks shapes and the learning rate, which are part of the layout.
        self._tables.check_gradient(gradient)
        part = self._part(gradient.table, gradient.ids)
        part.values, part.rate = self._place(gradient.values), gradient.learning_rate
        return part

    def fit(self, base: int) -> bool:
        # Checks all gradients before `apply` changes the first table: a push must take effect whole or not at
        # all.
        for part in self._updates:
            if part.rows is not None and not part.rows.can_push(base + part.ids, part.count):
                return False
        budget = self._tables.budget
        if budget.limit is None or len(self._updates) < 2:
            return True
        # Each table alone has the memory to grow. If all together may not have it, `Shard.handle` decides.
        growth = sum(part.rows.growth_bound(part.count) for part in self._updates if part.rows)
        # A push that adds no row fits even if the tables exceed their budget.
        return growth <= max(budget.available_for(), 0)

    def apply(self, base: int) -> None:
        for part in self._updates:
            values = base + part.values
            if part.rows is not None:
                part.rows.push(base + part.ids, part.count, values, part.rate)
            else:
                table = cast("DenseTable", part.table)
                table.push(floats_at(values, table.count), part.rate)

    def respond(self, base: int, outcome: Outcome, view: int) -> tuple[bytes, int]:
        """Read the tables and return the reply, and the number of bytes of its message and values together.

        The caller needs no lock: each table is read under its own lock, as in any other pull. The plan keeps
        its tables alive, so a table that was replaced meanwhile can still be read.
        """
        # No lock either: if two threads prepare the same reply, either one is good.
        opening, outs, size = self._openings.get((outcome, view)) or self._open(outcome, view)
        # bytes() copies a bytearray (values in the message) but not a bytes object (values in shared memory).
        # No other thread has the copy yet, so the kernels may write into it although bytes are immutable.
        message = bytes(opening)
        payload_address = content_address(message) if self.size else 0
        for part, out in zip(self._reads, outs, strict=True):
            if part.rows is not None:
                part.rows.pull(base + part.ids, part.count, payload_address + out)
            else:
                table = cast("DenseTable", part.table)
                table.pull_into(floats_at(payload_address + out, table.count))
        return message, size

    def _open(self, outcome: Outcome, view: int) -> _Opening:
        """Prepare the reply for this outcome of a push and this number of a view (membership)."""
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
    """Return a plan that carries out calls like this one by addresses, without making arrays.

    Returns None if such calls need arrays or are invalid.
    """
    try:
        return CallPlan(tables, request, room, payload)
    except (PsfleetError, ValueError):
        return None


@dataclass(slots=True)
class CallLayout:
    """Parsed segments of a call.

    Attributes:
        tensors: Gradients and reads. Calls with equal segments share this object, so do not change it.
        room: Response laid out in the worker's shared memory, or None if its values go into the message.
            Calls share it too: take a copy with `PullResponse.again`.
        plan: Plan for later calls with these segments, or None if they cannot be planned.
    """

    tensors: TensorRequest
    room: PullResponse | None = None
    plan: CallPlan | None = None


class MessageLayouts:
    """Cache of layouts of calls that carry their tensors in the message, by the bytes of their segments.

    Every message is new memory, so every call gets new arrays at the known offsets. All workers share the
    cache. Any thread may call without a lock: an entry never changes, and a lost entry only costs another
    parse.
    """

    def __init__(self) -> None:
        self._layouts: dict[bytes, _MessageLayout] = {}

    def known(self, header: Header, layout: bytes, payload: memoryview) -> CallLayout | None:
        """Return the layout of a call whose segments have these bytes, or None if the bytes are new."""
        # A plan or layout in shared memory depends on the worker, and is kept in `AttachedMemory`.
        known = self._layouts.get(layout)
        # The segments do not give the length of the payload, and a shorter one would be read beyond its end.
        if known is None or known.size != len(payload) or header.HasField("lane"):
            return None
        return CallLayout(known.over(payload))

    def plan(self, layout: bytes, size: int) -> CallPlan | None:
        """Return the plan for calls with these segments and a payload of `size` bytes, or None."""
        known = self._layouts.get(layout)
        return None if known is None or known.size != size else known.plan

    def keep(
        self,
        layout: bytes,
        payload: memoryview,
        tensors: TensorRequest,
        plan: CallPlan | None = None,
    ) -> None:
        """Keep a call's layout for later calls with the same segments."""
        # A call without a payload has no tensors to find. Its plan's `size` of 0 would mean shared memory.
        if 0 < len(payload) <= _LONGEST_PARSED:
            # If the number of ids changes in each step, layouts never repeat and would fill any cache.
            # Layouts that do repeat are added again by the next step.
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[layout] = _MessageLayout(payload, tensors, plan)

    def forget(self) -> None:
        """Drop all layouts, because the tables have changed and plans hold their addresses."""
        self._layouts.clear()


class _MessageLayout:
    """Offsets, dtypes and shapes of the arrays in the payload of a message.

    A payload has the gradients first, then the reads. The ids of a gradient come right before its values,
    without a gap. Each gradient and each read begins at a multiple of ALIGNMENT. `is_lasting` has checked
    that.

    Attributes:
        size: Bytes of the payload.
        plan: Plan for calls of this layout, or None if they need arrays.
    """

    def __init__(self, payload: memoryview, tensors: TensorRequest, plan: CallPlan | None) -> None:
        # Counted, not taken from addresses: an unaligned array of the first call is a copy somewhere else.
        self.size = len(payload)
        self.plan = plan
        at = 0

        def next_place(array: NDArray[Any]) -> _Place:
            nonlocal at
            located = array.dtype, array.size, at
            at += array.nbytes
            return located

        self._gradients = []
        for gradient in tensors.gradients:
            at += -at % ALIGNMENT
            ids = None if gradient.ids is None else next_place(gradient.ids)
            values = next_place(gradient.values)
            self._gradients.append(
                (gradient.table, ids, values, gradient.values.shape, gradient.learning_rate)
            )
        self._reads = []
        for read in tensors.reads:
            at += -at % ALIGNMENT
            self._reads.append((read.table, None if read.ids is None else next_place(read.ids)))

    def over(self, payload: memoryview) -> TensorRequest:
        """Return the request of a call, with arrays that are views of this payload."""
        # Formats are not stored, because `is_lasting` admits float32 only.
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
    # Clients that do not pad the message as `frame.opened` does may send the payload to any address.
    return array if array.flags.aligned else array.copy()


def lay_out_call(
    tensors: TensorRequest, memory: SharedMemory | None, shape_of: Callable[[Read], tuple[int, ...]]
) -> CallLayout:
    """Make the layout of a call from its parsed segments, and of its response if that is in shared memory.

    Raises:
        FrameError: The response would be too long, or would end outside the shared memory.
    """
    # Before any memory for the response is allocated. Counted in float32 even if values are sent compressed,
    # because tables fill float32 arrays first. A request may name the same table, ids and place many times,
    # so the size of the shared memory alone does not limit the response.
    size = sum(4 * math.prod(shape_of(read)) for read in tensors.reads)
    limit = max(frame.MAX_MESSAGE, 0 if memory is None else len(memory))
    if size > limit:
        raise FrameError(
            f"the pull asks for {size} bytes of values, the limit is {limit}; pull fewer ids or tables at a "
            "time"
        )
    if memory is None:
        return CallLayout(tensors)
    return CallLayout(tensors, lay_out_in(memory, tensors.places, tensors.reads, shape_of))


def is_lasting(layout: bytes, header: Header) -> bool:
    """Return whether later calls with these layout bytes may reuse the result of parsing this call.

    That needs two things. All arrays must be views of the call's memory: float32, aligned, and no positions
    of single elements, which are converted to new arrays. And the layout bytes must contain all of the
    segments and nothing else.

    Args:
        layout: First part of the header, in which workers send the segments.
        header: The whole header.
    """
    # A client may split its header anywhere. If the layout lacked a segment, or had another field, calls with
    # equal layouts could differ in it.
    part = read_header(layout)
    if len(part.ListFields()) != 1 or len(part.segments) != len(header.segments):
        return False
    return all(
        segment.precision == PRECISION_FLOAT32
        and segment.content != ELEMENTS
        and segment.offset % ALIGNMENT == 0
        for segment in part.segments
    )
