"""The rows of a sparse table in the memory of a CUDA device."""

from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from psfleet.errors import UsageError
from psfleet.kernels import cuda_rows
from psfleet.kernels.cuda import DeviceBuffers, launch
from psfleet.kernels.hash_index import SEGMENT_COUNT
from psfleet.tables.device_index import DeviceIndex
from psfleet.tables.row_memory import EVERY, Listed, RowStore

__all__ = ["DeviceRowMemory"]

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_FEWEST_ROWS = 256
_PAGE = 1 << 20  # rows that are copied between host and device at a time


class DeviceRowMemory(RowStore):
    """See RowStore. The rows are one array, which becomes half as large again when it is full.

    Attributes:
        rows: float32 on the device, flat.
        width: Of a row.
    """

    listed_at_once = 16  # each time costs a launch of a kernel
    rows: Any
    _free: Any

    def __init__(self, width: int, max_rows: int, marks: bool) -> None:
        if not 1 <= max_rows < 2**32 - 2:
            raise UsageError(f"max_rows is {max_rows}; it must be in [1, 2**32 - 3]")
        self.views = []
        self.max_rows = max_rows
        self.width = width
        self._index = DeviceIndex()
        self._buffers = DeviceBuffers()
        self._live, self._freed, self._next = 0, 0, 1
        self._has_marks = marks
        self._slots = 0
        self._grow(1)

    # -- memory --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._live

    @property
    def bytes(self) -> int:
        """See RowMemory."""
        return self._index.bytes + self._slots * self._slot_bytes

    @property
    def device_bytes(self) -> int:
        """See RowMemory."""
        return self.bytes

    @property
    def next_slot(self) -> int:
        """See RowStore."""
        return self._next

    def free_slots(self) -> Ids:
        """See RowStore."""
        found: Ids = self._free[: self._freed].copy_to_host().astype(np.int64)
        return found

    def has_lines(self, count: int) -> bool:
        """See RowMemory."""
        return True

    def taken(self, more: int) -> int:
        """See RowMemory; both places of rows that move to a larger one."""
        return self._taken(more, max(more - self.free, 0))

    def taken_at_most(self, more: int) -> int:
        """See RowMemory."""
        return self._taken(more, more)

    def keep_ahead(self, room: int | None = None) -> None:
        """Do nothing: only an empty row is worth a thread, and a device clears them at once."""

    def reserve(self, rows: int) -> None:
        """See RowMemory."""
        self._grow(min(rows, self.max_rows) + 1)

    @property
    def _slot_bytes(self) -> int:
        return 4 * self.width + 4 + self._has_marks

    def _taken(self, more: int, slots: int) -> int:
        index = self._index.bytes_with(self._live + more)
        grown = self._grown(self._next + slots)
        moved = grown if grown > self._slots else 0
        return index + (self._slots + moved) * self._slot_bytes

    def _grown(self, slots: int) -> int:
        """How many slots there will be once so many are needed."""
        if slots <= self._slots:
            return self._slots
        return max(slots, min(self._slots * 3 // 2, self.max_rows + 1), _FEWEST_ROWS)

    def _grow(self, slots: int) -> None:
        """Have so many slots, the first one included."""
        if slots <= self._slots:
            return
        old, self._slots = self._slots, self._grown(slots)
        rows = cuda.device_array(self._slots * self.width, np.float32)
        free = cuda.device_array(self._slots, np.uint32)
        if old:
            rows[: old * self.width].copy_to_device(self.rows)
            free[:old].copy_to_device(self._free)
        self.rows, self._free = rows, free
        if self._has_marks:
            self._marks = cuda.to_device(np.zeros(self._slots, np.uint8))

    # -- ids -----------------------------------------------------------------------------------

    def send(self, ids: Ids) -> Any:
        """Ids on the device, as uint64, until the next call."""
        return self._buffers.fill("ids", np.ascontiguousarray(ids).view(np.uint64))

    def find(self, ids: Any, steps: Ids | None = None, now: int = 0) -> tuple[Any, Any]:
        """Slots and steps of the last push of ids on the device, there too. See DeviceIndex.find."""
        found = self._buffers.get("found", ids.shape, np.int64)
        touched = self._buffers.get("touched", ids.shape, np.int64)
        self._index.find(ids, now, steps, found, touched)
        return found, touched

    def unknown(self) -> int:
        """How many ids the last `find` has not found."""
        return int(self._index.unknown().sum())

    def add(self, ids: Any, steps: Ids) -> tuple[Any, Any | None]:
        """Slots of ids on the device, new ones for unknown ids; and which of them are new, if any is.

        steps: At which they are pushed: for each, or one for all.
        """
        found, _ = self.find(ids, steps)
        unknown = self._index.unknown()
        new = int(unknown.sum())
        if not new:
            return found, None
        again = min(new, self._freed)
        self._index.make_room(unknown)
        self._grow(self._next + new - again)
        fresh = self._buffers.get("fresh", ids.shape, np.uint8)
        self._index.add(ids, steps, (self._free, self._freed, self._next), found, fresh)
        self._live, self._freed = self._live + new, self._freed - again
        self._next += new - again
        return found, fresh

    def locate(self, ids: Ids) -> tuple[Ids, int]:
        """See RowMemory."""
        slots = self.find(self.send(ids))[0].copy_to_host()
        return slots, int(np.count_nonzero(slots == 0))

    def touch(self, ids: Ids, step: int) -> tuple[Ids, int]:
        """See RowMemory."""
        self.keep(ids)
        slots = self.find(self.send(ids), np.array([step]))[0].copy_to_host()
        return slots, int(np.count_nonzero(slots == 0))

    def place(self, ids: Ids, steps: Ids) -> Ids:
        """See RowMemory."""
        self.keep(ids)
        slots: Ids = self.add(self.send(ids), np.ascontiguousarray(steps))[0].copy_to_host()
        return slots

    def remove(self, ids: Ids) -> int:
        """See RowMemory."""
        self.keep(ids)
        gone = self._index.forget(self.send(ids), self._free, self._freed)
        self._live, self._freed = self._live - gone, self._freed + gone
        return gone

    def recall(self, ids: Ids, step: int) -> Listed:
        """See RowMemory."""
        found, touched = self.find(self.send(ids), now=step)
        return ids, found.copy_to_host(), touched.copy_to_host()

    def restamp(self, old: int, new: int) -> None:
        """See RowMemory."""
        self._index.restamp(old, new)

    # -- rows ----------------------------------------------------------------------------------

    def aged(
        self, step: int, least: int = 0, segments: tuple[int, int] = EVERY, most: int = 2**32
    ) -> Listed:
        """See RowMemory."""
        return self._index.aged(step, least, segments, most, self._live)

    def histogram(self, step: int, shift: int, bins: int) -> Ids:
        """See RowMemory."""
        return self._index.histogram(step, shift, bins)

    def decay(self, place: int, factors: tuple[float, float, float], least: float) -> Ids:
        """See RowMemory."""
        self.keep_segments(0, SEGMENT_COUNT)
        return self._index.decay(self.rows, self.width, place, (*factors, least), self._live)

    def others(self, slots: Any) -> Any:
        """The slots of all rows but these, on the device."""
        launch(cuda_rows.mark, len(slots), slots, len(slots), self._marks, 1)
        found = self._index.unmarked(self._marks, self._live)
        launch(cuda_rows.mark, len(slots), slots, len(slots), self._marks, 0)
        return found

    def gather(self, slots: Ids) -> Floats:
        """See RowMemory."""
        out = np.empty((len(slots), self.width), np.float32)
        for start in range(0, len(slots), _PAGE):
            part = self._buffers.fill("slots", slots[start : start + _PAGE])
            values = self._buffers.get("values", (len(part) * self.width,), np.float32)
            launch(cuda_rows.gather, len(values), self.rows, self.width, part, len(values), values)
            out[start : start + _PAGE] = values.copy_to_host().reshape(-1, self.width)
        return out

    def scatter(self, slots: Ids, rows: Floats) -> None:
        """See RowMemory."""
        self.set_first(slots, rows)

    def set_first(self, slots: Ids, values: Floats) -> None:
        """Set the first values of rows: float32 [n, at most width]."""
        for start in range(0, len(slots), _PAGE):
            part = self._buffers.fill("slots", slots[start : start + _PAGE])
            given = self._buffers.fill("values", values[start : start + _PAGE].reshape(-1))
            launch(
                cuda_rows.scatter,
                len(given),
                *(self.rows, self.width, part, len(given), values.shape[1], given),
            )
