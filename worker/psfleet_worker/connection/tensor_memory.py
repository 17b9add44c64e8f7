"""The way of tensors to a server: shared memory where both ends are on one host, else messages.

The worker makes one memory for all servers and owns every place in it. A call names places: until
its answer is here, the server reads and writes those and no others, so no side needs a lock. A call
that failed may still be under way at its server; then no place of that memory is dealt again. The
call goes on with its tensors in the message, and the next one gets other memory.

Since all servers write to one memory, each can put its part of a dense array where the array will be
used: such an array is lent, and its place comes back when the last view of it is gone.
"""

import collections
import itertools
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.initial_values import address_of
from psfleet.core.net.shared_memory import BlockAllocator, MemoryHandle, SharedMemory

if TYPE_CHECKING:
    from psfleet_worker.connection.server_client import ServerClient

Attach = Callable[[int, MemoryHandle], bool]
"""Offers memory under a generation to the server; whether it is shared now."""

Floats = NDArray[np.float32]

LEND_FROM = 1 << 16
"""Bytes from which an array is lent: a shorter one is copied for less than its lending costs."""

BLOCK = 2 << 10
"""Bytes of shared memory for several small tensors of one call."""

_MOST_KNOWN = 1024  # segments whose places a memory remembers
_FIRST_SIZE = 512 << 10
_LARGEST = 4 << 30  # whatever one step needs
_SPARE = 4  # times what was missing: several calls may be under way
_LENDABLE = 2  # at most one part in so many of a memory: the caller may keep what it was lent


class LaneMemory:
    """One memory that servers share.

    Attributes:
        generation: Its number on the wire.
        offer: Description with which a server attaches the memory.
        missing: Bytes of the tensors under way at once for which there was no place; 0: there always was one.
        largest: Bytes of all tensors of the largest call.
        lent: Bytes of the arrays that were to be lent at once, at most.
        give: Takes back the place of an array that is no longer used, by its offset.
        lost: A call has failed in it: no place of it is used again.
        turns: Numbers of the next calls. Calls reach a server in the order of their numbers.
    """

    def __init__(self, memory: SharedMemory, offer: MemoryHandle) -> None:
        self.generation = int.from_bytes(os.urandom(8), "little")
        self.offer = offer
        self.missing = 0
        self.largest = 0
        self.lent = 0
        self.lost = False
        self._missed = 0  # by calls that are under way
        self._memory = memory
        self._blocks = BlockAllocator(len(memory))
        self.give = self._blocks.give
        self.turns = itertools.count(1)
        self._lent: dict[_Loan, int] = {}  # bytes
        self._returned: collections.deque[_Loan] = collections.deque()
        self._blocks_known: dict[int, PlacedSegment] = {}  # by offset
        self._known = 0  # segments in them

    def __len__(self) -> int:
        return len(self._memory)

    def take(self, size: int) -> tuple[NDArray[np.uint8], int] | None:
        """Take `size` bytes of the memory; return them and their offset. None: there is no room left."""
        if self._returned:
            self._regain()
        offset = self._blocks.take(size)
        if offset is None:
            return None
        return self._memory.bytes[offset : offset + size], offset

    def miss(self, size: int) -> None:
        """Note that a call which has begun has no place for `size` bytes."""
        self._missed += size
        self.missing = max(self.missing, self._missed)

    def ended(self, size: int, shortage: int) -> None:
        """Note the end of a call whose tensors took `size` bytes, `shortage` of them without a place."""
        self.largest = max(self.largest, size)
        self._missed -= shortage

    def lend(self, count: int) -> "LentArray | None":
        """Return a float32 array of `count` that the caller of a pull may keep; None: it is to be copied."""
        if self._returned:
            self._regain()
        size = 4 * count
        lent = size + sum([*self._lent.values()])
        self.lent = max(self.lent, lent)
        if lent > len(self) // _LENDABLE:
            return None
        place = self.take(size)
        if place is None:
            self.missing = max(self.missing, self._missed + size)
            return None
        base = _LentValues(self, place[0].view(np.float32))
        self._lent[_Loan(base, self._returned, place[1])] = size
        return LentArray(self, base, place[1])

    def _regain(self) -> None:
        """Take back the arrays that are not in use any more."""
        while True:
            try:
                loan = self._returned.popleft()
            except IndexError:
                return
            del self._lent[loan]
            self._blocks.give(loan.offset)

    def begin(self) -> "PlacedSegment | None":
        """Take a block; what earlier calls had in it follows what this returns. None: there is no room."""
        if self._returned:
            self._regain()
        offset = self._blocks.take(BLOCK)
        if offset is None:
            return None
        if self._known > _MOST_KNOWN:
            self._blocks_known.clear()
            self._known = 0
        start = self._blocks_known.get(offset)
        if start is None:
            start = self._blocks_known[offset] = PlacedSegment()
            start.block = self._memory.bytes[offset : offset + BLOCK], offset
        return start

    def learn(
        self, before: "PlacedSegment", key: tuple[object, ...], segment: "PlacedSegment"
    ) -> None:
        """Remember a segment that was laid out behind `before`."""
        before.next[key] = segment
        self._known += 1


class LentArray:
    """An array in shared memory that keeps its place for as long as anything looks at it.

    Attributes:
        held: The memory.
        offset, address: Of the array, in it and in this process.
        array: float32 [count].
    """

    def __init__(self, memory: LaneMemory, base: "_LentValues", offset: int) -> None:
        self.held = memory
        self.offset = offset
        self.array: Floats = np.asarray(base)
        self.address = address_of(self.array)


class _LentValues:
    """The base of a lent array and of all its views: NumPy lets go of it with the last of them."""

    def __init__(self, memory: LaneMemory, array: Floats) -> None:
        self.__array_interface__ = array.__array_interface__
        self._held = memory
        self._array = array


class _Loan(weakref.ref[_LentValues]):
    """Appends itself to `returned` when the array is gone.

    That runs no Python code: an interrupt that arrived in a `__del__` would be lost, since Python
    ignores exceptions there.
    """

    __slots__ = ("offset",)

    def __new__(cls, base: _LentValues, queue: "collections.deque[_Loan]", offset: int) -> "_Loan":
        return super().__new__(cls, base, queue.append)

    def __init__(self, base: _LentValues, queue: "collections.deque[_Loan]", offset: int) -> None:
        self.offset = offset


class WorkerMemory:
    """The memory of a worker: made when first needed, larger when too small, again when lost.

    Args:
        most: Bytes that it and the one before it take, unless four steps of this worker need more.
    """

    def __init__(self, most: int, servers: int = 1) -> None:
        self.latest: LaneMemory | None = None
        self.servers = servers
        self._most = most

    def renew(self) -> LaneMemory | None:
        """Return the memory to share from now on; None: there is none to be had."""
        latest = self.latest
        if latest is None or latest.lost or latest.missing:
            self.latest = self._make(latest)
            if latest is not None and latest is not self.latest:
                os.close(latest.offer.descriptor)
        return self.latest

    def close(self) -> None:
        """Let go of it; arrays in it keep it. Safe to call twice."""
        if self.latest is not None:
            os.close(self.latest.offer.descriptor)
            self.latest = None

    def _make(self, before: LaneMemory | None) -> LaneMemory | None:
        size = _FIRST_SIZE
        if before is not None:
            step = before.largest * self.servers + before.lent
            most = min(max(self._most - len(before), _SPARE * step), _LARGEST)
            size = min(len(before) + _SPARE * before.missing, most)
            if before.missing and not before.lost and len(before) >= size:
                before.missing = 0  # as large as it gets; what does not fit goes in messages
                return before
        memory = SharedMemory.make(size)
        return None if memory is None else LaneMemory(*memory)


class Lane:
    """Keeps one server's share in the memory up to date.

    Args:
        memories: Source of shared memory; None: tensors always travel in messages.
        attach: Makes the server share one.
        client: The server. While a call to it would have to wait behind another, which may itself wait for
            other workers, no new memory is offered.
    """

    def __init__(
        self, memories: WorkerMemory | None, attach: Attach, client: "ServerClient"
    ) -> None:
        self._memories = memories
        self._attach = attach
        self._client = client
        self._held: LaneMemory | None = None

    def held(self) -> LaneMemory | None:
        """Return the memory to use for the next call, None: the message."""
        shared, memories = self._held, self._memories
        if memories is not None and not self._client.open_calls:
            latest = memories.latest
            if latest is None or latest.lost or latest.missing:
                latest = memories.renew()
            if latest is not shared:
                self._held = shared = self._share(latest)
        return None if shared is None or shared.lost else shared

    def _share(self, memory: LaneMemory | None) -> LaneMemory | None:
        """Share the memory. A server that once does not share it is not asked again."""
        if memory is None or not self._attach(memory.generation, memory.offer):
            self._memories = None
            return None
        return memory

    def close(self) -> None:
        """Let go of the memory; arrays in it keep it. Safe to call twice."""
        self._held = self._memories = None


_NO_IDS, _NO_VALUES = np.empty(0, np.int64), np.empty(0, np.float32)


class PlacedSegment:
    """One segment of a call at its place in shared memory, remembered from one step to the next.

    The small tensors of a call lie one after the other in one block. Where a step has the same tables and
    counts as the one before, and gets the same block, each tensor lies where it lay, and its segment has the
    same bytes. So the memory keeps a tree for each block: what was laid out first, behind it what came next.

    Attributes:
        segment: Field of the header, encoded.
        ids: The part of its bytes that is for ids.
        values: The part that is for values, of their shape.
        reply: Array for the values of a read; None: it is no read, or they come in the message.
        reply_bytes: Bytes of these values.
        bytes: Bytes of the arrays.
        end: Bytes of the block up to its end.
        block: Bytes and offset of the block, if it is the start of one.
        next: Segments laid out behind it, by the request for them.
    """

    block: tuple[NDArray[np.uint8], int]

    def __init__(
        self,
        segment: bytes = b"",
        ids: NDArray[np.int64] = _NO_IDS,
        values: NDArray[np.float32] = _NO_VALUES,
        arrays: tuple[NDArray[np.uint8], ...] = (),
        reply: Any = None,
        reply_bytes: int = 0,
        end: int = 0,
    ) -> None:
        self.segment = segment
        self.ids = ids
        self.values = values
        self.arrays = arrays
        self.bytes = sum(array.nbytes for array in arrays)
        self.reply = reply
        self.reply_bytes = reply_bytes
        self.end = end
        self.next: dict[tuple[object, ...], PlacedSegment] = {}
