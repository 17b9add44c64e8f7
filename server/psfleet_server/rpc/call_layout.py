"""Caches the layout of pushes and pulls: the positions of a request's tensors and of the reply's values.

A training step mostly sends the same segments as the step before: same tables, same numbers of ids, same
offsets. So a server caches the parsed request, with the bytes of the segments as the key. For the next call
with the same bytes it reuses one of three levels:

1. no entry: parse the segments and make NumPy arrays over the tensors (`segments.read_request`);
2. `CallLayout`: the arrays are known. For tensors in shared memory the same views are used again; for tensors
  in the message, `_MessageLayout` makes new views at the known offsets;
3. `CallPlan`: no arrays, kernels get addresses. Only `PlainCalls` uses it. A small call then takes 32
  instead of 99 us of the server's CPU (docs/decisions/0033-plain-calls.md). A plan is made of the segments
  themselves, because with several servers the numbers of ids, and so the bytes, differ from call to call.

An entry may contain only information that follows from the segments. Everything that depends on values
(repeated ids, space for new rows, the push's sequence) is checked in every call. Layouts in shared memory are
kept in `AttachedMemory`, separately for each worker, so that no worker can name another one's memory.
"""

import contextlib
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
from psfleet.core.engine.schema.table import LARGEST
from psfleet.core.engine.shard.shard_tables import ShardTables, Table
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.row_update import PlacedRows
from psfleet.core.net import frame, segments
from psfleet.core.net.frame import read_header
from psfleet.core.net.protobuf_fields import ALIGNMENT
from psfleet.core.net.segments import ELEMENTS, TensorRequest
from psfleet.core.net.shared_memory import FIRST, SharedMemory
from psfleet.core.net.v1.frame_pb2 import PRECISION_FLOAT32, Header, Outcome
from psfleet.core.net.value_formats import CompressedValues

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

# Alignment in bytes that the kernels of compressed values need.
_WORD = 4

# Maximum number of bytes of values in the reply message of a planned call. It is far below
# `frame.MAX_MESSAGE`, so that such a reply can always be encoded once the call's push has been applied.
_LONGEST = 256 << 20
# Up to this many bytes of values, a reply is copied whole from a prepared one and then filled. A longer one
# is made of unwritten memory, which saves that pass over its bytes.
_COPIED = 64 << 10
# A plan prepares one reply for each pair of outcome and view number. A new view makes the earlier replies
# useless, so only a few are worth keeping.
_MOST_OPENINGS = 8
_Rooms = list[tuple[int, int, int]]
"""For each read three offsets in a payload: begin and end of its values, and end of the padding."""
_Opening = tuple[bytes, bytearray, list[int], _Rooms]
"""A prepared reply: bytes before the payload, whole message, offset of each read's values, places of values.

The whole message is empty if it would be too long to be copied for each call.
"""
# Layouts of all workers together. A training step needs a few, which its workers share.
_MOST_LAYOUTS = 64
# Plans kept for each worker's memory, and for all messages. A plan takes about 1 kB.
_MOST_PLANS = 256
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
    opening, rooms = _opening(header.SerializeToString(), parts)
    message, payload = _unwritten(opening, rooms)
    response = PullResponse(message, len(message))
    for read, (_, _, shape), (start, end, _) in zip(reads, parts, rooms, strict=True):
        response.add(read, shape, payload[start:end])
    return response


def _unwritten(opening: bytes, rooms: _Rooms) -> tuple[bytes, Bytes]:
    """Return a message whose values are unwritten memory, and a writable view of its payload.

    Args:
        opening: Bytes before the payload.
        rooms: Places of the values of all reads.
    """
    message, payload = frame.reserve_behind(opening, rooms[-1][2] if rooms else 0)
    for _, end, filled in rooms:
        payload[end:filled] = 0  # else the padding would send what this memory held before
    return message, payload


# As many as one worker may have plans (`_MOST_PLANS`), each of which needs one.
@lru_cache(256)
def _opening(
    fields: bytes, parts: tuple[tuple[int, Format, tuple[int, ...]], ...]
) -> tuple[bytes, _Rooms]:
    """Encode the part of a response before its payload. Cached, because most responses repeat the one before.

    Args:
        fields: Encoded header, without the segments (tables in the payload) that this function adds. It is in
            bytes because a cache key must be hashable.
        parts: Table, format and shape of each read.

    Returns:
        The bytes before the payload, and the places of the values in it.
    """
    header, end = Header.FromString(fields), 0
    rooms: _Rooms = []
    for table, form, shape in parts:
        content = segments.VALUES if len(shape) == 1 else segments.ROWS
        precision = segments.PRECISIONS[form]
        header.segments.add(table=table, content=content, count=shape[0], precision=precision)
        start, end = end, end + CompressedValues.size_of(form, shape)
        rooms.append((start, end, end := end + -end % ALIGNMENT))
    return frame.opening(header, end), rooms


@dataclass(slots=True)
class _TablePart:
    """Gradient or read of a planned call.

    Attributes:
        table: The table that is pushed or pulled.
        rows: Access to a sparse table's rows by address, or None for a dense table.
        count: Number of ids, or 0 for a dense table.
        ids: Offset of the ids (see `CallPlan`).
        values: Offset of a gradient's values, or of a read's values in the reply.
        rate: Learning rate of a gradient; unused for a read.
    """

    table: Table
    rows: PlacedRows | None
    count: int
    ids: int
    values: int
    rate: float


class CallPlan:
    """Carries out any call of one layout by addresses, without making an array.

    A plan stores offsets within the payload. Each call adds its base, the address of its own payload:

        base                                  payload of this call, in its message
        |----------|--------------------|
        | ids      | gradient values    |
        0          part.values            offsets, the same in every call of the layout

    For tensors in shared memory the base is 0 and the offsets are addresses, because that memory does not
    move.

    A plan relies on its caller: the shard's lock is held from `fit` to the end of `apply`, `fit` has returned
    True, and the tables have not changed since the plan was made.

    Attributes:
        gradient_bytes: Bytes of the gradients.
        pushes: True if the call has gradients.
        pulls: True if the call has reads.
    """

    def __init__(
        self,
        tables: ShardTables,
        rows: dict[int, PlacedRows | None],
        layout: bytes,
        memory: SharedMemory | None,
        size: int,
    ) -> None:
        """Make a plan from the encoded segments of a call.

        The checks are those of `segments.read_request`, `ShardTables.check_gradient` and `lay_out_call`,
        which report the errors. They are repeated here for numbers, because making arrays of a layout that is
        new takes longer than the rest of a small call.

        Args:
            tables: The shard's tables.
            rows: Access to the rows of sparse tables, by key. The plan adds the tables that are missing.
            layout: First part of the header, in which workers send the segments.
            memory: Shared memory with the call's tensors, or None if they are in the message.
            size: Bytes of the payload of the message.

        Raises:
            PsfleetError: The layout is damaged.
            ValueError: Calls of this layout are invalid or need arrays.
        """
        self._tables = tables
        # Shared memory is unmapped when its last array is collected. `AttachedMemory` drops its own as soon
        # as the worker dies, which may be during a call: without this reference the kernels would write to
        # unmapped addresses.
        self._memory = None if memory is None else memory.bytes
        first = 0 if self._memory is None else address_of(self._memory)
        # In shared memory MAX_MESSAGE suffices: the longer replies that `lay_out_call` allows need arrays.
        limit, longest = (size, _LONGEST) if memory is None else (len(memory), frame.MAX_MESSAGE)
        self.gradient_bytes = self._reply_bytes = at = 0
        self._updates: list[_TablePart] = []
        self._reads: list[_TablePart] = []
        shapes: list[tuple[int, Format, tuple[int, ...]]] = []
        header = read_header(layout)
        _check(len(header.ListFields()) == 1)  # segments and nothing else
        for segment in header.segments:
            table, content, count = tables[segment.table], segment.content, segment.count
            at = at + -at % ALIGNMENT if memory is None else segment.offset
            is_read = content in (segments.IDS, segments.WHOLE)
            _check(segment.precision == PRECISION_FLOAT32 and at % ALIGNMENT == 0)
            if isinstance(table, DenseTable):
                _check(
                    content == segments.WHOLE or (content, count) == (segments.VALUES, table.count)
                )
                accessor, ids, pushed = None, 0, table.count
                shape: tuple[int, ...] = (table.count,)
            else:
                if segment.table not in rows:
                    rows[segment.table] = table.placed()
                accessor, ids, pushed = rows[segment.table], count, count * table.spec.push_width
                shape = count, table.spec.dim
                _check(accessor is not None)
                _check(content in (segments.IDS, segments.ID_ROWS))
            values = at + 8 * ids
            end = values if is_read else values + 4 * pushed
            # Ids and gradients may lie before FIRST, as for `read_request`: to read the worker's own token
            # does no harm. Replies may not, because they would overwrite it.
            _check(end <= limit)
            if is_read:
                values, length = segment.reply, 4 * math.prod(shape)
                if memory is not None:
                    _check(values % _WORD == 0 and FIRST <= values <= limit - length)
                self._reply_bytes += length
                shapes.append((segment.table, "float32", shape))
            else:
                _check(not shapes and abs(segment.learning_rate) <= LARGEST)
                # One gradient for each table, as `read_request` requires too: `fit` checks all gradients
                # before any is applied, and does not see rows that an earlier gradient would add.
                _check(all(part.table is not table for part in self._updates))
                table.spec.rule.scalars(segment.learning_rate, 1)  # some rules refuse a rate of 0
                self.gradient_bytes += end - at
            rate = segment.learning_rate
            part = _TablePart(table, accessor, ids, first + at, first + values, rate)
            (self._reads if is_read else self._updates).append(part)
            at = end
        # A message must end behind its last segment, as `read_request` requires (`_Cursor.finish`).
        _check(
            self._reply_bytes <= longest and (memory is not None or at + -at % ALIGNMENT >= size)
        )
        self.pushes, self.pulls = bool(self._updates), bool(self._reads)
        self._shapes = tuple(shapes)
        self._openings: dict[tuple[Outcome, int], _Opening] = {}

    def fit(self, base: int) -> bool:
        # Checks all gradients before `apply` changes the first table: a push must take effect whole or not at
        # all. A dense table takes any values, and its size and learning rate were checked for the plan.
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
        # No lock for `_openings` either: if two threads prepare the same reply, either one is good.
        if self._memory is not None:
            message = placed(outcome, view)
            outs, size = None, self._reply_bytes + len(message)
        else:
            prepared = self._openings.get((outcome, view)) or self._open(outcome, view)
            opening, copied, outs, rooms = prepared
            # No other thread has this message yet, so the kernels may write into it although bytes are
            # immutable. `bytes` makes a copy only because `copied` is a bytearray: of bytes, it returns the
            # same object, and the kernels would write into the prepared reply of all calls.
            message = bytes(copied) or _unwritten(opening, rooms)[0]
            size = len(message)
        first = 0 if outs is None else content_address(message)
        for number, part in enumerate(self._reads):
            out = part.values if outs is None else first + outs[number]
            if part.rows is not None:
                part.rows.pull(base + part.ids, part.count, out)
            else:
                table = cast("DenseTable", part.table)
                table.pull_into(floats_at(out, table.count))
        return message, size

    def _open(self, outcome: Outcome, view: int) -> _Opening:
        """Prepare the reply for this outcome of a push and this number of a view (membership)."""
        header = Header(outcome=outcome, view=view)
        opening, rooms = _opening(header.SerializeToString(), self._shapes)
        outs = [len(opening) + start for start, _, _ in rooms]
        if len(self._openings) >= _MOST_OPENINGS:
            self._openings.clear()
        size = rooms[-1][2]
        # A bytearray, so that `respond` has to copy it.
        copied = bytearray(opening + bytes(size)) if size <= _COPIED else bytearray()
        prepared = self._openings[outcome, view] = opening, copied, outs, rooms
        return prepared


def _check(is_plain: bool) -> None:
    """Raise ValueError for a segment that is invalid or needs arrays."""
    if not is_plain:
        raise ValueError


class CallPlanner:
    """Makes the plans of calls, and keeps those of calls that carry their tensors in the message.

    Any thread may call under the shard's lock.
    """

    def __init__(self) -> None:
        self._tables: ShardTables | None = None
        self._version = 0
        self._rows: dict[int, PlacedRows | None] = {}
        self._plans: Plans = {}

    def renew(self, tables: ShardTables) -> bool:
        """Forget everything if the tables have changed since the last call. Returns True in this case.

        Plans contain addresses of tables, so a change of the tables invalidates all plans.
        """
        if self._tables is tables and self._version == tables.version:
            return False
        self._tables, self._version, self._rows, self._plans = tables, tables.version, {}, {}
        return True

    def plan_message(self, layout: bytes, size: int) -> CallPlan | None:
        """Return the plan for calls with these segments and a payload of `size` bytes, or None."""
        return self.plan(self._plans, (layout, size), None)

    def plan(
        self, plans: "Plans", key: tuple[bytes, int], memory: SharedMemory | None
    ) -> CallPlan | None:
        """Return the plan for calls of a layout, from these plans or a new one that is added to them.

        Returns None if such calls need arrays or are invalid.

        Args:
            plans: Plans of earlier calls with the same memory.
            key: Encoded segments, and the bytes of the payload.
            memory: Shared memory with the call's tensors, or None if they are in the message.
        """
        assert self._tables is not None
        try:
            return plans[key]
        except KeyError:
            pass
        plan: CallPlan | None = None
        with contextlib.suppress(PsfleetError, ValueError):
            plan = CallPlan(self._tables, self._rows, key[0], memory, key[1])
        # None is kept too: with 8 tables, of which the last needs arrays, it takes 20 us to find out. Not for
        # long segments, because a damaged layout may be as long as a header.
        if plan is not None or len(key[0]) <= _LONGEST_PARSED:
            if len(plans) >= _MOST_PLANS:
                plans.clear()
            plans[key] = plan
        return plan


Plans = dict[tuple[bytes, int], CallPlan | None]
"""Plans by the encoded segments and the bytes of the payload, which are 0 in shared memory.

None stands for calls that need arrays or are invalid.
"""


@dataclass(slots=True)
class CallLayout:
    """Parsed segments of a call.

    Attributes:
        tensors: Gradients and reads. Calls with equal segments share this object, so do not change it.
        room: Response laid out in the worker's shared memory, or None if its values go into the message.
            Calls share it too: take a copy with `PullResponse.again`.
    """

    tensors: TensorRequest
    room: PullResponse | None = None


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
        # A layout in shared memory depends on the worker, and is kept in `AttachedMemory`.
        known = self._layouts.get(layout)
        # The segments do not give the length of the payload, and a shorter one would be read beyond its end.
        if known is None or known.size != len(payload) or header.HasField("lane"):
            return None
        return CallLayout(known.over(payload))

    def keep(self, layout: bytes, payload: memoryview, tensors: TensorRequest) -> None:
        """Keep a call's layout for later calls with the same segments."""
        # A call without a payload has no tensors to find.
        if 0 < len(payload) <= _LONGEST_PARSED:
            # If the number of ids changes in each step, layouts never repeat and would fill any cache.
            # Layouts that do repeat are added again by the next step.
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[layout] = _MessageLayout(payload, tensors)


class _MessageLayout:
    """Offsets, dtypes and shapes of the arrays in the payload of a message.

    A payload has the gradients first, then the reads. The ids of a gradient come right before its values,
    without a gap. Each gradient and each read begins at a multiple of ALIGNMENT. `is_lasting` has checked
    that.

    Attributes:
        size: Bytes of the payload.
    """

    def __init__(self, payload: memoryview, tensors: TensorRequest) -> None:
        # Counted, not taken from addresses: an unaligned array of the first call is a copy somewhere else.
        self.size = len(payload)
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
    # Clients that do not pad as `protobuf_fields.opened` does may send the payload to any address.
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
