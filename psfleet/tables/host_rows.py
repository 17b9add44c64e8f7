"""The rows of a sparse table in host memory: index lines, rows, and the descriptor that kernels read."""

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import UsageError
from psfleet.kernels.generate import static_kernels
from psfleet.kernels.hash_index import (
    CHUNK_LINES,
    CHUNKS,
    DESCRIPTOR_SIZE,
    DIRECTORY,
    FEWEST_ROWS,
    FIRST_CHUNKS,
    FIRST_LEVEL,
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
from psfleet.kernels.initial_values import address_of
from psfleet.schema.table import TableSpec
from psfleet.tables.arena import AHEAD, Arena
from psfleet.tables.row_memory import EVERY, ROW_BYTES, Listed, RowStore, RowView, StoreScores

__all__ = ["HostRowMemory", "index_kernels"]

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_FEWEST_ROWS = 1 << 16
_SPACE = 1 << 47  # bytes of address space of a process
_SHARE = 64  # a table takes at most one in so many of those that are left: there may be hundreds
_CHUNK_BYTES = CHUNK_LINES * 64
_LINES = 8  # reserved for each row; a table whose hashes are not alike takes half of one


class HostRowMemory(RowStore):
    """See RowStore.

    Attributes:
        address: Of the descriptor, for kernels. Whoever changes rows by it tells the views with `keep`.
    """

    def __init__(self, width: int, max_rows: int, marks: bool, removes: bool = True) -> None:
        """Reserve memory for `max_rows` rows, or as many as there is address space for.

        `marks`: and an int64 beside each. `removes`: have the kernels for rows that go at once, and not when
        the first row goes; on an empty cache they take a quarter of the time of all kernels.
        """
        if not 1 <= max_rows < 2**32 - 2:
            raise UsageError(f"max_rows is {max_rows}; it must be in [1, 2**32 - 3]")
        self.views: list[RowView] = []
        self._width = width
        max_rows = min(max_rows, _most_rows(width * 4 + ROW_BYTES))
        self._marks = marks
        self.max_rows, self._arenas = _reserve(max_rows, self._most)
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
        self.address = address_of(self._d)
        self._kernels, self._freezing, *_ = map(static_kernels, index_kernels(removes))
        self._kernels.make(self.address)

    @property
    def _removal(self) -> ModuleType:
        return static_kernels("index_removal")

    def __len__(self) -> int:
        return int(self._live.sum())

    @property
    def bytes(self) -> int:
        """See RowMemory."""
        return self.taken_at_most(0)

    @property
    def next_slot(self) -> int:
        """See RowStore."""
        return int(self._words[NEXT_SLOT])

    def free_slots(self) -> Ids:
        """See RowStore."""
        slots = np.empty(self.free, np.int64)
        self._kernels.freed(self.address, address_of(slots))
        return slots

    def has_lines(self, count: int) -> bool:
        """See RowMemory."""
        # At worst each of as many chunks as there may be is enlarged, and those that new ids fill again.
        rows = self._words[NEXT_SLOT] + count
        lines = max(self._words[CHUNKS], rows // FEWEST_ROWS + 1) * CHUNK_LINES
        return 3 * lines + 4 * count <= self._lines.size // 64

    def taken(self, more: int) -> int:
        """See RowMemory."""
        return self.taken_at_most(max(more - self.free, 0) if more else 0)

    def taken_at_most(self, more: int) -> int:
        """See RowMemory."""
        used = zip(self._arenas, self._used(more), strict=True)
        return sum(arena.taken(size) for arena, size in used)

    def _used(self, more: int = 0) -> list[int]:
        """Of each arena the bytes in use, or at most so many once there are `more` slots."""
        slots, chunks, parts = self._words[NEXT_SLOT], self._words[CHUNKS], self._parts
        if more:
            grown = slots + more
            chunks = max(chunks, FIRST_CHUNKS + grown * ROW_BYTES // _CHUNK_BYTES)
            slots, parts = grown, max(parts, 4 * chunks)
        return self._sizes(slots, chunks, parts)

    @property
    def _parts(self) -> int:
        """Of the directory."""
        return FIRST_CHUNKS << (FIRST_LEVEL - int(self._words[SHIFT]))

    def _most(self, rows: int) -> list[int]:
        """Of each arena the bytes for so many rows, however much alike their hashes are."""
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

    def keep_ahead(self, room: int | None = None) -> None:
        """See RowMemory."""
        most = AHEAD if room is None else max(room, 0) // 8
        self._rows.keep_ahead(self._words[NEXT_SLOT] * self._width * 4, most)
        self._lines.keep_ahead(self._words[CHUNKS] * _CHUNK_BYTES, most)

    def reserve(self, rows: int) -> None:
        """See RowMemory."""
        rows = min(rows, self.max_rows)
        self._rows.populate(0, (rows + 1) * self._width * 4)
        self._lines.populate(0, rows * ROW_BYTES)

    def locate(self, ids: Ids) -> tuple[Ids, int]:
        """See RowMemory."""
        slots = np.empty(len(ids), np.int64)
        unknown = self._kernels.locate(self.address, address_of(ids), len(ids), address_of(slots))
        return slots, int(unknown)

    def touch(self, ids: Ids, step: int) -> tuple[Ids, int]:
        """See RowMemory."""
        self.keep(ids)
        slots = np.empty(len(ids), np.int64)
        unknown = self._kernels.touch(
            self.address, address_of(ids), len(ids), step, address_of(slots)
        )
        return slots, int(unknown)

    def place(self, ids: Ids, steps: Ids) -> Ids:
        """See RowMemory."""
        self.keep(ids)
        self.expect(len(ids))
        slots = np.empty(len(ids), np.int64)
        self._kernels.place(
            self.address, address_of(ids), len(ids), address_of(steps), address_of(slots)
        )
        return slots

    def remove(self, ids: Ids) -> int:
        """See RowMemory."""
        self.keep(ids)
        return int(self._removal.forget(self.address, address_of(ids), len(ids)))

    def count(self, ids: Ids, step: int, needed: int) -> None:
        """Rows are one uint32: add 1 to each, from 0; forget ids that have reached `needed`."""
        self.expect(len(ids))
        passed = np.empty(len(ids), np.int64)
        self._removal.count(
            self.address, address_of(ids), len(ids), step, needed, address_of(passed)
        )

    def aged(
        self, step: int, least: int = 0, segments: tuple[int, int] = EVERY, most: int = 2**32
    ) -> Listed:
        """See RowMemory."""
        there = int(self._live[slice(*segments)].sum())
        ids, slots, ages = (np.empty(there, np.int64) for _ in range(3))
        count = self._kernels.collect(
            self.address, *segments, step, least, most, *map(address_of, (ids, slots, ages))
        )
        return ids[:count], slots[:count], ages[:count]

    def histogram(self, step: int, shift: int, bins: int) -> Ids:
        """See RowMemory."""
        counts = np.zeros(bins, np.int64)
        self._removal.histogram(self.address, step, shift, bins, address_of(counts))
        return counts

    def decay(self, place: int, factors: tuple[float, float, float], least: float) -> Ids:
        """See RowMemory."""
        self.keep_segments(0, SEGMENT_COUNT)
        ids = np.empty(len(self), np.int64)
        count = self._removal.decay(self.address, place, *factors, least, address_of(ids))
        return ids[:count]

    def restamp(self, old: int, new: int) -> None:
        """See RowMemory."""
        self._kernels.restamp(self.address, old, new)

    def recall(self, ids: Ids, step: int) -> Listed:
        """See RowMemory."""
        slots, touched = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        self._freezing.recall(
            self.address, address_of(ids), len(ids), step, address_of(slots), address_of(touched)
        )
        return ids, slots, touched

    def scores(self, spec: TableSpec, place: int) -> StoreScores:
        """See RowStore."""
        from psfleet.tables.host_scores import HostScores

        return HostScores(spec, self, place)

    def gather(self, slots: NDArray[np.int64]) -> Floats:
        """See RowMemory."""
        out = np.empty((len(slots), self._width), np.float32)
        self._kernels.gather(
            self.address, address_of(slots), len(slots), self._width, address_of(out)
        )
        return out

    def scatter(self, slots: NDArray[np.int64], rows: Floats) -> None:
        """See RowMemory."""
        self._kernels.scatter(
            self.address, address_of(slots), len(slots), self._width, address_of(rows)
        )


def index_kernels(removes: bool) -> Sequence[str]:
    """Names of the static kernels that an index loads when it is made."""
    return ("index", "freezing", "index_removal") if removes else ("index", "freezing")


def _reserve(rows: int, sizes: Callable[[int], list[int]]) -> tuple[int, list[Arena]]:
    """Arenas of `sizes(rows)` bytes; for fewer rows where that is too much of the address space that is
    left, and for half, and again, where they cannot be had."""
    rows = min(rows, max(rows * (_space_left() // _SHARE) // sum(sizes(rows)), _FEWEST_ROWS))
    while True:
        try:
            return rows, [Arena(size) for size in sizes(rows)]
        except UsageError:
            if rows < 2 * _FEWEST_ROWS:
                raise
            rows //= 2


def _space_left() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(_SPACE - pages * mmap.PAGESIZE, 0)


def _most_rows(row: int) -> int:
    """How many rows of so many bytes twice the machine's memory holds: no table ever has more."""
    memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    return max(2 * memory // row, _FEWEST_ROWS)
