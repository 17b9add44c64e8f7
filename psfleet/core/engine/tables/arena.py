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
_PAGE = 2 << 20  # a huge page
_SMALL = 4 << 20  # an arena with fewer bytes in use allocates no pages in advance
AHEAD = 64 << 20  # largest number of bytes that are allocated in advance
_PART = 64  # 1/64 of the bytes in use is allocated in advance, but at least one huge page
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
        first = start // _PAGE * _PAGE
        size = min(-(-end // _PAGE) * _PAGE, self.size) - first
        if first + size > self._made:  # else `keep_ahead` has counted these pages
            self._made = first + size
        return size <= 0 or _libc.madvise(self.address + first, size, _POPULATE_WRITE) == 0

    def bytes_of(self, end: int) -> int:
        """Return the memory that the arena takes if its first `end` bytes are in use, in whole pages."""
        end = max(end, self._made)
        page = _PAGE if end > _PAGE else self._page
        return -(-end // page) * page

    def keep_ahead(self, end: int, most: int = AHEAD) -> None:
        """Let the background thread allocate up to `most` bytes of pages behind the first `end` bytes.

        `bytes_of` includes these pages at once. Each page is a separate request: Linux holds a lock of the
        address space while it allocates pages, and a push needs that lock to map its large arrays.
        """
        if end < _SMALL:
            return
        ahead = min(max(end // _PART, _PAGE), AHEAD, most) // _PAGE * _PAGE
        if not ahead or end + ahead // 2 < self._made:
            return
        start, self._made = max(end, self._made), end + ahead
        for page in range(start // _PAGE * _PAGE, end + ahead, _PAGE):
            make_pages(self.populate, page, page + _PAGE)

    def _advise(self, name: str) -> None:
        """Call madvise with the flag of this name.

        A system without huge pages refuses the call, which does no harm.
        """
        if hasattr(mmap, name):
            with suppress(OSError):
                self._map.madvise(getattr(mmap, name))


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
