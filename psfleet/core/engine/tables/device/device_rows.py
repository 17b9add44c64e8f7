"""DeviceRowMemory: the rows of a sparse table in the memory of a CUDA device.

Methods of the interface RowMemory take and return host arrays, so that snapshots, evictions and restores work
as with host memory. Pulls and pushes (device_updates.py) use `send`, `find`, `add` and `others` instead,
which leave ids and slots on the device, so that only ids and values are copied.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.kernels.device.cuda import table_kernels
from psfleet.core.engine.kernels.device.cuda_queue import DeviceBuffers, DeviceQueue
from psfleet.core.engine.kernels.hash_index import SEGMENT_COUNT
from psfleet.core.engine.tables.device.device_index import DeviceIndex
from psfleet.core.engine.tables.device.device_memory import DeviceArena
from psfleet.core.engine.tables.row_memory import EVERY, Listed, RowStore

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_FEWEST_ROWS = 256
_STEP = (
    16  # the rows grow by at least 1/16, because each new segment costs several calls of the driver
)
_PAGE = 1 << 20  # rows that are copied between host and device at a time

cuda_rows = table_kernels("cuda_rows")


class DeviceRowMemory(RowStore):
    """Rows and index of one table on the device. Rows do not move while the table grows.

        slot     0        | 1 ... next_slot - 1          | next_slot ... _slots - 1
                 unused   | rows, and freed slots among  | mapped memory, never used
                          | them, listed in _freed_slots |

    Args:
        width: Number of float32 values in a stored row, including optimizer state.
        max_rows: Largest number of rows.
        marks: True for an optimizer that updates every row with each push, such as Adam with
            sparse_mode="full". A byte per slot is then reserved to mark pushed rows, so that `others` can
            find the rest.

    Attributes:
        width: The argument `width`.
        queue: Queue of the table's work on the device.
    """

    listed_at_once = 16  # each list costs the launch of a kernel

    def __init__(self, width: int, max_rows: int, marks: bool) -> None:
        if not 1 <= max_rows < 2**32 - 2:
            raise UsageError(f"max_rows is {max_rows}; it must be in [1, 2**32 - 3]")
        self.views = []
        self.max_rows = max_rows
        self.width = width
        self.queue = DeviceQueue()
        self._index = DeviceIndex(max_rows, self.queue)
        self._buffers = DeviceBuffers(self.queue)
        self._live, self._freed, self._next = 0, 0, 1
        self._slots = 0
        self._rows = DeviceArena((max_rows + 1) * width, np.float32)
        self._freed_slots = DeviceArena(max_rows + 1, np.uint32)
        self._marks = DeviceArena(max_rows + 1, np.uint8) if marks else None
        self._grow(1)

    def __len__(self) -> int:
        return self._live

    @property
    @override
    def bytes(self) -> int:
        return self._index.bytes + self._bytes_of_slots(self._slots)

    @property
    @override
    def device_bytes(self) -> int:
        return self.bytes

    @property
    def rows(self) -> Any:
        """Values of the rows on the device, ordered by position: float32 [slots * width], flat."""
        return self._rows.array

    @property
    @override
    def next_slot(self) -> int:
        return self._next

    @override
    def free_slots(self) -> Ids:
        return self.queue.read(self._freed_slots.array[: self._freed]).astype(np.int64)

    @override
    def has_lines(self, count: int) -> bool:
        return True

    @override
    def bytes_with(self, more: int) -> int:
        return self._bytes_with(more, max(more - self.free, 0))

    @override
    def most_bytes_with(self, more: int) -> int:
        return self._bytes_with(more, more)

    @override
    def keep_ahead(self, available: int | None = None) -> None:
        """Do nothing: a device zeroes memory quickly, so that allocating in advance gains nothing."""

    @override
    def reserve(self, rows: int) -> None:
        self._grow(rows + 1)

    def _bytes_with(self, new_rows: int, slots: int) -> int:
        if not new_rows:
            return self.bytes
        index = self._index.bytes_with(self._live + new_rows)
        return index + self._bytes_of_slots(self._grown(self._next + slots))

    def _bytes_of_slots(self, slots: int) -> int:
        marks = 0 if self._marks is None else self._marks.bytes_of(slots)
        return self._rows.bytes_of(slots * self.width) + self._freed_slots.bytes_of(slots) + marks

    def _grown(self, slots: int) -> int:
        """Return the number of row positions (slots) after growth to at least `slots`."""
        if slots <= self._slots:
            return self._slots
        larger = max(self._slots + self._slots // _STEP, _FEWEST_ROWS)
        return max(slots, min(larger, self.max_rows + 1))

    def _grow(self, slots: int) -> None:
        """Map memory for at least `slots` row positions, including position 0, which is never used."""
        if slots > self._slots:
            size = self._grown(slots)
            self._rows.grow(size * self.width)
            self._freed_slots.grow(size)
            if self._marks is not None:
                self._marks.grow(size)
            self._slots = size

    def send(self, ids: Ids) -> Any:
        """Copy ids to the device as uint64. The copy is valid until the next call.

        Ids that are on the device already are returned unchanged.
        """
        if not isinstance(ids, np.ndarray):
            return ids
        return self._buffers.fill("ids", np.ascontiguousarray(ids).view(np.uint64))

    def find(self, ids: Any, steps: Ids | None = None, now: int = 0) -> tuple[Any, Any]:
        """Return slots (positions) and steps of the last push: int64 [n] on the device, 0 if unknown.

        Args:
            ids: uint64 [n] on the device.
            steps: New steps of the last push, [n] or [1], or None to leave them as they are.
            now: Present step of the table.
        """
        slots = self._buffers.get("found", ids.shape, np.int64)
        last_steps = self._buffers.get("touched", ids.shape, np.int64)
        self._index.find(ids, now, steps, slots, last_steps)
        return slots, last_steps

    def unknown(self) -> int:
        """Return the number of ids that the last `find` did not find."""
        return int(self._index.unknown().sum())

    def add(self, ids: Any, steps: Ids) -> tuple[Any, Any | None]:
        """Return the row positions (slots) of ids, after adding new ids, and a mask of the new ids.

        Both results are on the device: int64 [n] and uint8 [n]. The mask is None if no id is new.

        Args:
            ids: uint64 [n] on the device.
            steps: Steps of the push: [n], or [1] for all ids.
        """
        # One kernel finds ids and counts the unknown ones. The host has to read the counts, to enlarge the
        # index or the rows if necessary, before a second kernel can add ids.
        slots, _ = self.find(ids, steps)
        unknown = self._index.unknown()
        new = int(unknown.sum())
        if not new:
            return slots, None
        reused = min(new, self._freed)  # slots of removed rows are given out first
        self._index.make_room(unknown)
        self._grow(self._next + new - reused)
        fresh = self._buffers.get("fresh", ids.shape, np.uint8)
        free = self._freed_slots.array, self._freed, self._next
        self._index.add(ids, steps, free, slots, fresh)
        self._live, self._freed = self._live + new, self._freed - reused
        self._next += new - reused
        return slots, fresh

    @override
    def locate(self, ids: Ids) -> tuple[Ids, int]:
        slots = self.queue.read(self.find(self.send(ids))[0])
        return slots, int(np.count_nonzero(slots == 0))

    @override
    def touch(self, ids: Ids, step: int) -> tuple[Ids, int]:
        self.keep(ids)
        slots = self.queue.read(self.find(self.send(ids), np.array([step]))[0])
        return slots, int(np.count_nonzero(slots == 0))

    @override
    def find_or_add(self, ids: Ids, steps: Ids) -> Ids:
        self.keep(ids)
        return self.queue.read(self.add(self.send(ids), np.ascontiguousarray(steps))[0])

    @override
    def remove(self, ids: Ids) -> int:
        self.keep(ids)
        count = self._index.forget(self.send(ids), self._freed_slots.array, self._freed)
        self._live, self._freed = self._live - count, self._freed + count
        return count

    @override
    def recall(self, ids: Ids, step: int) -> Listed:
        slots, last_steps = self.find(self.send(ids), now=step)
        return ids, self.queue.read(slots), self.queue.read(last_steps)

    @override
    def restamp(self, old: int, new: int) -> None:
        self._index.restamp(old, new)

    @override
    def aged(
        self, step: int, least: int = 0, segments: tuple[int, int] = EVERY, most: int = 2**32
    ) -> Listed:
        return self._index.aged(step, least, segments, most, self._live)

    @override
    def histogram(self, step: int, shift: int, bins: int) -> Ids:
        return self._index.histogram(step, shift, bins)

    @override
    def decay(self, place: int, factors: tuple[float, float, float], least: float) -> Ids:
        self.keep_segments(0, SEGMENT_COUNT)
        return self._index.decay(self.rows, self.width, place, (*factors, least), self._live)

    def others(self, slots: Any) -> tuple[Any, Any]:
        """Return positions (slots) and ids of all rows except those in `slots`; all arrays are on the device.

        Marks the given rows, collects the rows without a mark, and clears the marks again.
        """
        assert self._marks is not None
        # Clear the marks by the same list of slots. So marks are 0 between calls, without a pass over all
        # slots.
        marks = self._marks.array
        self.queue.launch(cuda_rows.mark, len(slots), slots, len(slots), marks, 1)
        rows = self._index.unmarked(marks, self._live)
        self.queue.launch(cuda_rows.mark, len(slots), slots, len(slots), marks, 0)
        return rows

    @override
    def gather(self, slots: Ids) -> Floats:
        out = np.empty((len(slots), self.width), np.float32)
        for start in range(0, len(slots), _PAGE):
            part = self._buffers.fill("slots", slots[start : start + _PAGE])
            values = self._buffers.get("values", (len(part) * self.width,), np.float32)
            self.queue.launch(
                cuda_rows.gather, len(values), self.rows, self.width, part, len(values), values
            )
            self.queue.read_into(values, out[start : start + _PAGE])
        return out

    @override
    def scatter(self, slots: Ids, rows: Floats) -> None:
        self.set_first(slots, rows)

    def set_first(self, slots: Ids, values: Floats) -> None:
        """Overwrite the first k values of rows with float32 [n, k], with k up to `width`."""
        for start in range(0, len(slots), _PAGE):
            part = self._buffers.fill("slots", slots[start : start + _PAGE])
            rows = self._buffers.fill("values", values[start : start + _PAGE].reshape(-1))
            self.queue.launch(
                cuda_rows.scatter,
                len(rows),
                *(self.rows, self.width, part, len(rows), values.shape[1], rows),
            )
