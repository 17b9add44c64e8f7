"""Rows on disk: DiskArena maps an unnamed file, and MappedRowMemory stores a whole table in one.

The files have no name, so Linux deletes them when the process ends, even if it is killed. DiskRowMemory
(disk_rows.py) uses an arena whose first bytes are memory, and moves rows between memory and file.
MappedRowMemory is for rules that update every row at each step: moving single rows would gain nothing there.

    address   |  memory (near bytes)  |  file, mapped: made bytes exist, the rest may not be touched  |

If a mapped page cannot be read, Linux sends SIGBUS. The rows of that page are lost, so the signal handler
ends the process (`end_for`), and a restart restores the rows from the log or a snapshot. If a page that was
changed through the map cannot be written, Linux keeps quiet and may read its old bytes again later. So
`drop` and `has_lost_writes` ask for such errors, and their callers end the process too.

**Map and direct transfers of one file.** DiskRowMemory reads and writes its rows past the page cache
(`transfer`, O_DIRECT), and a few kernels use the map of the same file, whose pages are in the page cache.
open(2) advises against that mixture. These rules keep the two the same:

- No access through the map overlaps a transfer in time: both are made under the lock of the table, and the
  background thread of arena.py allocates no pages of the file. Overlapping, a fault could read a page just
  before a transfer writes it, and Linux might then write the old page over the new rows.
- A kernel that changes rows of the file through the map (`decay`) is followed by `drop`, which waits until
  the changed pages are on the disk, where transfers read them. One that only reads (`rank`) is too.
- `drop` may leave pages in the page cache, as Linux takes it for advice. These pages are not changed, and
  Linux removes those that a direct write overlaps, before and after the write. So the next access through
  the map reads a block's new rows, not those that it had before it was used again.
"""

import ctypes
import math
import mmap
import os
import signal
import tempfile
import weakref
from contextlib import suppress
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import UsageError
from psfleet.core.base.logs import log_of
from psfleet.core.engine.kernels.generate import static_kernels
from psfleet.core.engine.kernels.initial_values import address_of
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.arena import AHEAD, DONT_NEED, Arena
from psfleet.core.engine.tables.budget import MemoryBudget
from psfleet.core.engine.tables.host_rows import HostRowMemory
from psfleet.core.engine.tables.row_data import PackedRows

Ids = NDArray[np.int64]
_log = log_of(__name__)

PAGE = 4096
"""Unit of transfers past the page cache, in bytes. Pages of memory may be larger (`mmap.PAGESIZE`)."""
LEAST = 4 << 20
"""Bytes of rows that each table on disk may always hold in memory, even if memory is short.

Without it, a table would keep next to no rows in memory once other tables have taken all of it. The number
has not been measured.
"""
# A file grows by at least 1 MiB, because each growth of a small file would allocate a few pages and copy two
# arrays (DiskRowMemory.grow). Not measured.
_LEAST_GROWTH = 1 << 20
_PART = 16  # a file grows by 1/16 more than is needed, so that it grows seldom
_MAP_FIXED = 0x10
_WRITTEN = 1 | 2 | 4  # SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE, _WAIT_AFTER
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long
_folders: set[str] = set()  # folders of all files, for the message when a page cannot be read


def _end_at_fault(number: int) -> None:
    """End the process after SIGBUS: a mapped page of a file cannot be read."""
    end_for(
        f"the disk of {', '.join(map(repr, sorted(_folders)))} does not give back rows of tables"
    )


def end_for(why: str) -> NoReturn:
    """Log the reason and end the process: it has lost rows that only the log or a snapshot can restore."""
    text = f"{why}; start again from the log or a snapshot"
    _log.critical(text)
    # Written as well as logged: without servers this ends a user's script, which may have sent psfleet's log
    # elsewhere. (ServerLog._sync, which only logs, runs in a server, whose log is its standard error.)
    os.write(2, f"{text}\n".encode())
    os._exit(1)


def end_for_rows(folder: str, table: str) -> NoReturn:
    """End the process because the disk has not taken, or does not return, rows of this table."""
    end_for(f"the disk of {folder!r} does not keep the rows of table {table!r}")


# Installed with libc's `signal`: a handler set through Python's `signal` module runs only between bytecodes,
# and the faulting instruction would be retried for ever. Kept in a global so that it is not collected.
#
# Python may run in this handler, because the fault comes from the instruction that reads the map: in a kernel
# or in a copy of NumPy, never within malloc, the interpreter or the log. ctypes takes the GIL if the thread
# does not hold it, and the handler never returns.
_fault = ctypes.CFUNCTYPE(None, ctypes.c_int)(_end_at_fault)


class DiskArena(Arena):
    """Address range whose first `near` bytes are memory, and whose remaining bytes map an unnamed file.

    Only the part of the file that `grow` has allocated may be accessed.

    Args:
        size: Bytes of the range, memory and file together.
        near: Bytes of memory at the start, in whole pages.
        folder: Folder of the file.
        row: Bytes of a row, for `transfer`.

    Attributes:
        made: Bytes of the file that are allocated on the disk.

    Raises:
        UsageError: The file cannot be made in this folder, or cannot be mapped.
    """

    def __init__(self, size: int, near: int, folder: str, row: int = 0) -> None:
        super().__init__(size)
        self.made = 0
        self._near, self._folder, self._row = near, folder, row
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder, prefix="psfleet-rows-", buffering=0) as file:
                # A bare descriptor that a finalizer closes: a file object that is collected open warns.
                self._file = self._direct = os.dup(file.fileno())
        except OSError as error:
            raise UsageError(f"cannot make a file for rows in {folder!r}: {error}") from error
        weakref.finalize(self, os.close, self._file)  # closes the file when the arena is collected
        # A second descriptor bypasses the page cache, so that rows are not in memory twice. Not every file
        # system supports O_DIRECT; then `_direct` remains the ordinary descriptor.
        with suppress(OSError):
            self._direct = os.open(f"/proc/self/fd/{self._file}", os.O_RDWR | os.O_DIRECT)
            weakref.finalize(self, os.close, self._direct)
        where = self.address + near, self.size - near, mmap.PROT_READ | mmap.PROT_WRITE
        if _libc.mmap(*where, mmap.MAP_SHARED | _MAP_FIXED, self._file, 0) != where[0]:
            why = os.strerror(ctypes.get_errno())
            raise UsageError(f"cannot map a file of {folder!r} into memory: {why}")
        _libc.madvise(
            where[0], where[1], mmap.MADV_RANDOM
        )  # no read-ahead: rows are read one by one
        _folders.add(folder)
        _libc.signal(signal.SIGBUS, _fault)
        self._kernels = static_kernels("disk_rows")
        self._context = ctypes.c_long()
        self._work = np.zeros(0, np.uint8)

    def grow(self, end: int) -> None:
        """Allocate at least the first `end` bytes of the file on the disk.

        The bytes are really allocated, not left as holes of a sparse file. So a full disk refuses a push
        here, instead of ending the process later, when a write through the map fails.

        Raises:
            UsageError: The disk is full; nothing was changed.
        """
        if end <= self.made:
            return
        # Try to allocate some bytes in reserve first, then only the bytes that are needed.
        for size in (self.size_when_grown(end), -(-end // PAGE) * PAGE):
            try:
                os.posix_fallocate(self._file, self.made, size - self.made)
            except OSError as error:
                why = error.strerror
                os.ftruncate(self._file, self.made)  # a failed call may have allocated a part
            else:
                self.made = size
                return
        raise UsageError(
            f"the rows on disk in {self._folder!r} cannot grow to {end / 2**20:,.1f} MiB: {why}. Make room "
            "there, use more servers, or let rows go (entry=CapacityEntry())"
        )

    def size_when_grown(self, end: int) -> int:
        """Return the file's size after growth to `end` bytes: whole pages, and up to 64 MiB in reserve."""
        ahead = min(max(end // _PART, _LEAST_GROWTH), AHEAD, self.size - self._near - end)
        return -(-(end + ahead) // PAGE) * PAGE

    def transfer(self, writes: bool, offsets: Ids, places: Ids, sizes: Ids | None = None) -> bool:
        """Read ranges of the file into memory, or write them from memory. Requests run many at a time.

        Args:
            writes: True to write, False to read.
            offsets: Offset of each range in the file: int64 [n].
            places: Address of each range in memory: int64 [n].
            sizes: Bytes of each range: whole pages, less than 2 GiB, because Linux moves no more at once.
                Offsets and addresses are then multiples of the page size. None for ranges of one row each at
                any offset and address; these are read through page buffers unless a row consists of pages.

        Returns:
            True if all requests succeeded.
        """
        if not len(self._work):
            self._set_up_requests()
        work, pages = self._places
        # Page buffers are for reads: a write would send what a buffer holds from an earlier read.
        assert sizes is not None or not writes
        if sizes is not None or self._row % PAGE == 0:
            pages = 0  # no page buffers: the ranges are aligned
        if sizes is None:
            sizes = np.full(len(offsets), self._row, np.int64)
        where = self._context.value, self._direct, int(writes)
        count = self._kernels.transfer(*where, offsets, sizes, places, work, pages)
        return bool(count == len(offsets))

    def _set_up_requests(self) -> None:
        """Allocate buffers and set up asynchronous I/O (io_setup).

        If Linux refuses, because the system has too many requests reserved, `transfer` makes its requests one
        by one.
        """
        kernels = self._kernels
        words = kernels.AT_ONCE * (kernels.REQUEST + kernels.EVENT + 16)
        pages = kernels.AT_ONCE * (-(-self._row // PAGE) + 1) * PAGE
        self._work = np.zeros(words + PAGE + pages, np.uint8)
        work = address_of(self._work)
        self._places = work, -(-(work + words) // PAGE) * PAGE
        if kernels.SETUP >= 0:
            status = _libc.syscall(kernels.SETUP, kernels.AT_ONCE, ctypes.byref(self._context))
            if status == 0:
                # io_destroy, so that the requests of a dropped table do not stay reserved
                end = kernels.SETUP + 1
                weakref.finalize(self, _libc.syscall, end, ctypes.c_long(self._context.value))

    def drop(self) -> bool:
        """Write the pages that were changed through the map, and remove all pages of the file from memory.

        Returns:
            True if all pages that were changed until now have been written.
        """
        # The order matters: write, then unmap, because Linux drops only clean, unmapped pages.
        success: bool = _libc.sync_file_range(self._file, 0, self.made, _WRITTEN) == 0
        self.unmap()
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        return success

    def unmap(self) -> None:
        """Remove the pages of the file from this process's page table. Linux writes changed pages later."""
        _libc.madvise(self.address + self._near, self.made, DONT_NEED)

    def has_lost_writes(self) -> bool:
        """Return whether Linux failed to write pages, changed through the map, since this was last asked.

        Linux regards such pages as written. When it needs their memory, their changes are gone.
        """
        # A range behind the file has nothing to write, and the call reports errors of the whole file.
        return bool(_libc.sync_file_range(self._file, self.size, 1, _WRITTEN))

    @override
    def bytes_of(self, end: int) -> int:
        # A table is charged for the memory that it may always use. What it uses beyond is what others leave
        # free, and it gives that back when they need it (`DiskRowMemory.keep_ahead`).
        return min(super().bytes_of(end), LEAST)

    def near_bytes_of(self, end: int) -> int:
        """Return the memory that the first `end` bytes take, without the upper limit of `bytes_of`."""
        return super().bytes_of(end)


class MappedRowMemory(HostRowMemory):
    """Rows on disk for a table whose rule changes all rows in each update. Kernels use them through the map.

    DiskRowMemory explains the arguments.
    """

    def __init__(
        self, spec: TableSpec, max_rows: int, host: MemoryBudget, own: MemoryBudget
    ) -> None:
        self._folder, self._table = own.folder, spec.name
        super().__init__(PackedRows(spec).width, max_rows, True, spec.entry is not None)
        assert isinstance(self._rows, DiskArena)
        self._disk = self._rows
        self.grow(1)  # so that a disk without space is reported now

    @override
    def _rows_arena(self, size: int) -> Arena:
        return DiskArena(size, 0, self._folder)

    @override
    def _most_rows(self, row: int) -> int:
        return 1 << 40

    @override
    def has_lines(self, count: int) -> bool:
        return super().has_lines(count) and self._size(count) <= self._disk.made

    def _size(self, new_rows: int) -> int:
        """Return the bytes of all rows after adding `new_rows` rows, which use the free slots first."""
        return (self.next_slot + max(new_rows - self.free, 0)) * self._row

    @override
    def grow(self, more: int) -> None:
        self._disk.grow(self._size(more))

    @override
    def reserve(self, rows: int) -> None:
        self.grow(max(rows - len(self), 0))

    @override
    def keep_ahead(self, available: int | None = None) -> None:
        # Index lines are allocated ahead; rows are not, since the arena of the rows has no memory of its own.
        super().keep_ahead(available)
        # Kernels read and write all rows through the map, and Linux keeps their pages in memory. Drop the
        # pages if the budget has no memory for all of them.
        if available is not None and self._disk.made > available:
            lost = not self._disk.drop()
        else:
            lost = self._disk.has_lost_writes()
        if lost:
            end_for_rows(self._folder, self._table)


def row_pad(spec: TableSpec) -> int:
    """Return the bytes that a table on disk leaves unused behind each row, for blocks of up to 64 pages.

    These are 0 if every push updates all rows, which are then not moved by blocks.
    """
    # Rows fill whole pages after at most 64 pages if each begins at a multiple of a power of two that is at
    # least 1/64 of its length. So less than 1/32 is unused, and nothing in rows of up to 256 bytes. With more
    # pages less would be unused, but blocks, which are written whole, would be longer. Not compared.
    row = PackedRows(spec).width * 4
    return 0 if spec.every_row else -row % min(1 << (-(-row // 64) - 1).bit_length(), PAGE)


def block_rows(row: int) -> int:
    """Return the smallest number of rows that fills whole pages, for rows of `row` bytes."""
    return PAGE // math.gcd(row, PAGE)
