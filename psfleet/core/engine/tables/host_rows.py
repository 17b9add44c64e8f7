"""The rows of a sparse table in host memory: index lines, rows, and the descriptor that kernels read."""

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.kernels.generate import eviction_kernels, static_kernels
from psfleet.core.engine.kernels.hash_index import (
    ADD,
    CHUNK_LINES,
    CHUNKS,
    DESCRIPTOR_SIZE,
    DIRECTORY,
    EARLY_CHUNKS,
    EARLY_PARTS,
    FEWEST_ROWS,
    FILL,
    FIRST_CHUNKS,
    FIRST_LEVEL,
    FULL,
    FULL_TO_CHANGE,
    FULL_TO_READ,
    LARGEST_DIRECTORY,
    LINES,
    LIVE,
    MARKS,
    NEXT_SLOT,
    RECORD_SIZE,
    RECORDS,
    ROWS,
    SCRATCH,
    SEGMENT_COUNT,
    SHIFT,
    STRIDE,
)
from psfleet.core.engine.kernels.initial_values import address_of
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.arena import AHEAD, Arena
from psfleet.core.engine.tables.row_memory import EVERY, ROW_BYTES, Keys, Listed, RowStore

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_FEWEST_ROWS = 1 << 16
_SPACE = 1 << 47  # bytes of address space of a process
_SHARE = 64  # the first table takes at most one in so many of those, later ones less: see _share
_CHUNK_BYTES = CHUNK_LINES * 64
_LINES = 8  # reserved for each row; a table whose hashes are not alike takes half of one
_EARLY_CHUNKS = 64  # more than a directory of 31 bits has levels
_EARLY_PARTS = 3 << 19  # as many as 2**28 rows have


class HostRowMemory(RowStore):
    """See RowStore.

    Attributes:
        address: Address of the descriptor, for kernels. Code that changes rows by it calls `keep`
            of the views first.
    """

    def __init__(
        self, width: int, max_rows: int, marks: bool, removes: bool = True, only_read: bool = False
    ) -> None:
        """Reserve memory for `max_rows` rows, or as many as there is address space for.

        `marks`: and an int64 beside each. `removes`: have the kernels for rows that go at once, and not when
        the first row goes; on an empty cache they take a quarter of the time of all kernels. `only_read`:
        rows do not change once they are there, so that the index may be fuller.
        """
        if not 1 <= max_rows < 2**32 - 2:
            raise UsageError(f"max_rows is {max_rows}; it must be in [1, 2**32 - 3]")
        self.views = []
        self._width = width
        max_rows = min(max_rows, self._most_rows(width * 4 + ROW_BYTES))
        self._marks = marks
        self.max_rows, self._arenas = _reserve(max_rows, self._most, self._rows_arena)
        self._rows, self._lines, *_ = self._arenas
        self._live = np.zeros(SEGMENT_COUNT, np.int64)
        self._scratch = np.empty(_CHUNK_BYTES, np.uint8)
        self._d = np.zeros(DESCRIPTOR_SIZE, np.int64)
        self._words = self._d.data  # gives Python's numbers, three times as fast as NumPy
        self._seen, self._expected = (0, 0, 0), 0  # slots, chunks and shift; and `more` then
        places = [ROWS, LINES, RECORDS, DIRECTORY, MARKS][: len(self._arenas)]
        self._d[places] = [arena.address for arena in self._arenas]
        self._d[[LIVE, SCRATCH]] = address_of(self._live), address_of(self._scratch)
        self._d[[NEXT_SLOT, SHIFT, STRIDE]] = 1, FIRST_LEVEL, width * 4
        self._d[FULL] = FULL_TO_READ if only_read else FULL_TO_CHANGE
        self._d[EARLY_CHUNKS] = min(self.max_rows // 4096 + 4, _EARLY_CHUNKS)
        self._d[EARLY_PARTS] = min(self.max_rows // 64, _EARLY_PARTS)
        self.address = address_of(self._d)
        self._kernels, self._freezing, *_ = map(static_kernels, index_kernels(removes))
        self._d[[ADD, FILL]] = self._kernels.add.address, self._kernels.fill.address
        self._kernels.make(self.address)

    def _rows_arena(self, size: int) -> Arena:
        """Memory for rows and their state."""
        return Arena(size)

    def _most_rows(self, row: int) -> int:
        """Return an upper bound of rows of so many bytes: twice the machine's memory."""
        memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        return max(2 * memory // row, _FEWEST_ROWS)

    @property
    def _removal(self) -> ModuleType:
        return static_kernels("index_removal")

    def __len__(self) -> int:
        return int(self._live.sum())

    @property
    @override
    def bytes(self) -> int:
        return self.taken_at_most(0)

    @property
    @override
    def next_slot(self) -> int:
        return int(self._words[NEXT_SLOT])

    @property
    @override
    def spare(self) -> int:
        return self.max_rows + 1 - int(self._words[NEXT_SLOT])

    @override
    def free_slots(self) -> Ids:
        slots = np.empty(self.free, np.int64)
        self._kernels.freed(self.address, address_of(slots))
        return slots

    @override
    def has_lines(self, count: int) -> bool:
        # At worst each of as many chunks as there may be is enlarged, and those that new ids fill again.
        rows = self._words[NEXT_SLOT] + count
        most = rows // FEWEST_ROWS + 1 + self._words[EARLY_CHUNKS]
        lines = max(self._words[CHUNKS], most) * CHUNK_LINES
        return 3 * lines + 4 * count <= self._lines.size // 64

    @override
    def taken(self, more: int) -> int:
        return self.taken_at_most(max(more - self.free, 0) if more else 0)

    @override
    def taken_at_most(self, more: int) -> int:
        sizes = zip(self._arenas, self._used(more), strict=True)
        return sum(arena.taken(size) for arena, size in sizes)

    def _used(self, more: int = 0) -> list[int]:
        """Return the bytes in use in each arena, or an upper bound once there are `more` slots."""
        slots, chunks, parts = self._words[NEXT_SLOT], self._words[CHUNKS], self._parts
        if more:
            total = slots + more
            chunks = max(chunks, FIRST_CHUNKS + total * ROW_BYTES // _CHUNK_BYTES)
            slots, parts = total, max(parts, 4 * chunks)
        return self._sizes(slots, chunks, parts)

    @property
    def _parts(self) -> int:
        """Number of parts of the directory."""
        return FIRST_CHUNKS << (FIRST_LEVEL - int(self._words[SHIFT]))

    def _most(self, rows: int) -> list[int]:
        """Return each arena's bytes for so many rows, however much alike their hashes are."""
        chunks = rows * _LINES // CHUNK_LINES + 16
        return self._sizes(rows + 1, chunks, LARGEST_DIRECTORY * chunks)

    def _sizes(self, slots: int, chunks: int, parts: int) -> list[int]:
        sizes = [slots * self._width * 4, chunks * _CHUNK_BYTES, chunks * RECORD_SIZE, parts * 4]
        return [*sizes, slots * 8] if self._marks else sizes

    def expect(self, more: int) -> None:
        """Prepare the memory for `more` unknown ids. Call it before a push; it costs next to nothing."""
        now = self._words[NEXT_SLOT], self._words[CHUNKS], self._words[SHIFT]
        if now == self._seen and more <= self._expected:
            return
        self._seen, self._expected = now, more
        for arena, size in zip(self._arenas, self._used(more), strict=True):
            arena.expect(size)

    @override
    def keep_ahead(self, room: int | None = None) -> None:
        most = AHEAD if room is None else max(room, 0) // 8
        self._rows.keep_ahead(self._words[NEXT_SLOT] * self._width * 4, most)
        self._lines.keep_ahead(self._words[CHUNKS] * _CHUNK_BYTES, most)

    @override
    def reserve(self, rows: int) -> None:
        rows = min(rows, self.max_rows)
        self._rows.populate(0, (rows + 1) * self._width * 4)
        self._lines.populate(0, rows * ROW_BYTES)

    @override
    def locate(self, ids: Ids) -> tuple[Ids, int]:
        slots = np.empty(len(ids), np.int64)
        unknown = self._kernels.locate(self.address, address_of(ids), len(ids), address_of(slots))
        return slots, int(unknown)

    @override
    def touch(self, ids: Ids, step: int) -> tuple[Ids, int]:
        self.keep(ids)
        slots = np.empty(len(ids), np.int64)
        unknown = self._kernels.touch(
            self.address, address_of(ids), len(ids), step, address_of(slots)
        )
        return slots, int(unknown)

    @override
    def place(self, ids: Ids, steps: Ids) -> Ids:
        self.keep(ids)
        self.expect(len(ids))
        slots = np.empty(len(ids), np.int64)
        self._kernels.place(
            self.address, address_of(ids), len(ids), address_of(steps), address_of(slots)
        )
        return slots

    @override
    def remove(self, ids: Ids) -> int:
        self.keep(ids)
        return int(self._removal.forget(self.address, address_of(ids), len(ids)))

    def count(self, ids: Ids, step: int, threshold: int) -> None:
        """Rows are one uint32: add 1 to each, from 0; forget ids that have reached `threshold`."""
        self.expect(len(ids))
        outcomes = np.empty(len(ids), np.int64)
        self._removal.count(
            self.address, address_of(ids), len(ids), step, threshold, address_of(outcomes)
        )

    @override
    def aged(
        self, step: int, least: int = 0, segments: tuple[int, int] = EVERY, most: int = 2**32
    ) -> Listed:
        there = int(self._live[slice(*segments)].sum())
        ids, slots, ages = (np.empty(there, np.int64) for _ in range(3))
        count = self._kernels.collect(
            self.address, *segments, step, least, most, *map(address_of, (ids, slots, ages))
        )
        return ids[:count], slots[:count], ages[:count]

    @override
    def histogram(self, step: int, shift: int, bins: int) -> Ids:
        counts = np.zeros(bins, np.int64)
        self._removal.histogram(self.address, step, shift, bins, address_of(counts))
        return counts

    @override
    def decay(self, place: int, factors: tuple[float, float, float], least: float) -> Ids:
        self.keep_segments(0, SEGMENT_COUNT)
        ids = np.empty(len(self), np.int64)
        count = self._removal.decay(self.address, place, *factors, least, address_of(ids))
        return ids[:count]

    @override
    def restamp(self, old: int, new: int) -> None:
        self._kernels.restamp(self.address, old, new)

    @override
    def recall(self, ids: Ids, step: int) -> Listed:
        slots, steps = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        self._freezing.recall(
            self.address, address_of(ids), len(ids), step, address_of(slots), address_of(steps)
        )
        return ids, slots, steps

    def scores(self, spec: TableSpec, place: int) -> "HostScores":
        """Return the scores of these rows; `place`: their offset within a stored row.

        Raises:
            RuleError: The compiler does not take the policy's score function.
        """
        return HostScores(spec, self, place)

    @override
    def gather(self, slots: NDArray[np.int64]) -> Floats:
        out = np.empty((len(slots), self._width), np.float32)
        self._kernels.gather(
            self.address, address_of(slots), len(slots), self._width, address_of(out)
        )
        return out

    @override
    def scatter(self, slots: NDArray[np.int64], rows: Floats) -> None:
        self._kernels.scatter(
            self.address, address_of(slots), len(slots), self._width, address_of(rows)
        )


def index_kernels(removes: bool) -> Sequence[str]:
    """Names of the static kernels that an index loads when it is made."""
    return ("index", "freezing", "index_removal") if removes else ("index", "freezing")


def _reserve(
    rows: int, sizes: Callable[[int], list[int]], make_first: Callable[[int], Arena]
) -> tuple[int, list[Arena]]:
    """Arenas of `sizes(rows)` bytes, of which the first is made otherwise.

    For fewer rows where that is too much of the address space that is left, and for half, and again, where
    they cannot be had.
    """
    rows = min(rows, max(rows * _share(_space_left()) // sum(sizes(rows)), _FEWEST_ROWS))
    while True:
        try:
            first, *others = sizes(rows)
            return rows, [make_first(first), *map(Arena, others)]
        except UsageError:
            if rows < 2 * _FEWEST_ROWS:
                raise
            rows //= 2


def _share(space: int) -> int:
    """The most bytes for a table where so many are left.

    After n tables that take all they may, one in _SHARE + n is left for each: thousands fit.
    """
    return space * space // ((_SHARE - 1) * _SPACE + space)


def _space_left() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(_SPACE - pages * mmap.PAGESIZE, 0)


class HostScores:
    """The scores of the rows of a table, by its eviction policy."""

    def __init__(self, spec: TableSpec, index: HostRowMemory, place: int) -> None:
        self._index = index
        self._place = place
        self._kernels = eviction_kernels(spec.policy, spec.pushed_scores)
        self._scratch = np.zeros(1, np.int64)

    def keys(self, step: int, least: int, most: int) -> Keys:
        """The keys up to `most` of rows at least `least` old."""
        keys = np.empty(len(self._index), np.uint64)
        return keys[: self._rank(step, least, most, keys)]

    def listed(self, step: int, least: int, most: int, count: int) -> tuple[Ids, Keys]:
        """Ids and keys of these rows, of which there are `count`."""
        ids, keys = np.empty(count, np.int64), np.empty(count, np.uint64)
        if count:
            self._rank(step, least, most, keys, ids)
        return ids, keys

    def use(self, ids: Ids, step: int) -> None:
        """The update of this step names these ids; those that have a row count as pushed at it."""
        self._index.keep(ids)
        slots, ages = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        self._kernels.use(
            self._index.address,
            address_of(ids),
            len(ids),
            step,
            self._place,
            address_of(slots),
            address_of(ages),
        )

    def _rank(self, step: int, least: int, most: int, keys: Keys, ids: Ids | None = None) -> int:
        """Write the keys of these rows to `keys`, and their ids to `ids`; returns how many there are."""
        count: int = self._kernels.rank(
            self._index.address,
            self._place,
            step,
            least,
            most,
            address_of(self._scratch),
            0 if ids is None else address_of(ids),
            address_of(keys),
        )
        return count
