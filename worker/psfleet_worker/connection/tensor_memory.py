"""Allocates the shared memory through which a worker sends tensors to servers on the same host.

The worker creates one memory for all servers, and only the worker allocates *places* (ranges of bytes) in it.
A call names the places of its tensors. Until its reply arrives, the server reads and writes only those
places, so neither side needs a lock. If a call fails, its server may still be working on it. The whole memory
is then *lost*: no place of it is used again, the call is repeated with its tensors in the message, and the
next call gets new memory. Failures are rare and memory is cheap, so this one rule replaces a state for each
place.

All servers write into one memory, so each can write its part of a dense array directly into the array that
the caller gets. Such an array is *lent*: its place becomes free when NumPy releases the last view of it.

`WorkerMemory` creates and replaces the memory, `LaneMemory` allocates its places, and a `Lane` decides for
one server whether the next call can use it. Servers on other hosts get tensors in messages.
docs/decisions/0013-frames-and-shared-memory.md explains this design.
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
"""Offers memory with a generation number to a server. Returns True if the server has attached it."""

Floats = NDArray[np.float32]

LEND_FROM = 1 << 16
"""Size in bytes from which an array is lent. Copying a shorter array costs less than lending it."""

BLOCK = 2 << 10
"""Size in bytes of a block, which holds several small tensors of one call."""

_MOST_KNOWN = 1024  # segments whose places a memory remembers
_FIRST_SIZE = 512 << 10  # bytes of the first memory
_LARGEST = 4 << 30  # bytes of the largest memory, even if a step needs more
_SPARE = 4  # a memory grows by this many times what was missing: several calls may be under way
# At most 1/_LENDABLE of a memory is lent, so that a caller who keeps every array cannot make the memory grow
# without limit.
_LENDABLE = 2


class LaneMemory:
    """A shared memory, and the allocated places in it.

    Args:
        memory: The mapped memory.
        offer: Description that a server needs to attach the memory.

    Attributes:
        generation: Random number that identifies the memory on the wire.
        offer: Description that a server needs to attach the memory.
        missing: Maximum number of bytes, over all simultaneous calls, that found no space. 0 means that the
            memory was always large enough.
        largest: Bytes of all tensors of the largest call.
        lent: Highest number of bytes of lent arrays at one time, including an array that could not be lent.
        give: Frees the place at an offset.
        lost: True once a call with tensors in this memory has failed. No place of it is used again.
        turns: Numbers of the next calls. A server refuses a call that is not newer than the last one, because
            its places may belong to another call by then.
    """

    def __init__(self, memory: SharedMemory, offer: MemoryHandle) -> None:
        self.generation = int.from_bytes(os.urandom(8), "little")
        self.offer = offer
        self.missing = 0
        self.largest = 0
        self.lent = 0
        self.lost = False
        self._missed = 0  # bytes without a place, of calls under way
        self._memory = memory
        self._blocks = BlockAllocator(len(memory))
        self.give = self._blocks.give
        self.turns = itertools.count(1)
        self._lent: dict[_Loan, int] = {}  # bytes of each lent array
        # Arrays that NumPy has released, in any thread: appending to a deque and taking from it are atomic.
        self._returned: collections.deque[_Loan] = collections.deque()
        self._blocks_known: dict[int, PlacedSegment] = {}  # roots of the layouts, by block offset
        self._known = 0  # number of segments in all layouts

    def __len__(self) -> int:
        return len(self._memory)

    def take(self, size: int) -> tuple[NDArray[np.uint8], int] | None:
        """Allocate `size` bytes, and return the bytes and their offset, or None if there is no space."""
        if self._returned:
            self._regain()
        offset = self._blocks.take(size)
        if offset is None:
            return None
        return self._memory.bytes[offset : offset + size], offset

    def miss(self, size: int) -> None:
        """Note that a running call found no space in this memory for `size` bytes of its tensors."""
        self._missed += size
        self.missing = max(self.missing, self._missed)

    def ended(self, size: int, shortage: int) -> None:
        """Note the end of a call with `size` bytes of tensors, of which `shortage` bytes found no space."""
        self.largest = max(self.largest, size)
        self._missed -= shortage

    def lend(self, count: int) -> "LentArray | None":
        """Return a float32 array [count] for the caller of a pull to keep, or None if it must be copied."""
        if self._returned:
            self._regain()
        size = 4 * count
        lent = size + sum([*self._lent.values()])
        self.lent = max(self.lent, lent)
        if lent > len(self) // _LENDABLE:
            return None
        offset = self.take(size)
        if offset is None:
            self.missing = max(self.missing, self._missed + size)
            return None
        base = _LentValues(self, offset[0].view(np.float32))
        self._lent[_Loan(base, self._returned, offset[1])] = size
        return LentArray(self, base, offset[1])

    def _regain(self) -> None:
        """Free the places of arrays that NumPy has released."""
        while True:
            try:
                loan = self._returned.popleft()
            except IndexError:
                return
            del self._lent[loan]
            self._blocks.give(loan.offset)

    def begin(self) -> "PlacedSegment | None":
        """Allocate a block (2 KiB for the small tensors of a call).

        Returns the root of a tree that caches how earlier calls have laid out their tensors in the block, or
        None if there is no space.
        """
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
        """Cache that `segment` follows `before` in a block, for calls that add the same `key` there."""
        before.next[key] = segment
        self._known += 1


class LentArray:
    """An array in shared memory that keeps its place until the last view of it is gone.

    Attributes:
        held: The memory.
        offset: Offset of the array in the memory, in bytes.
        address: Address of the array in this process.
        array: float32 [count].
    """

    def __init__(self, memory: LaneMemory, base: "_LentValues", offset: int) -> None:
        self.held = memory
        self.offset = offset
        self.array: Floats = np.asarray(base)
        self.address = address_of(self.array)


class _LentValues:
    """Base object of an array that a caller has borrowed. It is released with the last view of the array."""

    def __init__(self, memory: LaneMemory, array: Floats) -> None:
        self.__array_interface__ = array.__array_interface__
        self._held = memory
        self._array = array


class _Loan(weakref.ref[_LentValues]):
    """Weak reference that appends itself to a queue when its array is released.

    The callback is `deque.append`, which runs no Python code. An interrupt (Ctrl-C) that arrived during a
    `__del__` method would be lost, because Python ignores exceptions there.
    """

    __slots__ = ("offset",)

    def __new__(cls, base: _LentValues, queue: "collections.deque[_Loan]", offset: int) -> "_Loan":
        return super().__new__(cls, base, queue.append)

    def __init__(self, base: _LentValues, queue: "collections.deque[_Loan]", offset: int) -> None:
        self.offset = offset


class WorkerMemory:
    """The shared memory of a worker: created when first needed, replaced when it is too small or lost.

    Args:
        most: Maximum number of bytes of the present and the previous memory together, unless four steps of
            this worker need more.
        servers: Number of servers.

    Attributes:
        latest: The present memory, or None until the first call.
        servers: Number of servers. A step makes one call to each.
    """

    def __init__(self, most: int, servers: int = 1) -> None:
        self.latest: LaneMemory | None = None
        self.servers = servers
        self._most = most

    def renew(self) -> LaneMemory | None:
        """Return the memory to share from now on, or None if the host has too little memory."""
        latest = self.latest
        if latest is None or latest.lost or latest.missing:
            self.latest = self._make(latest)
            if latest is not None and latest is not self.latest:
                os.close(latest.offer.descriptor)  # servers that attached it have their own mapping
        return self.latest

    def close(self) -> None:
        """Release the memory. Lent arrays keep it mapped. Safe to call twice."""
        if self.latest is not None:
            os.close(self.latest.offer.descriptor)
            self.latest = None

    def _make(self, before: LaneMemory | None) -> LaneMemory | None:
        size = _FIRST_SIZE
        if before is not None:
            step = before.largest * self.servers + before.lent
            limit = min(max(self._most - len(before), _SPARE * step), _LARGEST)
            size = min(len(before) + _SPARE * before.missing, limit)
            if before.missing and not before.lost and len(before) >= size:
                # The memory has its maximum size. Tensors that find no space are sent in messages.
                before.missing = 0
                return before
        memory = SharedMemory.make(size)
        return None if memory is None else LaneMemory(*memory)


class Lane:
    """Decides for one server whether the next call can use shared memory, and offers new memory to it.

    Args:
        memories: Source of shared memory, or None if tensors are always sent in messages.
        attach: Offers a memory to the server.
        client: Client of the server. New memory is offered only while it has no open call. Otherwise the
            offer would have to wait for that call, which may itself wait for other workers.
    """

    def __init__(
        self, memories: WorkerMemory | None, attach: Attach, client: "ServerClient"
    ) -> None:
        self._memories = memories
        self._attach = attach
        self._client = client
        self._held: LaneMemory | None = None

    def held(self) -> LaneMemory | None:
        """Return the memory for the next call, or None if its tensors go into the message."""
        shared, memories = self._held, self._memories
        if memories is not None and not self._client.open_calls:
            latest = memories.latest
            if latest is None or latest.lost or latest.missing:
                latest = memories.renew()
            if latest is not shared:
                self._held = shared = self._share(latest)
        return None if shared is None or shared.lost else shared

    def _share(self, memory: LaneMemory | None) -> LaneMemory | None:
        """Share the memory.

        If a server refuses once (it may be on another host), no memory is offered again.
        """
        if memory is None or not self._attach(memory.generation, memory.offer):
            self._memories = None
            return None
        return memory

    def close(self) -> None:
        """Stop using the memory. Lent arrays keep it mapped. Safe to call twice."""
        self._held = self._memories = None


_NO_IDS, _NO_VALUES = np.empty(0, np.int64), np.empty(0, np.float32)


class PlacedSegment:
    """Cached position of one segment of a call in shared memory.

    The small tensors of a call are stored one after the other in a block, each at the beginning of a cache
    line:

        block (2 KiB)  | ids, rows of table 1 | ids of table 2 | its rows in the reply | free ... |

    A step with the same tables and counts as the step before mostly gets the same block. Each tensor then has
    the same position, and its encoded segment has the same bytes. To avoid encoding a segment again, the
    memory keeps a tree of layouts for each block: its root is the empty block, and `next` leads from a
    segment to the segment after it, by the key of the request (`ServerRequest._lay`).

    Attributes:
        segment: The segment as an encoded field of the header.
        ids: int64 array for the ids, in shared memory.
        values: float32 array for the values, in their shape, in shared memory.
        arrays: Arrays that make up the segment's bytes.
        reply: Array for the values of a read. None for a gradient, or if the values come in the message.
        reply_bytes: Bytes of these values.
        bytes: Bytes of the arrays.
        end: Bytes of the block that are used up to the end of this segment.
        block: Bytes and offset of the block. Set only in the root of a tree.
        next: Cached segments that follow this one, by the key of their request.
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
