"""The rows of a sparse table in the memory of a CUDA device."""

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import UsageError
from psfleet.kernels.cuda import table_kernels
from psfleet.kernels.cuda_queue import DeviceBuffers, DeviceQueue
from psfleet.kernels.hash_index import SEGMENT_COUNT
from psfleet.schema.table import TableSpec
from psfleet.tables.device_arena import DeviceArena
from psfleet.tables.device_index import DeviceIndex
from psfleet.tables.row_memory import EVERY, Listed, RowStore, StoreScores

__all__ = ["DeviceRowMemory"]

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_FEWEST_ROWS = 256
_STEP = 16  # rows become more by one in so many at least: a segment costs calls of the driver
_PAGE = 1 << 20  # rows that are copied between host and device at a time

cuda_rows = table_kernels("cuda_rows")


class DeviceRowMemory(RowStore):
    """See RowStore. A row stays where it is while there become more.

    Attributes:
        width: Of a row.
        queue: Of the table's work.
    """

    listed_at_once = 16  # each time costs a launch of a kernel

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

    # -- memory --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._live

    @property
    def bytes(self) -> int:
        """See RowMemory."""
        return self._index.bytes + self._bytes_of_slots(self._slots)

    @property
    def device_bytes(self) -> int:
        """See RowMemory."""
        return self.bytes

    @property
    def rows(self) -> Any:
        """All of them: float32 on the device, flat."""
        return self._rows.array

    @property
    def next_slot(self) -> int:
        """See RowStore."""
        return self._next

    def free_slots(self) -> Ids:
        """See RowStore."""
        return self.queue.read(self._freed_slots.array[: self._freed]).astype(np.int64)

    def has_lines(self, count: int) -> bool:
        """See RowMemory."""
        return True

    def taken(self, more: int) -> int:
        """See RowMemory."""
        return self._taken(more, max(more - self.free, 0))

    def taken_at_most(self, more: int) -> int:
        """See RowMemory."""
        return self._taken(more, more)

    def keep_ahead(self, room: int | None = None) -> None:
        """Do nothing: only an empty row is worth a thread, and a device clears them at once."""

    def reserve(self, rows: int) -> None:
        """See RowMemory."""
        self._grow(min(rows, self.max_rows) + 1)

    def _taken(self, more: int, slots: int) -> int:
        if not more:
            return self.bytes
        index = self._index.bytes_with(self._live + more)
        return index + self._bytes_of_slots(self._grown(self._next + slots))

    def _bytes_of_slots(self, slots: int) -> int:
        marks = 0 if self._marks is None else self._marks.taken(slots)
        return self._rows.taken(slots * self.width) + self._freed_slots.taken(slots) + marks

    def _grown(self, slots: int) -> int:
        """How many slots there will be once so many are needed."""
        if slots <= self._slots:
            return self._slots
        larger = max(self._slots + self._slots // _STEP, _FEWEST_ROWS)
        return max(slots, min(larger, self.max_rows + 1))

    def _grow(self, slots: int) -> None:
        """Have so many slots, the first one included."""
        if slots > self._slots:
            grown = self._grown(slots)
            self._rows.grow(grown * self.width)
            self._freed_slots.grow(grown)
            if self._marks is not None:
                self._marks.grow(grown)
            self._slots = grown

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
        free = self._freed_slots.array, self._freed, self._next
        self._index.add(ids, steps, free, found, fresh)
        self._live, self._freed = self._live + new, self._freed - again
        self._next += new - again
        return found, fresh

    def locate(self, ids: Ids) -> tuple[Ids, int]:
        """See RowMemory."""
        slots = self.queue.read(self.find(self.send(ids))[0])
        return slots, int(np.count_nonzero(slots == 0))

    def touch(self, ids: Ids, step: int) -> tuple[Ids, int]:
        """See RowMemory."""
        self.keep(ids)
        slots = self.queue.read(self.find(self.send(ids), np.array([step]))[0])
        return slots, int(np.count_nonzero(slots == 0))

    def place(self, ids: Ids, steps: Ids) -> Ids:
        """See RowMemory."""
        self.keep(ids)
        return self.queue.read(self.add(self.send(ids), np.ascontiguousarray(steps))[0])

    def remove(self, ids: Ids) -> int:
        """See RowMemory."""
        self.keep(ids)
        gone = self._index.forget(self.send(ids), self._freed_slots.array, self._freed)
        self._live, self._freed = self._live - gone, self._freed + gone
        return gone

    def recall(self, ids: Ids, step: int) -> Listed:
        """See RowMemory."""
        found, touched = self.find(self.send(ids), now=step)
        return ids, self.queue.read(found), self.queue.read(touched)

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

    def scores(self, spec: TableSpec, place: int) -> StoreScores:
        """See RowStore."""
        from psfleet.tables.device_scores import DeviceScores

        return DeviceScores(spec, self, place)

    def rank(
        self, kernels: ModuleType, place: int, step: int, least: int, most: int
    ) -> tuple[Any, Any]:
        """Hashes and keys, up to `most`, of the rows at least `least` old; on the device.

        place: Where scores begin in a row.
        """
        rows = self.rows, self.width, place
        return self._index.rank(kernels, rows, (step, least, np.uint64(most)), self._live)

    def use(self, kernels: ModuleType, place: int, ids: Ids, step: int) -> None:
        """The update of this step names these ids, no id twice; those that have a row count it."""
        self.keep(ids)
        self._index.use(kernels, (self.rows, self.width, place), self.send(ids), step)

    def others(self, slots: Any) -> tuple[Any, Any]:
        """The slots of all rows but these, and their ids, on the device."""
        assert self._marks is not None
        marks = self._marks.array
        self.queue.launch(cuda_rows.mark, len(slots), slots, len(slots), marks, 1)
        found = self._index.unmarked(marks, self._live)
        self.queue.launch(cuda_rows.mark, len(slots), slots, len(slots), marks, 0)
        return found

    def gather(self, slots: Ids) -> Floats:
        """See RowMemory."""
        out = np.empty((len(slots), self.width), np.float32)
        for start in range(0, len(slots), _PAGE):
            part = self._buffers.fill("slots", slots[start : start + _PAGE])
            values = self._buffers.get("values", (len(part) * self.width,), np.float32)
            self.queue.launch(
                cuda_rows.gather, len(values), self.rows, self.width, part, len(values), values
            )
            self.queue.read_into(values, out[start : start + _PAGE])
        return out

    def scatter(self, slots: Ids, rows: Floats) -> None:
        """See RowMemory."""
        self.set_first(slots, rows)

    def set_first(self, slots: Ids, values: Floats) -> None:
        """Set the first values of rows: float32 [n, at most width]."""
        for start in range(0, len(slots), _PAGE):
            part = self._buffers.fill("slots", slots[start : start + _PAGE])
            given = self._buffers.fill("values", values[start : start + _PAGE].reshape(-1))
            self.queue.launch(
                cuda_rows.scatter,
                len(given),
                *(self.rows, self.width, part, len(given), values.shape[1], given),
            )
