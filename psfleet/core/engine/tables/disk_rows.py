"""DiskRowMemory: stores a sparse table larger than memory.

Rows in use are in memory, the other rows in a file.

One address range holds all rows. A *slot* is the position of a row in it. The first slots are memory; the
slots behind them are a memory-mapped file:

    slot   0          NEXT_SLOT      _far                                _far + len(_there)
           | rows in use | reserved  | block 0 | block 1 | block 2 | ...  |
           <------ memory ----------><------- file, mapped --------------->

So kernels, snapshots and scores can read every row by its slot, in memory or in the file; only the speed
differs. This module moves rows. Before a call, the rows that it needs are read into memory (`near`). If
memory is short, rows that have not been used recently (CLOCK algorithm) are written to free blocks of the
file, many at a time. A block is a number of rows that fills whole pages.

The file is a cache without a name: it disappears with the process, and only a snapshot or the log restores
its rows. An I/O error therefore ends the process (`end_for_rows`). All methods run under the lock of the
table. docs/decisions/0030-rows-on-disk.md has the reasons and the measurements.
"""

import mmap
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import UsageError
from psfleet.core.base.memory import available_memory
from psfleet.core.engine.kernels.generate import static_kernels
from psfleet.core.engine.kernels.hash_index import (
    CHUNK_LINES,
    CHUNKS,
    EARLY_CHUNKS,
    FEWEST_ROWS,
    FIRST_CHUNKS,
    FREE_ROW,
    NEXT_SLOT,
    SEGMENT_COUNT,
    STRIDE,
)
from psfleet.core.engine.kernels.initial_values import address_of
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.arena import Arena
from psfleet.core.engine.tables.budget import MemoryBudget
from psfleet.core.engine.tables.disk_arena import (
    LEAST,
    PAGE,
    DiskArena,
    block_rows,
    end_for_rows,
    row_pad,
)
from psfleet.core.engine.tables.host_rows import HostRowMemory, HostScores
from psfleet.core.engine.tables.row_data import PackedRows
from psfleet.core.engine.tables.row_memory import ROW_BYTES, DiskTraffic, Keys, Listed, clear_bits
from psfleet.core.engine.tables.row_update import HostRowUpdate, RowValues

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_BESIDE = 9  # further bytes for each row in memory: 8 for its id, 1 for its use count
# Slots that memory always has beyond its limit, for the rows that one slice of a call reads or adds before
# other rows leave memory. One row more would get a slot of the file.
_BEYOND = 1 << 21
# No other values of the numbers below have been measured.
_PART = 16  # 1/16 of the slots in memory is kept free for the rows of the next call
# Rows that are read or written together: 768 KiB of rows of 192 bytes, and no more than _MOST_BYTES of wide
# rows, because their buffers are beside the memory that the budget counts.
_AT_ONCE, _MOST_BYTES = 4096, 4 << 20
# Free blocks that are kept back, since compaction writes before it frees. Compaction may fill all of these
# blocks. It needs 2: a third of the file is empty, so that the rows of the 3 emptiest blocks fit into 2.
_SPARE = 4
# Blocks that compaction sorts to find the emptiest. To sort all blocks of a large file would keep a call
# waiting.
_WINDOW = 1 << 14


class DiskRowMemory(HostRowMemory):
    """Rows of a sparse table in memory and in a file. The index of all rows is in memory.

    A block of the file is always written whole. When one of its rows moves to memory, the block has a gap,
    and it is written again only when all its rows are gone. So no row is ever overwritten in place, and a
    read of the file never returns old data. (One exception: `decay` changes rows through the map. The head of
    disk_arena.py says why transfers and the map show the same bytes.)

    Args:
        spec: Definition of the table.
        max_rows: Largest number of rows in memory and file together.
        host: Host memory of all tables. The rows may use what other tables leave free, and at least LEAST
            bytes.
        own: Counts the memory that the rows of each table on disk take now. Its attribute `folder` is the
            folder of the files.
    """

    def __init__(
        self, spec: TableSpec, max_rows: int, host: MemoryBudget, own: MemoryBudget
    ) -> None:
        self.paging = self._traffic = DiskTraffic()
        self._own, self._table = own, spec.name
        width, pad = PackedRows(spec).width, row_pad(spec)
        self._row = width * 4 + pad
        self._block = block_rows(self._row)
        self._at_once = max(min(_AT_ONCE, _MOST_BYTES // self._row), 1)
        self._default = available_memory() // 2  # of a server without a limit (docs/tables.md)
        # First slot in the file. Memory has 4 Mi slots beyond what the limit allows: the rows of one call
        # are read into memory before other rows leave it. So a push may add some millions of ids (`grow`
        # refuses more). Slots take no memory until they are used. The file is mapped behind them, so they
        # must fill whole pages (of up to 64 KiB on ARM): as many slots as a page has words do, for any row.
        slots = (host.limit or self._default) // (self._row + _BESIDE) + (1 << 22)
        # At most half of the slot numbers, which have 32 bits, so that the file gets the other half.
        words = mmap.PAGESIZE // 4
        self._far = min(-(-slots // words) * words, 1 << 31)
        # A slot number has 32 bits, and the file has 3 slots for 2 rows and some blocks more (see _blocks).
        # With as many rows as this, that is less than 2 slots for each.
        row_limit = min(max_rows, (2**32 - 2 - self._far) // 2)
        # No marks: rules that update every row have a MappedRowMemory.
        super().__init__(width, row_limit, False, spec.entry is not None, host.only_reads, pad)
        assert isinstance(self._rows, DiskArena)
        self._disk = self._rows
        self._moves = static_kernels("disk_rows")
        # The id of the row in each slot: to move rows, their index entries are found by id. The ids of rows
        # in the file are in a second file, since only moves within the file and snapshots read them.
        self._owners = DiskArena(self._disk.size // self._row * 8, self._far * 8, own.folder)
        self._ids = np.frombuffer(self._owners._map, np.int64)
        # Uses of each slot in memory for CLOCK: FREE, IDLE or a count up to MOST (sources/disk_rows.py).
        # In an arena, whose pages take memory only when their slots are used.
        self._use_arena = Arena(self._far)
        self._uses = np.frombuffer(self._use_arena._map, np.uint8)
        self._there = np.zeros(0, np.uint8)  # 1 for each slot of the file that has a row
        self._held = np.zeros(0, np.int64)  # number of rows in each block of the file
        self._counts = np.zeros(3, np.int64)
        self._hand = self._in_file = self._moved = 0
        self._early = int(self._words[EARLY_CHUNKS])
        # The first blocks exist from the start. So a disk without space is reported now, and the number of
        # blocks is never 0 (`_compact` and the kernels divide by it).
        self.grow(1)
        self.keep_ahead(None if host.limit is None else host.available_for())

    @override
    def _rows_arena(self, size: int) -> Arena:
        return DiskArena(size, self._far * self._row, self._own.folder, self._row)

    @override
    def _most_rows(self, row: int) -> int:
        return 1 << 40  # no limit here: address space and disk have their own

    @override
    def _most(self, rows: int) -> list[int]:
        sizes = super()._most(rows)
        return [(self._far + self._blocks(rows) * self._block) * self._row, *sizes[1:]]

    def _blocks(self, rows: int) -> int:
        """Return the number of blocks in the file for this many rows.

        There is space for half as many rows again, so that some blocks are nearly empty and compaction can
        free them by moving few rows.
        """
        # And 16 blocks, so that a file with few rows has its spare blocks too, and others to compact.
        return -(-rows * 3 // (2 * self._block)) + 4 * _SPARE

    @property
    @override
    def bytes(self) -> int:
        # All rows count, in memory or in the file. `resident_bytes` counts those in memory.
        return super().bytes - self._disk.bytes_of(self._used()[0]) + len(self) * self._row

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory taken by the rows that are in memory, with their ids and use counts."""
        return self._disk.near_bytes_of(self._used()[0]) + int(self._words[NEXT_SLOT]) * _BESIDE

    @property
    @override
    def next_slot(self) -> int:
        return self._far + len(self._there)

    @property
    @override
    def spare(self) -> int:
        return self.max_rows - len(self)

    @property
    @override
    def free(self) -> int:
        return int(self._words[NEXT_SLOT]) - 1 - len(self) + self._in_file

    @override
    def has_lines(self, count: int) -> bool:
        fits = self._words[NEXT_SLOT] + count <= self._far
        return (
            fits and super().has_lines(count) and self._blocks(len(self) + count) <= len(self._held)
        )

    @override
    def most_bytes_with(self, more: int) -> int:
        # `_there` has a byte for each slot of the file, and `_held` 8 for each block. If a row fills whole
        # pages, each row has its own block, and the two arrays take 1.5 * 9 bytes per row.
        blocks, size = self._blocks(len(self) + more), self._block * self._row
        if blocks <= len(self._held):
            blocks = len(self._held)
        else:
            blocks = self._disk.size_when_grown(blocks * size) // size
        return super().most_bytes_with(more) + blocks * (self._block + self._held.itemsize)

    @override
    def _used(self, new_slots: int = 0) -> list[int]:
        # As in HostRowMemory, but the index has the rows of the file too, while only new rows take memory. 4
        # parts for each chunk are twice what random ids need.
        slots, chunks, parts = int(self._words[NEXT_SLOT]), int(self._words[CHUNKS]), self._parts
        if new_slots:
            min_chunks = FIRST_CHUNKS + (len(self) + new_slots) * ROW_BYTES // (CHUNK_LINES * 64)
            chunks = max(chunks, min_chunks)
            slots, parts = slots + new_slots, max(parts, 4 * chunks)
        return self._sizes(slots, chunks, parts)

    @override
    def grow(self, more: int) -> None:
        if self._words[NEXT_SLOT] + more > self._far:
            raise UsageError(
                f"table {self._table!r} was asked to add {more} rows at once; at most "
                f"{self._far - self._words[NEXT_SLOT]} have room in memory. Push fewer at a time"
            )
        blocks = self._blocks(len(self) + more)
        if blocks <= len(self._held):
            return
        self._disk.grow(blocks * self._block * self._row)
        total = self._disk.made // (self._block * self._row)
        self._owners.grow(total * self._block * 8)
        # The copies are seldom: the file grows by a sixteenth at a time.
        new = total - len(self._held)
        self._held = np.append(self._held, np.zeros(new, np.int64))
        self._there = np.append(self._there, np.zeros(new * self._block, np.uint8))

    @override
    def reserve(self, rows: int) -> None:
        # Space in the file and memory for the index. Memory for rows is not reserved: it is what other tables
        # leave free.
        self.grow(max(rows - len(self), 0))
        self._lines.populate(0, rows * ROW_BYTES)

    @override
    def keep_ahead(self, available: int | None = None) -> None:
        super().keep_ahead(available)
        size = self._default
        if available is not None:
            # The budget charges this table LEAST bytes at most for its rows, which are its own to use: add
            # them to `available`, and take off what the rows of other tables on disk have in memory.
            size = (
                available
                + self._disk.bytes_of(self._used()[0])
                - self._own.charged(besides=self._table)
            )
        # These slots stay beyond the limit even where 1 << 31 has cut off the 4 Mi of `__init__`.
        self._limit = min(max(size, LEAST) // (self._row + _BESIDE) + 1, self._far - _BEYOND)
        self._own.charge(self._table, self.resident_bytes)

    def near(self, ids: Ids) -> Iterator[slice]:
        """Yield the ids in slices, and before each slice read its rows into memory.

        The rows stay in memory until the caller requests the next slice. The caller may add rows for new ids
        of the slice before.
        """
        # A call may need more rows than memory holds, and no row of a slice may leave before the caller is
        # done with it. So rows leave only in `_make_room`, before a slice is looked up: after `look`, its
        # sweep could choose rows that `look` has just found. How many rows the slice will read is not known
        # then, so `_make_room` takes the number of the last slice. If that was too small, the rows take slots
        # beyond the limit until the next slice. So a slice is limited, to a quarter of the slots (other parts
        # were not compared) and to the slots beyond the limit. At least 256 for wide rows in little memory,
        # since each slice costs several calls.
        slice_rows = min(max(self._limit // 4, 256), _BEYOND)
        for start in range(0, len(ids), slice_rows):
            part = ids[start : start + slice_rows]
            self._make_room()
            cold = np.empty(len(part), np.int64)
            count = self._moves.look(
                self.address, address_of(part), len(part), self._far, self._uses, cold, self._counts
            )
            self._traffic.found = int(self._counts[self._moves.FOUND])
            if count:
                self._read(cold[:count])
            new = int(self._counts[self._moves.UNKNOWN])
            self._moved = count + new
            yield slice(start, start + slice_rows)
            if new:
                self._note_new_rows(part)

    def _note_new_rows(self, ids: Ids) -> None:
        """Record the ids of the rows that a call has just added in memory."""
        # An id without a row, which a pull does not add, has slot 0. No sweep visits that slot.
        slots = self.locate(ids)[0]
        self._ids[slots] = ids
        self._uses[slots] = np.maximum(self._uses[slots], self._moves.IDLE)

    def _read(self, ids: Ids) -> None:
        """Move these rows from the file to memory."""
        # An image finds its unread rows by slot. The rows get other slots now, so it has to copy them first.
        for view in self.views:
            view.keep(ids)
        # `fetch` changes the index before the rows have been read. No other thread sees this state, since the
        # table is locked, and a failed read ends the process.
        start = time.perf_counter()
        slots, row_addresses = np.empty((2, len(ids)), np.int64)
        arrays = self._uses, self._there, self._held, self._ids, slots, row_addresses
        count = self._moves.fetch(self.address, ids, self._far, *arrays)
        self._check_transfer(
            self._disk.transfer(False, slots[:count] * self._row, row_addresses[:count])
        )
        self._count_file(-count)
        self._traffic.read += count
        self._traffic.seconds += time.perf_counter() - start

    def _count_file(self, change: int) -> None:
        """Add `change` to the number of rows in the file."""
        self._in_file += change
        self._traffic.disk_bytes = self._in_file * self._row
        # The index may have as many chunks (of 256 index lines) as all rows allow. Its kernel counts only the
        # rows in memory (NEXT_SLOT), so chunks for the others are allowed separately.
        self._d[EARLY_CHUNKS] = self._early + self._in_file // FEWEST_ROWS

    def _make_room(self) -> None:
        """Move rows to the file so that the next call finds as many free slots as the last call filled.

        CLOCK chooses the rows: `sweep` goes round the slots, lowers each use count, and returns slots whose
        count has reached IDLE.
        """
        # However many rows the last call moved, at least half of the memory keeps its rows.
        max_resident = max(self._limit - self._limit // _PART - self._moved, self._limit // 2)
        over = len(self) - self._in_file - max_resident
        if over > 0:
            # Move many rows if any must move: rows in neighbouring blocks are written by one request. But no
            # more than 2048, so that a call that needs little room does not wait for a large write.
            over = max(over, min(self._limit // _PART, self._at_once // 2))
        while over > 0:
            slots = np.empty(min(over, self._at_once), np.int64)
            count = self._moves.sweep(self.address, self._uses, len(slots), slots, self._counts)
            # Every row is chosen at last, except rows that were added without `_note_new_rows`, as by an
            # interrupted call.
            if not count:
                break
            over -= self._move_to_file(slots[:count])
        # A little above the limit is left alone: the limit changes with the memory of the other tables, and a
        # shrink also moves rows that are in use. Other parts than 1/32 have not been measured.
        if self._words[NEXT_SLOT] > self._limit + self._limit // 32:
            self._shrink()

    def _move_to_file(self, slots: Ids) -> int:
        """Move the rows at these positions in memory to the file; return their number."""
        # A removed row leaves its id and uses behind. The index says whether the slot still has a row.
        ids = self._ids[slots]
        has_row = self.locate(ids)[0] == slots
        ids, slots = ids[has_row], slots[has_row]
        if len(ids):
            self._write(self._free_blocks(-(-len(ids) // self._block)), ids, super().gather(slots))
            self._count_file(len(ids))
        return len(ids)

    def _shrink(self) -> None:
        """Release memory after the limit has fallen.

        Rows in slots behind the limit move to the file, even those in use, so that the end of the memory is
        unused.
        """
        first, end = self._limit, int(self._words[NEXT_SLOT])
        for start in range(first, end, self._at_once):
            self._move_to_file(np.arange(start, min(start + self._at_once, end)))
        self._moves.chain(self.address, super().free_slots(), first)
        self._uses[first:end] = self._moves.FREE
        # Released use counts read as zeros, that is, FREE.
        for arena, size in (self._disk, self._row), (self._owners, 8), (self._use_arena, 1):
            arena.release_behind(first * size)

    def _write(self, blocks: Ids, ids: Ids, rows: Floats) -> None:
        """Write these rows to free blocks of the file, and let the index entries of their ids point there.

        Args:
            blocks: Free blocks, ascending. The last one may remain partly empty.
            ids: Ids of the rows, which are in memory or in other blocks now.
            rows: Content of the rows: float32 [n, width].
        """
        # The order matters: images in progress copy the rows first, then the rows are written to the file,
        # and only then does the index point to the file. `settle` frees the old slots and overwrites their
        # first word, which becomes a link of the free list.
        for view in self.views:
            view.keep(ids)
        size = self._block * self._row
        pages = _whole_pages(len(blocks) * size)
        self._rows_in(pages)[: len(rows)] = rows
        # Neighbouring blocks form a run, which is written by one request: find where the runs start. The
        # first block is compared with -2, because -1 would be a neighbour of block 0.
        first = np.flatnonzero(np.diff(blocks, prepend=-2) != 1)
        sizes = np.diff(first, append=len(blocks)) * size
        run_addresses = address_of(pages) + first * size
        self._check_transfer(self._disk.transfer(True, blocks[first] * size, run_addresses, sizes))
        slots = self._far + self._slots(blocks)[: len(ids)]
        arrays = self._uses, self._there, self._held, self._ids
        self._moves.settle(self.address, ids, slots, self._far, *arrays)
        # `settle` has written ids through the map, which takes memory. Unmapped pages can leave memory.
        self._owners.unmap()
        self._check_transfer(not self._owners.has_lost_writes())
        self._traffic.written += len(ids)

    def _slots(self, blocks: Ids) -> Ids:
        """Return the row positions (slots) in these blocks, counted from the start of the file."""
        return (blocks[:, None] * self._block + np.arange(self._block)).reshape(-1)

    def _free_blocks(self, count: int) -> Ids:
        """Return `count` empty blocks, ascending; compacts the file until there are enough."""
        # The loop ends: a third of the file's slots have no row (`_blocks`), so blocks can always be freed.
        while True:
            free = np.flatnonzero(self._held == 0)
            if len(free) >= count + _SPARE:
                return free[:count]
            self._compact(free)

    def _compact(self, free: Ids) -> None:
        """Move the rows of nearly empty blocks to fewer blocks, or go on to the next group of blocks.

        Sort the next 16,384 blocks (`_WINDOW`) by their number of rows. The first k of them fit into c(k)
        blocks, so that moving them frees k - c(k) blocks. Choose the k that frees most while c(k) free blocks
        exist. At most 1 MiB is moved at a time, or 16 blocks if these are larger.
        """
        # The limit is there because a call waits for the free blocks. 16 blocks are more than the 3 that it
        # takes to free one (see _SPARE).
        size = self._block * self._row
        window = np.arange(self._hand, self._hand + min(_WINDOW, len(self._held)))
        window %= len(self._held)
        window = window[self._held[window] > 0]
        max_blocks = max(_SPARE * _SPARE, (1 << 20) // size)
        blocks = window[np.argsort(self._held[window], kind="stable")[:max_blocks]]
        counts = -(-np.cumsum(self._held[blocks]) // self._block)
        gains = (np.arange(1, len(blocks) + 1) - counts)[counts <= len(free)]
        if not len(gains) or gains.max() <= 0:
            self._hand = (self._hand + _WINDOW) % len(self._held)
            return
        count = int(np.argmax(gains)) + 1
        blocks = np.sort(blocks[:count])  # the disk reads them in the order of the file
        pages = _whole_pages(count * size)
        block_addresses, sizes = address_of(pages) + np.arange(count) * size, np.full(count, size)
        self._check_transfer(self._disk.transfer(False, blocks * size, block_addresses, sizes))
        slots = self._slots(blocks)
        occupied = self._there[slots] != 0
        rows = self._rows_in(pages)[occupied]
        self._write(free[: counts[count - 1]], self._ids[self._far + slots[occupied]], rows)

    def _check_transfer(self, success: bool) -> None:
        if not success:
            end_for_rows(self._own.folder, self._table)

    def drop(self) -> None:
        """Write the file's pages that kernels have changed, and remove the file's pages from memory.

        Call it after each use of the map: direct reads then find what was changed through the map, and no
        pages take memory beside the rows that the budget counts (see the head of disk_arena.py).
        """
        self._check_transfer(self._disk.drop())

    @override
    def put(self, ids: Ids, steps: Ids, rows: Floats) -> None:
        # Rows that are in the file are read first, although they are overwritten: they get their slots in
        # memory in the one usual way. Loading and moving mostly write new ids, so few reads could be saved.
        for part in self.near(ids):
            super().put(ids[part], steps[part], rows[part])

    @override
    def remove(self, ids: Ids) -> int:
        slots = self.locate(ids)[0]
        in_file = slots >= self._far
        file_slots = np.unique(slots[in_file]) - self._far
        # The kernel links each freed slot into the free list by the first word of its row, but slots of the
        # file do not belong in that list. With a stride of 0 all these links are written to row 0, which no
        # id has, so the file is not touched. Afterwards the old head of the list is restored. Images that
        # copy the rows meanwhile read only the file, which needs no stride.
        free, self._d[STRIDE] = self._words[FREE_ROW], 0
        count = super().remove(ids[in_file])
        self._d[[FREE_ROW, STRIDE]] = free, self._row
        self._there[file_slots] = 0
        np.subtract.at(self._held, file_slots // self._block, 1)
        self._count_file(-len(file_slots))
        return count + super().remove(ids[~in_file])

    @override
    def decay(self, place: int, factors: tuple[float, float, float], least: float) -> Ids:
        ids = super().decay(place, factors, least)
        self.drop()  # the kernel has changed every row, those in the file through the map
        return ids

    @override
    def used(self) -> NDArray[np.uint64]:
        bits = np.zeros(self.next_slot // 64 + 1, np.uint64)
        end, words = int(self._words[NEXT_SLOT]), int(self._words[NEXT_SLOT]) // 64 + 1
        bits[:words] = 2**64 - 1
        beyond = np.arange(end, words * 64)
        clear_bits(bits, np.concatenate([super().free_slots(), beyond, [0]]))
        # The file's bits begin at a whole word, because `_far` is a multiple of 1024 or more.
        in_file = np.packbits(self._there, bitorder="little")
        bits[self._far // 64 :].view(np.uint8)[: len(in_file)] = in_file
        return bits

    @override
    def listed(self, first: int, last: int, step: int) -> Listed:
        """Return rows of segments (classes of ids) that are in memory, and a part of the rows in the file.

        Rows in the file are not listed by segment: each call lists an equal part of the file, in the file's
        order. Rows may move between memory and file between two calls, so a row can be listed twice or not at
        all. That is safe: the image of a snapshot in progress copies a row before the row moves.
        """
        ids, slots, steps = super().listed(first, last, step)
        near = slots < self._far
        blocks = len(self._held)
        part = slice(*(at * blocks // SEGMENT_COUNT * self._block for at in (first, last)))
        occupied_slots = self._far + part.start + np.flatnonzero(self._there[part])
        also = self.recall(self._ids[occupied_slots], step)
        pairs = zip((ids[near], slots[near], steps[near]), also, strict=True)
        ids, slots, steps = map(np.concatenate, pairs)
        return ids, slots, steps

    @override
    def gather(self, slots: Ids) -> Floats:
        if not (slots >= self._far).any():
            return super().gather(slots)
        # In parts, so that the buffers beside the result stay small, and in the order of the file.
        rows = np.empty((len(slots), self._width), np.float32)
        order = np.argsort(slots)
        for start in range(0, len(order), self._at_once):
            part = order[start : start + self._at_once]
            near, in_file = np.split(part, [np.searchsorted(slots[part], self._far)])
            rows[near] = super().gather(slots[near])
            if len(in_file):
                rows[in_file] = self._gather_from_file(slots[in_file] - self._far)
        return rows

    def _gather_from_file(self, slots: Ids) -> Floats:
        """Return copies of the rows at these positions in the file, ascending: float32 [n, width]."""
        first, end = int(slots[0]), int(slots[-1]) + 1
        # If at least half of the range is needed, as when a snapshot scans the table, read the whole range at
        # once.
        if end - first <= 2 * len(slots):
            start = first * self._row // PAGE * PAGE
            size = -(-end * self._row // PAGE) * PAGE - start
            pages = _whole_pages(size)
            where = np.array([[start], [address_of(pages)], [size]], np.int64)
            self._check_transfer(self._disk.transfer(False, *where))
            part = pages[first * self._row - start :][: (end - first) * self._row]
            return self._rows_in(part)[slots - first]
        content = _whole_pages(len(slots) * self._row)
        row_addresses = address_of(content) + np.arange(len(slots)) * self._row
        self._check_transfer(self._disk.transfer(False, slots * self._row, row_addresses))
        return self._rows_in(content)

    def _rows_in(self, content: NDArray[np.uint8]) -> Floats:
        """Return a view of the rows in bytes of the file, without their padding: float32 [n, width]."""
        return content.view(np.float32).reshape(-1, self._row // 4)[:, : self._width]

    @override
    def scores(self, spec: TableSpec, place: int) -> HostScores:
        return DiskScores(spec, self, place)


def _whole_pages(size: int) -> NDArray[np.uint8]:
    """Return an array of `size` bytes that starts at a page, as reads past the page cache require."""
    buffer = np.empty(size + PAGE, np.uint8)
    start = -address_of(buffer) % PAGE
    return buffer[start : start + size]


class DiskScores(HostScores):
    """Scores of rows on disk.

    Ranking reads all rows through the map, and removes the file's pages from memory after.
    """

    _index: DiskRowMemory

    @override
    def use(self, ids: Ids, step: int) -> None:
        for part in self._index.near(ids):
            super().use(ids[part], step)

    @override
    def _rank(
        self, step: int, min_age: int, max_key: int, keys: Keys, ids: Ids | None = None
    ) -> int:
        count = super()._rank(step, min_age, max_key, keys, ids)
        self._index.drop()
        return count


class DiskRowUpdate(HostRowUpdate):
    """Pulls and pushes of a table on disk: as in host memory, one slice of `DiskRowMemory.near` at a time."""

    _index: DiskRowMemory

    @override
    def pull_into(self, ids: Ids, out: Floats) -> int:
        parts = self._index.near(ids)
        return sum(super(DiskRowUpdate, self).pull_into(ids[part], out[part]) for part in parts)

    @override
    def push(self, ids: Ids, gradients: RowValues, scalars: Floats, step: int) -> None:
        assert isinstance(gradients, np.ndarray)  # for mypy: only tables on a GPU get other values
        for part in self._index.near(ids):
            super().push(ids[part], gradients[part], scalars, step)
