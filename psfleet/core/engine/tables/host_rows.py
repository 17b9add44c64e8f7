"""HostRowMemory: the rows of a sparse table in host memory, found by id through a hash index.

The data of a table are four or five reserved address ranges (arenas) and one array of int64, the
*descriptor*. Kernels get the address of the descriptor alone, and read the addresses of the arenas from it:

    descriptor --> ROWS       slot 0 is unused | slot 1 | slot 2 | ...      width * 4 bytes each
               --> LINES      index: 64 bytes for four entries (hash, slot, stamp), 256 lines a chunk
               --> RECORDS    16 bytes for each chunk: entries in use, level, mask
               --> DIRECTORY  chunk number for each part of all hashes
               --> MARKS      int64 for each slot, only if the rule also updates rows that no push names

A *slot* is the position of a row, and a *stamp* the step of its last push. kernels/hash_index.py explains the
index. Open this module to see how much memory a table reserves and how many bytes it is charged for. Calls
are not thread-safe: the table holds its lock during each call. HostScores ranks the rows by the table's
eviction policy.
"""

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

_FEWEST_ROWS = 1 << 16  # a table is refused if there are no addresses for this many rows
_SPACE = 1 << 47  # bytes of address space of a process
_SHARE = 64  # the first table reserves at most 1/64 of that, later tables less (see _share)
_CHUNK_BYTES = CHUNK_LINES * 64
# Index lines reserved for each row. Random ids take half a line; the rest is address space for ids whose
# hashes are similar, and takes no memory until it is used.
_LINES = 8
# Splits that are allowed before the table has rows for them (hash_index.py), at most. A small table gets
# fewer (see __init__), so that its first rows do not take more memory than all its rows will need.
_EARLY_CHUNKS = 64  # more than the number of levels of a directory of 31 bits
_EARLY_PARTS = 3 << 19  # as many as 2**28 rows have


class HostRowMemory(RowStore):
    """Rows and index of one table in host memory.

    Attributes:
        address: Address of the descriptor, for kernels. Code that changes rows through this address calls
            `keep` first, so that snapshots in progress copy the old rows.
        pad: Unused bytes behind each row.
    """

    def __init__(
        self,
        width: int,
        max_rows: int,
        marks: bool,
        removes: bool = True,
        only_read: bool = False,
        pad: int = 0,
    ) -> None:
        """Reserve address space for `max_rows` rows, or for fewer rows if too little is left.

        Args:
            width: Number of float32 values in a stored row, including optimizer state.
            max_rows: Largest number of rows.
            marks: Reserve an int64 per row as well, for rules that update every row in each step.
            removes: Load the removal kernels now instead of at the first removal. With an empty kernel cache
                they take a quarter of all compile time.
            only_read: Rows are written once and then only read, so the index may be filled more densely.
            pad: Unused bytes behind each row.

        Raises:
            UsageError: `max_rows` is out of range, or the address space cannot be reserved.
        """
        # Slots have 32 bits, slot 0 is none, and NEXT_SLOT goes one beyond the last slot.
        if not 1 <= max_rows < 2**32 - 2:
            raise UsageError(f"max_rows is {max_rows}; it must be in [1, 2**32 - 3]")
        self.views = []
        self._width, self._row, self.pad = width, width * 4 + pad, pad
        max_rows = min(max_rows, self._most_rows(self._row + ROW_BYTES))
        self._marks = marks
        self.max_rows, self._arenas = _reserve(max_rows, self._most, self._rows_arena)
        self._rows, self._lines, *_ = self._arenas
        self._live = np.zeros(SEGMENT_COUNT, np.int64)
        self._scratch = np.empty(_CHUNK_BYTES, np.uint8)
        self._d = np.zeros(DESCRIPTOR_SIZE, np.int64)
        self._words = self._d.data  # a memoryview: reads a Python int three times as fast as NumPy
        # Slots, chunks and shift at the last call of `expect`, and its `more`. While these are the same, the
        # next call of `expect` has nothing to do.
        self._seen, self._expected = (0, 0, 0), 0
        fields = [ROWS, LINES, RECORDS, DIRECTORY, MARKS][: len(self._arenas)]
        self._d[fields] = [arena.address for arena in self._arenas]
        self._d[[LIVE, SCRATCH]] = address_of(self._live), address_of(self._scratch)
        self._d[[NEXT_SLOT, SHIFT, STRIDE]] = 1, FIRST_LEVEL, self._row
        self._d[FULL] = FULL_TO_READ if only_read else FULL_TO_CHANGE
        # A ninth of the chunks that `max_rows` random ids fill (460 rows each), and 8 parts
        # (LARGEST_DIRECTORY) for each 512 rows. Both are far below what `_most` has reserved. Other shares
        # were not compared.
        self._d[EARLY_CHUNKS] = min(self.max_rows // 4096 + 4, _EARLY_CHUNKS)
        self._d[EARLY_PARTS] = min(self.max_rows // 64, _EARLY_PARTS)
        self.address = address_of(self._d)
        self._kernels, self._freezing, *_ = map(static_kernels, index_kernels(removes))
        self._d[[ADD, FILL]] = self._kernels.add.address, self._kernels.fill.address
        self._kernels.make(self.address)

    @property
    def rows_address(self) -> int:
        """Address of slot 0, whose row is unused."""
        return self._rows.address

    @property
    def stride(self) -> int:
        """Distance from one row to the next in bytes."""
        return self._row

    def _rows_arena(self, size: int) -> Arena:
        """Make the arena for rows and their optimizer state. Tables on disk override this."""
        return Arena(size)

    def _most_rows(self, row: int) -> int:
        """Return an upper bound for the number of rows of `row` bytes: twice the machine's memory."""
        # So that the address space is enough for hundreds of wide tables, whose default is 2**28 rows. Twice
        # is a margin; nothing was measured.
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
        return self.most_bytes_with(0)

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
        # Worst case. Splits end at `max_chunks` chunks. After that, every chunk may be enlarged: its lines
        # stay unused, and it takes twice as many, hence 3 * lines. To be enlarged again, from L lines to 2L,
        # it needs L / 2 * 4 * FULL / 32 >= 1.4L further ids. That is 1.4 lines for each new id. 4 leave a
        # margin. More than 4 would need more _LINES: with 5, a table of 4,096 rows could not be filled.
        rows = self._words[NEXT_SLOT] + count
        max_chunks = rows // FEWEST_ROWS + 1 + self._words[EARLY_CHUNKS]
        lines = max(self._words[CHUNKS], max_chunks) * CHUNK_LINES
        return 3 * lines + 4 * count <= self._lines.size // 64

    @override
    def bytes_with(self, more: int) -> int:
        return self.most_bytes_with(max(more - self.free, 0) if more else 0)

    @override
    def most_bytes_with(self, more: int) -> int:
        sizes = zip(self._arenas, self._used(more), strict=True)
        return sum(arena.bytes_of(size) for arena, size in sizes)

    def _used(self, new_slots: int = 0) -> list[int]:
        """Return the bytes in use in each address range, or a bound after `new_slots` rows are added."""
        slots, chunks, parts = self._words[NEXT_SLOT], self._words[CHUNKS], self._parts
        if new_slots:
            total = slots + new_slots
            chunks = max(chunks, FIRST_CHUNKS + total * ROW_BYTES // _CHUNK_BYTES)
            # 4 parts for each chunk are twice what random ids need (LARGEST_DIRECTORY of hash_index.py).
            slots, parts = total, max(parts, 4 * chunks)
        return self._sizes(slots, chunks, parts)

    @property
    def _parts(self) -> int:
        """Number of parts of the directory."""
        return FIRST_CHUNKS << (FIRST_LEVEL - int(self._words[SHIFT]))

    def _most(self, rows: int) -> list[int]:
        """Return the bytes to reserve in each address range for `rows` rows, enough for any ids."""
        # 16 more for tables of few rows: `has_lines` asks for 3 * (1 + 4 EARLY_CHUNKS) = 15 at first, and for
        # 4 lines for each new id. With 15, tables of less than 32 rows could not fill.
        chunks = rows * _LINES // CHUNK_LINES + 16
        return self._sizes(rows + 1, chunks, LARGEST_DIRECTORY * chunks)

    def _sizes(self, slots: int, chunks: int, parts: int) -> list[int]:
        """Return the bytes of each address range, in the order ROWS, LINES, RECORDS, DIRECTORY, MARKS."""
        sizes = [slots * self._row, chunks * _CHUNK_BYTES, chunks * RECORD_SIZE, parts * 4]
        return [*sizes, slots * 8] if self._marks else sizes

    def expect(self, more: int) -> None:
        """Use huge pages for those arrays that need more than one huge page after `more` new ids.

        Call it before each push. It costs next to nothing while the table has not grown.
        """
        now = self._words[NEXT_SLOT], self._words[CHUNKS], self._words[SHIFT]
        if now == self._seen and more <= self._expected:
            return
        self._seen, self._expected = now, more
        for arena, size in zip(self._arenas, self._used(more), strict=True):
            arena.expect(size)

    @override
    def keep_ahead(self, available: int | None = None) -> None:
        # Pages in advance count as taken, and all tables share what is available. An eighth was not measured.
        # The other arrays need at most 8 bytes a row (MARKS), so a push meets a new huge page of them, and
        # waits 2 ms for it, once in 262,144 new rows.
        max_bytes = AHEAD if available is None else max(available, 0) // 8
        self._rows.keep_ahead(self._words[NEXT_SLOT] * self._row, max_bytes)
        self._lines.keep_ahead(self._words[CHUNKS] * _CHUNK_BYTES, max_bytes)

    @override
    def reserve(self, rows: int) -> None:
        self._rows.populate(0, (rows + 1) * self._row)
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
    def find_or_add(self, ids: Ids, steps: Ids) -> Ids:
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
        """Add 1 to the counter of each id, and remove ids whose counter reaches `threshold`.

        Only for a memory whose rows are one uint32, the counter (CandidateCounts uses it). A new id starts at
        0. Images are not told (`keep`), because no snapshot makes one of candidates: it copies them all.

        Args:
            ids: int64 [n], without repeats.
            step: Step to record as the last push of each id.
            threshold: Count at which an id is removed.
        """
        self.expect(len(ids))
        outcomes = np.empty(len(ids), np.int64)
        self._removal.count(
            self.address, address_of(ids), len(ids), step, threshold, address_of(outcomes)
        )

    @override
    def aged(
        self, step: int, least: int = 0, segments: tuple[int, int] = EVERY, most: int = 2**32
    ) -> Listed:
        row_count = int(self._live[slice(*segments)].sum())
        ids, slots, ages = (np.empty(row_count, np.int64) for _ in range(3))
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
        self.keep_segments(0, SEGMENT_COUNT)  # the kernel changes the scores of every row
        ids = np.empty(len(self), np.int64)
        count = self._removal.decay(self.address, place, *factors, least, address_of(ids))
        return ids[:count]

    @override
    def restamp(self, old: int, new: int) -> None:
        # No `keep`: images read a row's last push as step - age, and restamping does not change that number.
        self._kernels.restamp(self.address, old, new)

    @override
    def recall(self, ids: Ids, step: int) -> Listed:
        slots, steps = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        self._freezing.recall(
            self.address, address_of(ids), len(ids), step, address_of(slots), address_of(steps)
        )
        return ids, slots, steps

    def scores(self, spec: TableSpec, place: int) -> "HostScores":
        """Return the eviction scores of these rows.

        Args:
            spec: Definition of the table; its eviction policy has the score function.
            place: Position of the score values within a stored row.

        Raises:
            RuleError: The policy's score function cannot be compiled.
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
        # No `keep`, which goes by ids: `find_or_add` has called it when it returned these slots.
        self._kernels.scatter(
            self.address, address_of(slots), len(slots), self._width, address_of(rows)
        )


def index_kernels(removes: bool) -> Sequence[str]:
    """Return the names of the kernel modules that a hash index needs.

    Args:
        removes: True to include the kernels that remove rows.
    """
    return ("index", "freezing", "index_removal") if removes else ("index", "freezing")


def _reserve(
    rows: int, sizes: Callable[[int], list[int]], make_first: Callable[[int], Arena]
) -> tuple[int, list[Arena]]:
    """Reserve the arenas of a table; return the number of rows that fit into them, and the arenas.

    Reserves address space for fewer rows if `rows` would take too much of the space that is left, and halves
    the number again until the reservation succeeds.

    Args:
        rows: Number of rows to reserve for.
        sizes: Returns the bytes of each arena for a number of rows.
        make_first: Makes the first arena, which stores the rows.

    Raises:
        UsageError: Not even a small table can be reserved.
    """
    rows = min(rows, max(rows * _share(_space_left()) // sum(sizes(rows)), _FEWEST_ROWS))
    while True:
        try:
            first, *other_sizes = sizes(rows)
            return rows, [make_first(first), *map(Arena, other_sizes)]
        except UsageError:
            if rows < 2 * _FEWEST_ROWS:
                raise
            rows //= 2


def _share(space: int) -> int:
    """Return the most bytes that one table may reserve if `space` bytes of address space are left.

    With S = _SPACE and s = `space` the limit is s * s / (63 * S + s). A table that is made after n others,
    each as large as allowed, gets 1 / (64 + n) of the whole space, so that thousands of tables fit.
    """
    return space * space // ((_SHARE - 1) * _SPACE + space)


def _space_left() -> int:
    """Return the bytes of address space that this process has not reserved."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(_SPACE - pages * mmap.PAGESIZE, 0)


class HostScores:
    """Eviction scores of a table's rows in host memory, computed by the table's eviction policy.

    Args:
        spec: Definition of the table.
        index: Storage of its rows.
        place: Position of the score values within a stored row, in float32 values.
    """

    def __init__(self, spec: TableSpec, index: HostRowMemory, place: int) -> None:
        self._index = index
        self._place = place
        self._kernels = eviction_kernels(spec.policy, spec.pushed_scores)
        self._scratch = np.zeros(1, np.int64)

    def keys(self, step: int, least: int, most: int) -> Keys:
        """Return the eviction keys of rows that are at least `least` updates old, without keys above `most`.

        The key of a row orders rows by score, then age. Rows with low keys are evicted first.
        """
        keys = np.empty(len(self._index), np.uint64)
        return keys[: self._rank(step, least, most, keys)]

    def listed(self, step: int, least: int, most: int, count: int) -> tuple[Ids, Keys]:
        """Return ids and eviction keys of the rows that `keys` selects. `count` is the number of these rows.

        Rows with low keys are evicted first.
        """
        ids, keys = np.empty(count, np.int64), np.empty(count, np.uint64)
        if count:
            self._rank(step, least, most, keys, ids)
        return ids, keys

    def use(self, ids: Ids, step: int) -> None:
        """Record that an update includes these ids: changes score and last step of those that have a row."""
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

    def _rank(
        self, step: int, min_age: int, max_key: int, keys: Keys, ids: Ids | None = None
    ) -> int:
        """Select rows for an eviction: write their eviction keys to `keys`, and return how many there are.

        Args:
            step: Number of the table's last update.
            min_age: Select rows that were last pushed at least this many updates ago,
            max_key: and whose eviction key is at most this.
            keys: Receives the keys: uint64 [rows].
            ids: Receives the ids of the rows: int64 [rows]. None to write no ids.
        """
        count: int = self._kernels.rank(
            self._index.address,
            self._place,
            step,
            min_age,
            max_key,
            address_of(self._scratch),
            0 if ids is None else address_of(ids),
            address_of(keys),
        )
        return count
