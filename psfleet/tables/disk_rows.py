"""Rows of a sparse table in a file, of which the pages in use are in memory.

The rows' address range is a map of the file, so all that reads or writes rows does so as if they were in
memory, and with the same bits. What is here only decides which pages stay, and has them read before a
call needs them: see docs/decisions/0030-rows-on-disk.md.
"""

import ctypes
import mmap
import os
import sys
import tempfile
import time
import weakref

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.errors import UsageError
from psfleet.kernels.generate import static_kernels
from psfleet.platform.logs import log_of
from psfleet.schema.table import TableSpec
from psfleet.tables.arena import AHEAD, Arena
from psfleet.tables.budget import MemoryBudget
from psfleet.tables.host_rows import HostRowMemory, HostScores
from psfleet.tables.row_data import PackedRows
from psfleet.tables.row_memory import Keys, Listed, PageTraffic, StoreScores
from psfleet.tables.row_update import HostRowUpdate

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

LEAST = 4 << 20
"""Bytes of rows that a table has in memory at least."""
_PAGE = 4096
_LEAST_GROWTH = 1 << 20
_PART = 16  # of the file, by which it grows, and of the pages in memory, of which some are always leaving
_AT_ONCE = 1 << 14  # rows that are copied together
_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_log = log_of(__name__)


class DiskArena(Arena):
    """A range of bytes that lies in a file without a name: it goes with the process, however that ends.

    Only what `grow` has made may be touched.

    Attributes:
        made: Bytes from the start that there are.
        file: Descriptor of the file.
    """

    def __init__(self, size: int, folder: str) -> None:
        super().__init__(size)
        self.made = 0
        self._folder = folder
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder, prefix="psfleet-rows-", buffering=0) as file:
                self.file = os.dup(file.fileno())
        except OSError as error:
            raise UsageError(f"cannot make a file for rows in {folder!r}: {error}") from error
        weakref.finalize(self, os.close, self.file)  # as the memory goes, without a warning
        how = mmap.MAP_SHARED | _MAP_FIXED
        where = self.address, self.size, mmap.PROT_READ | mmap.PROT_WRITE, how, self.file, 0
        if _libc.mmap(*where) != self.address:
            why = os.strerror(ctypes.get_errno())
            raise UsageError(f"cannot map a file of {folder!r} into memory: {why}")
        self._advise("MADV_RANDOM")

    def grow(self, used: int) -> None:
        """Have the first `used` bytes on the disk.

        Raises:
            UsageError: It has no room; nothing was changed.
        """
        if used <= self.made:
            return
        ahead = min(max(used // _PART, _LEAST_GROWTH), AHEAD)
        for size in (used + ahead, used):
            size = -(-size // _PAGE) * _PAGE
            try:
                os.posix_fallocate(self.file, self.made, size - self.made)
            except OSError as error:
                why = error.strerror
                os.ftruncate(self.file, self.made)  # a part of it may be there
            else:
                self.made = size
                return
        raise UsageError(
            f"the rows on disk in {self._folder!r} cannot grow to {used / 2**20:,.1f} MiB: {why}. Make room "
            "there, use more servers, or let rows go (entry=CapacityEntry())"
        )

    @override
    def expect(self, used: int) -> None:
        pass

    @override
    def populate(self, start: int, end: int) -> bool:
        self.grow(end)
        return True

    @override
    def taken(self, used: int) -> int:
        return min(-(-used // _PAGE) * _PAGE, LEAST)

    @override
    def keep_ahead(self, used: int, most: int = AHEAD) -> None:
        pass


class DiskRowMemory(HostRowMemory):
    """Rows in a file; their index is in memory.

    Args:
        spec: Definition of the table.
        max_rows: As for HostRowMemory.
        host: Memory of all tables. Pages get what others leave of it, LEAST at least.
        own: Memory of pages of tables on disk; it names the folder.
    """

    def __init__(
        self, spec: TableSpec, max_rows: int, host: MemoryBudget, own: MemoryBudget
    ) -> None:
        self.paging = PageTraffic()
        self._own, self._table = own, spec.name
        width = PackedRows(spec).width
        super().__init__(width, max_rows, spec.every_row, spec.entry is not None, host.only_reads)
        assert isinstance(self._rows, DiskArena)
        self._disk = self._rows
        self._row = width * 4
        self._pages = static_kernels("disk_pages")
        self._states = np.zeros(0, np.uint8)
        self._counts = np.zeros(self._pages.SUM + 1, np.int64)
        self._leaving = np.zeros(1 << 16, np.int64)
        self._spans = (self._row - 1) // _PAGE + 2  # pages of a row at most
        self._limit: int | None = None
        self._read = 0  # pages, by the last call
        self.grow(1)

    @override
    def _rows_arena(self, size: int) -> Arena:
        return DiskArena(size, self._own.folder)

    @override
    def _most_rows(self, row: int) -> int:
        return 1 << 40  # the address space decides, and then the disk

    # -- memory and disk -----------------------------------------------------------------------

    @property
    @override
    def bytes(self) -> int:
        return super().bytes + self._used()[0] - self._disk.taken(self._used()[0])

    @property
    @override
    def device_bytes(self) -> int:
        """Bytes of the rows that are on the disk only."""
        return max(self._used()[0] - self.resident_bytes, 0)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the pages that are in memory."""
        return int(self._counts[self._pages.RESIDENT]) * _PAGE

    @override
    def has_lines(self, count: int) -> bool:
        return super().has_lines(count) and self._size(count) <= self._disk.made

    def _size(self, more: int) -> int:
        """Bytes of the rows with so many new ones, which take the free slots first."""
        return (self.next_slot + max(more - self.free, 0)) * self._row

    @override
    def grow(self, more: int) -> None:
        self._disk.grow(self._size(more))
        if len(self._states) < self._disk.made // _PAGE:
            self._states = np.append(
                self._states, np.zeros(self._disk.made // _PAGE - len(self._states), np.uint8)
            )

    @override
    def keep_ahead(self, room: int | None = None) -> None:
        super().keep_ahead(room)
        if room is None:
            self._limit = None
            return
        mine = self._disk.taken(self._used()[0])
        self._limit = max(room + mine - self._own.taken(besides=self._table), LEAST) // _PAGE

    # -- pages ---------------------------------------------------------------------------------

    def use(self, slots: Ids) -> None:
        """Have the pages of these rows in memory, and let others go if there are too many."""
        self._let_go()
        cold = np.empty(len(slots) * self._spans, np.int64)
        start = time.perf_counter()
        arguments = self._disk.file, self._states, self._counts, cold
        self._read = self._pages.use(self.address, slots, *arguments)
        assert self.paging is not None
        if self._read:
            self.paging.seconds += time.perf_counter() - start
        self.paging.found = int(self._counts[self._pages.FOUND])
        self.paging.read = int(self._counts[self._pages.READ])
        self.paging.written = int(self._counts[self._pages.DROPPED])

    def use_all(self) -> None:
        """All rows are about to be read: their pages come one by one, and too many go with the next call."""
        states = self._states[: -(-self._used()[0] // _PAGE)]
        states[states == self._pages.COLD] = self._pages.IDLE
        self._counts[self._pages.RESIDENT] = np.count_nonzero(self._states)

    def _let_go(self) -> None:
        if self._limit is None:
            return
        resident = int(self._counts[self._pages.RESIDENT])
        self._own.take(self._table, self.resident_bytes)
        most = max(self._limit - self._limit // _PART - self._read, self._limit // 2)
        while resident > most:
            arguments = self._disk.file, len(self._states), most
            self._pages.sweep(self.address, *arguments, self._states, self._counts, self._leaving)
            if self._counts[self._pages.FAILED]:
                self._end()
            before, resident = resident, int(self._counts[self._pages.RESIDENT])
            if before - resident < len(self._leaving) // 2:
                return

    def _end(self) -> None:
        """End the process: rows are lost, and only a snapshot and the log have them."""
        text = f"the disk of {self._own.folder!r} does not keep the rows of table {self._table!r}"
        _log.critical("%s; start again from the log or a snapshot", text)
        sys.stderr.write(f"{text}; start again from the log or a snapshot\n")
        os._exit(1)

    # -- rows ----------------------------------------------------------------------------------

    @override
    def keep(self, ids: Ids) -> None:
        slots, unknown = self.locate(ids)
        self.use(slots)
        if unknown:
            self._pages.expect(self.address, unknown, self._states, self._counts)
        super().keep(ids)

    @override
    def keep_segments(self, first: int, last: int) -> None:
        self.use_all()
        super().keep_segments(first, last)

    @override
    def free_slots(self) -> Ids:
        slots = super().free_slots()
        self.use(slots)
        return slots

    @override
    def listed(self, first: int, last: int, step: int) -> Listed:
        """Those of a table that is not in memory as a whole come in the order of the file."""
        ids, slots, steps = super().listed(first, last, step)
        if self._limit is None or self._used()[0] <= self._limit * _PAGE:
            return ids, slots, steps
        order = np.argsort(slots)
        return ids[order], slots[order], steps[order]

    @override
    def gather(self, slots: Ids) -> Floats:
        parts = [slots[start : start + _AT_ONCE] for start in range(0, len(slots), _AT_ONCE)]
        rows = np.empty((len(slots), self._width), np.float32)
        for number, part in enumerate(parts):
            self.use(part)
            rows[number * _AT_ONCE : number * _AT_ONCE + len(part)] = super().gather(part)
        return rows

    @override
    def scatter(self, slots: Ids, rows: Floats) -> None:
        self.use(slots)
        super().scatter(slots, rows)

    @override
    def scores(self, spec: TableSpec, place: int) -> StoreScores:
        return DiskScores(spec, self, place)


class DiskScores(HostScores):
    """Scores of rows on disk: to rank them, all are read."""

    _index: DiskRowMemory

    @override
    def _rank(self, step: int, least: int, most: int, keys: Keys, ids: Ids | None = None) -> int:
        self._index.use_all()
        return super()._rank(step, least, most, keys, ids)


class DiskRowUpdate(HostRowUpdate):
    """A rule at work on rows on disk. Pushes come with `keep`, see SparseTable."""

    _index: DiskRowMemory

    @override
    def pull_into(self, ids: Ids, out: Floats) -> int:
        self._index.use(self._index.locate(ids)[0])
        return super().pull_into(ids, out)
