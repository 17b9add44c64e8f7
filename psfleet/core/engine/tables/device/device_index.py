"""The index of a sparse table on a CUDA device: which id has which slot."""

from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from psfleet.core.engine.kernels.device.cuda import table_kernels
from psfleet.core.engine.kernels.device.cuda_queue import DeviceBuffers, DeviceQueue
from psfleet.core.engine.kernels.hash_index import SEGMENT_COUNT
from psfleet.core.engine.kernels.hashing import ids_of
from psfleet.core.engine.tables.device.device_memory import DeviceArena
from psfleet.core.engine.tables.row_memory import Listed

Ids = NDArray[np.int64]
FreeSlots = tuple[Any, int, int]
"""Slots that removed rows have left, how many these are, and the first slot that no row has had."""

_FEWEST = 4  # entries of a segment
_GROUP = 16  # segments that are rebuilt at a time
_ENTRY_BYTES = 16

cuda_index = table_kernels("cuda_index")


class DeviceIndex:
    """Entries as psfleet.core.engine.kernels.device.cuda_index describes them. Not thread-safe.

    A segment is filled to three quarters at most. When one would be fuller, all are rebuilt with at least
    twice as many entries as rows; so each row is moved a few times at most while a table grows. They are
    rebuilt where they lie, group by group: only a copy of one group is there twice.

    Args:
        max_rows: The most rows it will hold.
        queue: Queue of the table.
    """

    def __init__(self, max_rows: int, queue: DeviceQueue) -> None:
        self._queue = queue
        self._buffers = DeviceBuffers(queue)
        self._used = np.zeros(SEGMENT_COUNT, np.int64)  # entries, those of removed rows included
        most = _most_entries(max_rows)
        self._arenas = [DeviceArena(most, dtype) for dtype in (np.uint64, np.uint32, np.uint32)]
        self._shape(np.full(SEGMENT_COUNT, _FEWEST))

    @property
    def bytes(self) -> int:
        """Bytes that it takes."""
        return sum(arena.bytes for arena in self._arenas)

    def bytes_with(self, rows: int) -> int:
        """Return the most bytes that it takes with so many rows, and while it is rebuilt for them."""
        size = sum(arena.bytes_of(_most_entries(rows)) for arena in self._arenas)
        return size + _ENTRY_BYTES * int(self._group_sizes().max())

    def _shape(self, sizes: Ids) -> None:
        """Have segments of these sizes, and memory for them."""
        ends = 1 + np.cumsum(sizes)
        for arena in self._arenas:
            arena.grow(int(ends[-1]))
        self._sizes, self._bases, self._size = sizes, ends - sizes, int(ends[-1])
        self._entries = (
            *(arena.array for arena in self._arenas),
            cuda.to_device(self._bases),
            cuda.to_device((sizes - 1).astype(np.uint64)),
        )

    def _group_sizes(self) -> Ids:
        """Return the number of entries in each group of segments."""
        return np.add.reduceat(self._sizes, np.arange(0, SEGMENT_COUNT, _GROUP))

    def find(self, ids: Any, now: int, steps: Ids | None, slots: Any, last_steps: Any) -> None:
        """Write the slots of ids and when they were last pushed; they count as pushed at `steps` now.

        Args:
            ids: uint64 [n] on the device.
            now: The table's step.
            steps: For each id, or one for all; None: they keep theirs.
            slots, last_steps: int64 [n] on the device.
        """
        self._queue.launch(
            cuda_index.find,
            len(ids),
            *self._entries,
            ids,
            len(ids),
            now,
            *self._stamps(steps),
            int(steps is not None),
            slots,
            last_steps,
            self._buffers.zeros("new", SEGMENT_COUNT),
        )

    def _stamps(self, steps: Ids | None) -> tuple[int, Any, int]:
        """Return the step for all ids, those for each, and which of the two counts: one needs no copy."""
        if steps is None or len(steps) == 1:
            return (
                0 if steps is None else int(steps[0]),
                self._buffers.get("none", (1,), np.int64),
                0,
            )
        return 0, self._buffers.fill("steps", steps), 1

    def unknown(self) -> Ids:
        """Return the number of ids of each segment that the last `find` has not found: int64 [segments]."""
        return self._queue.read(self._buffers.get("new", (SEGMENT_COUNT,), np.int64))

    def add(self, ids: Any, steps: Ids, slots: FreeSlots, row_slots: Any, fresh: Any) -> None:
        """Give slots to the ids that the last `find` has not found. Call `make_room` before."""
        self._queue.launch(
            cuda_index.add,
            len(ids),
            *self._entries,
            ids,
            len(ids),
            *self._stamps(steps),
            *slots,
            row_slots,
            fresh,
            self._buffers.zeros("count", 1),
        )

    def forget(self, ids: Any, free: Any, free_count: int) -> int:
        """Remove ids; their slots go to free[free_count:]. Returns how many were there."""
        count = self._buffers.zeros("count", 1)
        self._queue.launch(
            cuda_index.forget, len(ids), *self._entries, ids, len(ids), free, free_count, count
        )
        return self._counted()

    def make_room(self, unknown: Ids) -> None:
        """Have entries for so many new ids of each segment."""
        if (4 * (self._used + unknown) <= 3 * self._sizes).all():
            self._used += unknown
            return
        keys, slots, *_ = self._entries
        live = self._buffers.zeros("live", SEGMENT_COUNT)
        self._queue.launch(cuda_index.count_entries, self._size, keys, slots, self._size, live)
        self._used = self._queue.read(live) + unknown
        sizes = np.full(SEGMENT_COUNT, _FEWEST)
        while (small := sizes < 2 * self._used).any():
            sizes[small] *= 2
        self._rebuild(sizes)

    def _rebuild(self, sizes: Ids) -> None:
        """Move all entries to segments of these sizes.

        A group whose new place begins at or behind its old one may cover only groups behind it that move
        likewise, any other group only groups before it that do not. So those go first, the last one before
        the others, then these, the first one before the others.
        """
        groups, counts = self._bases[::_GROUP], self._group_sizes()
        room = [cuda.device_array(int(counts.max()), arena.array.dtype) for arena in self._arenas]
        self._shape(sizes)
        later, new_counts = self._bases[::_GROUP], self._group_sizes()
        order = np.arange(len(groups))
        behind = later >= groups
        for group in [*order[behind][::-1], *order[~behind]]:
            start, count, new = int(groups[group]), int(counts[group]), int(later[group])
            for array, copy in zip(self._entries, room, strict=False):
                self._queue.copy(copy[:count], array[start : start + count])
                self._queue.zero(array[new : new + int(new_counts[group])])
            entries, shape = self._entries[:3], self._entries[3:]
            self._queue.launch(cuda_index.rebuild, count, *room, *shape, count, *entries)
        self._queue.finish()  # `room` is in use until then

    def aged(
        self, step: int, least: int, segments: tuple[int, int], most: int, rows: int
    ) -> Listed:
        """`rows`: how many there are in all."""
        first = int(self._bases[segments[0]]) if segments[0] else 0
        last = self._size if segments[1] == SEGMENT_COUNT else int(self._bases[segments[1]])
        room = min(rows, last - first)
        out = [self._buffers.get(name, (room,), np.int64) for name in ("slots", "ages")]
        hashes = self._buffers.get("hashes", (room,), np.uint64)
        self._queue.launch(
            cuda_index.collect,
            last - first if room else 0,
            *self._entries[:3],
            *(first, last, step, least, most),
            *(hashes, *out, self._buffers.zeros("count", 1)),
        )
        count = self._counted()
        slots, ages = (self._queue.read(array[:count]) for array in out)
        return ids_of(self._queue.read(hashes[:count])), slots, ages

    def histogram(self, step: int, shift: int, bins: int) -> Ids:
        _, slots, stamps, *_ = self._entries
        counts = self._buffers.zeros("bins", bins)
        self._queue.launch(
            cuda_index.histogram, self._size, slots, stamps, self._size, step, shift, bins, counts
        )
        return self._queue.read(counts)

    def decay(
        self, rows: Any, stride: int, place: int, numbers: tuple[float, ...], live: int
    ) -> Ids:
        """Numbers: the factors, then `least`; live: how many rows there are."""
        keys, slots, *_ = self._entries
        hashes = self._buffers.get("hashes", (live,), np.uint64)
        self._queue.launch(
            cuda_index.decay,
            self._size if live else 0,
            *(keys, slots, self._size, rows, stride, place),
            *map(float, numbers),
            *(hashes, self._buffers.zeros("count", 1)),
        )
        return ids_of(self._queue.read(hashes[: self._counted()]))

    def restamp(self, old: int, new: int) -> None:
        self._queue.launch(cuda_index.restamp, self._size, self._entries[2], self._size, old, new)

    def unmarked(self, marks: Any, rows: int) -> tuple[Any, Any]:
        """The slots, of `rows` in all, that have a row and no mark, and its ids: on the device."""
        out = self._buffers.get("slots", (rows,), np.int64)
        ids = self._buffers.get("hashes", (rows,), np.uint64)
        count = self._buffers.zeros("count", 1)
        self._queue.launch(
            cuda_index.unmarked, self._size, *self._entries[:2], self._size, marks, out, ids, count
        )
        size = self._counted()
        return out[:size], ids[:size]

    def _counted(self) -> int:
        return int(self._queue.read(self._buffers.get("count", (1,), np.int64))[0])


def _most_entries(rows: int) -> int:
    """Return the most entries of so many rows: less than four each, and a few for each segment."""
    return 4 * rows + SEGMENT_COUNT * _FEWEST + 1
