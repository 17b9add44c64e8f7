"""Hash index of a sparse table on a CUDA device: finds the slot of each id, adds ids and removes them.

A *slot* is the position of a row, and a *stamp* the step of its last push. The index is divided into
segments by the ids' hashes. The host stores only the sizes of the segments and decides when they are rebuilt;
kernels do the rest. psfleet.core.engine.kernels.device.cuda_index explains the entries of the index.
DeviceRowMemory owns an index; the table holds its lock during each call.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.device.cuda import table_kernels
from psfleet.core.engine.kernels.device.cuda_launch import empty, to_device
from psfleet.core.engine.kernels.device.cuda_queue import DeviceBuffers, DeviceQueue
from psfleet.core.engine.kernels.hash_index import SEGMENT_COUNT
from psfleet.core.engine.kernels.hashing import ids_of
from psfleet.core.engine.tables.device.device_memory import DeviceArena
from psfleet.core.engine.tables.row_memory import Listed

Ids = NDArray[np.int64]
FreeSlots = tuple[Any, int, int]
"""Slots of removed rows (a device array), the number of these slots, and the first slot never used."""

_FEWEST = 4  # entries of a new segment
_GROUP = 16  # segments that are rebuilt together, so that only they need a copy
_ENTRY_BYTES = 16

cuda_index = table_kernels("cuda_index")


class DeviceIndex:
    """Hash index of a table's rows in three arrays on the device. Not thread-safe.

    Each entry has the hash of an id, the id's slot (row position), and a stamp (the step of the last push). A
    segment is the range of entries for the ids with the same top byte of the hash. It is filled to three
    quarters at most. When an update would fill a segment further, all segments are rebuilt with at least
    twice as many entries as rows, so that each row moves only a few times while the table grows. The rebuild
    works in place, a group of segments at a time, and needs extra memory for one group only.

    Args:
        max_rows: Largest number of rows in the index.
        queue: Queue of the table's work on the device.
    """

    def __init__(self, max_rows: int, queue: DeviceQueue) -> None:
        self._queue = queue
        self._buffers = DeviceBuffers(queue)
        # Entries in use in each segment, removed rows included: an entry keeps its hash until a rebuild.
        self._used = np.zeros(SEGMENT_COUNT, np.int64)
        max_entries = _most_entries(max_rows)
        self._arenas = [
            DeviceArena(max_entries, dtype) for dtype in (np.uint64, np.uint32, np.uint32)
        ]
        self._shape(np.full(SEGMENT_COUNT, _FEWEST))

    @property
    def bytes(self) -> int:
        """Device memory of the index, in bytes."""
        return sum(arena.bytes for arena in self._arenas)

    def bytes_with(self, rows: int) -> int:
        """Return an upper bound of the bytes for `rows` rows, including the copy made while rebuilding."""
        size = sum(arena.bytes_of(_most_entries(rows)) for arena in self._arenas)
        return size + _ENTRY_BYTES * int(self._group_sizes().max())

    def _shape(self, sizes: Ids) -> None:
        """Lay out the index with segments (ranges) of these sizes; enlarges the arrays if necessary."""
        ends = 1 + np.cumsum(sizes)  # entry 0 is that of the id whose hash is 0
        for arena in self._arenas:
            arena.grow(int(ends[-1]))
        self._sizes, self._bases, self._size = sizes, ends - sizes, int(ends[-1])
        self._entries = (
            *(arena.array for arena in self._arenas),
            to_device(self._bases),
            to_device((sizes - 1).astype(np.uint64)),
        )

    def _group_sizes(self) -> Ids:
        """Return the number of index entries in each group of segments."""
        return np.add.reduceat(self._sizes, np.arange(0, SEGMENT_COUNT, _GROUP))

    def find(self, ids: Any, now: int, steps: Ids | None, slots: Any, last_steps: Any) -> None:
        """Write each id's slot (row position) and step of the last push to device arrays; 0 if it has no row.

        Args:
            ids: uint64 [n] on the device.
            now: Present step of the table. The kernel needs it to turn stored 32-bit steps into full steps.
            steps: New steps of the last push: int64 [n], or [1] for all ids. None leaves them as they are.
            slots, last_steps: Results: int64 [n] on the device.
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
        """Return the steps as arguments of a kernel: one step for all ids, an array of steps, and a flag.

        The flag is 1 if the kernel is to use the array, or 0 if it is to use the single step.
        """
        if steps is None or len(steps) == 1:  # a scalar argument saves the copy of an array
            return (
                0 if steps is None else int(steps[0]),
                self._buffers.get("none", (1,), np.int64),
                0,
            )
        return 0, self._buffers.fill("steps", steps), 1

    def unknown(self) -> Ids:
        """Return the number of ids that the last `find` did not find, per segment: int64 [SEGMENT_COUNT].

        A segment is a class of ids, chosen by their hash.
        """
        return self._queue.read(self._buffers.get("new", (SEGMENT_COUNT,), np.int64))

    def add(self, ids: Any, steps: Ids, slots: FreeSlots, row_slots: Any, fresh: Any) -> None:
        """Give a slot (row position) to each id that the last `find` did not find. Call `make_room` first.

        Args:
            ids: uint64 [n] on the device, the same as in `find`.
            steps: Steps of the push: int64 [n], or [1] for all ids.
            slots: Slots to use: first those of removed rows, then new ones.
            row_slots: Slots that `find` has written, int64 [n] on the device; those of new ids are filled in.
            fresh: uint8 [n] on the device; becomes 1 for new ids, else 0.
        """
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
        """Remove ids and append their slots (row positions) to `free`; return how many ids had a row.

        Args:
            ids: uint64 [n] on the device.
            free: List of free slots on the device.
            free_count: Length of the list before the call.
        """
        count = self._buffers.zeros("count", 1)
        self._queue.launch(
            cuda_index.forget, len(ids), *self._entries, ids, len(ids), free, free_count, count
        )
        return self._counted()

    def make_room(self, unknown: Ids) -> None:
        """Enlarge segments (ranges of the index) that have too few free entries for new ids.

        Args:
            unknown: Number of new ids in each segment: int64 [SEGMENT_COUNT].
        """
        if (4 * (self._used + unknown) <= 3 * self._sizes).all():
            self._used += unknown
            return
        # A rebuild drops the entries of removed rows, so the new sizes follow from the live entries alone.
        keys, slots, *_ = self._entries
        live = self._buffers.zeros("live", SEGMENT_COUNT)
        self._queue.launch(cuda_index.count_entries, self._size, keys, slots, self._size, live)
        self._used = self._queue.read(live) + unknown
        sizes = np.full(SEGMENT_COUNT, _FEWEST)
        while (small := sizes < 2 * self._used).any():
            sizes[small] *= 2
        self._rebuild(sizes)

    def _rebuild(self, sizes: Ids) -> None:
        """Move all entries to segments of these sizes, one group at a time.

        The new range of a group may overlap old ranges of groups that have not moved yet, so the order
        matters. A group that moves up (to a higher or the same start) overlaps only later groups, which also
        move up; a group that moves down overlaps only earlier groups, which also move down:

            old   | A     | B     | C   |
            new   | A         | B         | C      |     C, then B, then A

        So groups that move up go first, from the last to the first, then those that move down, from the
        first to the last. Each group is copied aside before its new range is cleared and filled.
        """
        groups, counts = self._bases[::_GROUP], self._group_sizes()
        copies = [empty(int(counts.max()), arena.array.dtype) for arena in self._arenas]
        self._shape(sizes)
        later, new_counts = self._bases[::_GROUP], self._group_sizes()
        order = np.arange(len(groups))
        behind = later >= groups
        for group in [*order[behind][::-1], *order[~behind]]:
            start, count, new = int(groups[group]), int(counts[group]), int(later[group])
            for array, copy in zip(self._entries, copies, strict=False):
                self._queue.copy(copy[:count], array[start : start + count])
                self._queue.zero(array[new : new + int(new_counts[group])])
            entries, shape = self._entries[:3], self._entries[3:]
            self._queue.launch(cuda_index.rebuild, count, *copies, *shape, count, *entries)
        self._queue.finish()  # kernels read `copies`, whose memory is freed when this returns

    def aged(
        self, step: int, least: int, segments: tuple[int, int], most: int, rows: int
    ) -> Listed:
        """Return the same as RowMemory.aged; `rows` is the number of all rows."""
        first = int(self._bases[segments[0]]) if segments[0] else 0
        last = self._size if segments[1] == SEGMENT_COUNT else int(self._bases[segments[1]])
        capacity = min(rows, last - first)
        out = [self._buffers.get(name, (capacity,), np.int64) for name in ("slots", "ages")]
        hashes = self._buffers.get("hashes", (capacity,), np.uint64)
        self._queue.launch(
            cuda_index.collect,
            last - first if capacity else 0,
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
        """Decay the shows and clicks of every row, as RowMemory.decay does.

        Args:
            rows: Rows of the table: float32 on the device, flat.
            stride: Number of float32 values in a row.
            place: Position of the shows within a row.
            numbers: The three factors of RowMemory.decay, then the smallest score of a row that may stay.
            live: Number of rows.
        """
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
        """Return positions (slots) and ids of the rows without a mark, both on the device.

        Args:
            marks: uint8 on the device, one for each slot.
            rows: Number of rows of the table, an upper bound of the result's length.
        """
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
    """Return an upper bound of the index entries for `rows` rows: under 4 per row, 4 per segment, and 1."""
    return 4 * rows + SEGMENT_COUNT * _FEWEST + 1
