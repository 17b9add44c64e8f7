"""Arena: an address range as large as a table may ever become, which takes physical memory page by page.

A table grows without moving: addresses in use by kernels stay valid, and no push waits for a copy of the
table. The cost is address space, which is plentiful (128 TiB for each process). One background thread of the
process allocates pages before they are needed, because zeroing a huge page takes 2 ms.
"""

import _thread
import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from psfleet.core.base.errors import UsageError

PageRequest = tuple[Callable[[int, int], object], int, int]
_requests: deque[PageRequest] = deque()
_growth_lock = threading.Lock()
_runs = False


# MAP_NORESERVE: address space only; without it Linux refuses large reservations.
_NORESERVE = 0x4000
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
DONT_NEED = 4  # MADV_DONTNEED
_PAGE = 2 << 20  # a huge page
# Pages are allocated in advance for 1/64 of the bytes in use, for at least one huge page and at most AHEAD.
# 64 MiB for every large table would be 32 bytes a row with 2 M rows. Other values have not been measured.
# Below _SMALL, a huge page in advance would be half of the memory or more.
_PART, AHEAD, _SMALL = 64, 64 << 20, 4 << 20
_NEAR = 16  # with so few mappings left below vm.max_map_count, that limit is the likely cause
_libc = ctypes.CDLL(None, use_errno=True)


def make_pages(populate: Callable[[int, int], object], start: int, end: int) -> None:
    """Have the background thread call `populate(start, end)` later.

    One thread serves all tables and ends when the queue is empty; with one thread per table, a machine with
    two cores would have no core left for pushes. The thread is started by `_thread` because
    `threading.Thread.start` waits until the thread runs: milliseconds on a busy machine, and pushes may call
    this thousands of times per second.
    """
    global _runs
    with _growth_lock:
        _requests.append((populate, start, end))
        if _runs:
            return
        _runs = True
    try:
        _thread.start_new_thread(_make, ())
    except RuntimeError:  # no more threads allowed; pages are then allocated at first use
        with _growth_lock:
            _requests.clear()  # otherwise the queue would grow, and keep arenas of dropped tables alive
            _runs = False


def _next() -> PageRequest | None:
    """Return the next request for pages, or None if the queue is empty, so that the thread ends.

    `_runs` is cleared in the same critical section that finds the queue empty, so that a request that comes
    just after starts a new thread.
    """
    global _runs
    with _growth_lock:
        if _requests:
            return _requests.popleft()
        _runs = False
        return None


def _make() -> None:
    while request := _next():
        populate, start, end = request
        populate(start, end)


_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Arena:
    """Address range of zero bytes that never moves.

    Huge pages (2 MiB) more than halve the cost of reading a random row, but even one huge page is more than a
    small table needs. So the arena uses ordinary pages until more than one huge page is in use.

    The table's thread calls all methods, under the lock of the table. The background thread runs only
    `_allocate_ahead`, which changes no attribute.

    Args:
        size: Bytes to reserve, rounded up to whole huge pages.

    Attributes:
        address: Address of the first byte, at the start of a page.
        size: Reserved bytes.

    Raises:
        UsageError: The range cannot be reserved; the message says why and what to do.
    """

    def __init__(self, size: int) -> None:
        size = -(-max(size, 1) // _PAGE) * _PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        try:
            self._map = mmap.mmap(-1, size, flags=flags)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"cannot reserve {size} bytes for a table ({error}); {_why()}"
            ) from error
        self.size = size
        # Bytes of memory. Only DiskArena has fewer than `size`, and maps a file behind them.
        self._near = size
        # Bytes that are allocated or requested from the background thread. Only the table's thread writes it.
        self._made = 0
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._page = mmap.PAGESIZE
        self._advise("MADV_NOHUGEPAGE")

    def expect(self, end: int) -> None:
        """Use huge pages from now on if the first `end` bytes need more than one.

        Call it before writing these bytes.
        """
        if end > _PAGE > self._page:
            self._page = _PAGE
            self._advise("MADV_HUGEPAGE")

    def populate(self, start: int, end: int) -> bool:
        """Allocate the pages of bytes `start` to `end` now instead of at first use.

        Zeroing a huge page takes 2 ms: too long for a push that happens to be the first to use it.

        Returns:
            False if Linux cannot do so (before 5.14); the pages are then allocated at first use.
        """
        self.expect(end)
        first, end = self._whole_pages(start, end)
        self._made = max(self._made, end)  # `keep_ahead` may have counted more
        return self._allocate(first, end)

    def _whole_pages(self, start: int, end: int) -> tuple[int, int]:
        """Return the whole huge pages that contain bytes `start` to `end`: their start and end."""
        # Linux before 6.7 may place the arena so that its real huge pages begin between these. At most one
        # huge page is then allocated before it is counted.
        return start // _PAGE * _PAGE, min(-(-end // _PAGE) * _PAGE, self._near)

    def _allocate(self, first: int, end: int) -> bool:
        """Allocate the pages of bytes `first` to `end`. Returns False if Linux cannot do so."""
        size = end - first
        return size <= 0 or _libc.madvise(self.address + first, size, _POPULATE_WRITE) == 0

    def _allocate_ahead(self, first: int, end: int) -> None:
        """Allocate pages in the background thread that `keep_ahead` has requested."""
        # The table's thread may have released the pages since (`release_behind` lowers `_made`). If
        # it does so between this comparison and the allocation, one huge page more is in use than is counted.
        if end <= self._made:
            self._allocate(first, end)

    def bytes_of(self, end: int) -> int:
        """Return the memory that the arena takes if its first `end` bytes are in use, in whole pages."""
        end = max(end, self._made)
        page = _PAGE if end > _PAGE else self._page
        return -(-end // page) * page

    def release_behind(self, end: int) -> None:
        """Release the memory after the first `end` bytes, in whole huge pages. It then reads as zeros."""
        start = -(-end // _PAGE) * _PAGE
        if start < self._near:
            _libc.madvise(self.address + start, self._near - start, DONT_NEED)
        self._made = min(self._made, start)

    def keep_ahead(self, end: int, most: int = AHEAD) -> None:
        """Let the background thread allocate up to `most` bytes of pages behind the first `end` bytes.

        `bytes_of` includes these pages at once. Each page is a separate request: Linux holds a lock of the
        address space while it allocates pages, and a push needs that lock to map its large arrays.
        """
        if end < _SMALL:
            return
        # Not beyond the memory. Behind it a DiskArena maps a file, and the head of disk_arena.py says why no
        # other thread may touch that.
        ahead = min(max(end // _PART, _PAGE), AHEAD, most, self._near - end) // _PAGE * _PAGE
        # Request pages again when half of them are in use, not at each push that takes a few bytes.
        if ahead <= 0 or end + ahead // 2 < self._made:
            return
        self.expect(end + ahead)
        start, goal = self._whole_pages(max(end, self._made), end + ahead)
        self._made = goal
        for page in range(start, goal, _PAGE):
            make_pages(self._allocate_ahead, page, min(page + _PAGE, goal))

    def _advise(self, name: str) -> None:
        """Call madvise for the memory with the flag of this name.

        A system without huge pages refuses the call, which does no harm.
        """
        if hasattr(mmap, name):
            with suppress(OSError):
                self._map.madvise(getattr(mmap, name), 0, self._near)


def _why() -> str:
    """Return the reason why memory cannot be reserved, and what to do, as the end of a sentence."""
    with suppress(OSError):
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        with open("/proc/self/maps", "rb") as maps:
            used = sum(1 for _ in maps)
        if used > limit - _NEAR:
            return (
                f"the process has {used} memory mappings and the kernel allows {limit}: make fewer tables in "
                "one process, or raise the limit (sysctl vm.max_map_count)"
            )
    return "give it fewer rows or raise the limit on address space (ulimit -v)"
