"""Reserved memory: an address range as large as a table may become, paid for page by page."""

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


_NORESERVE = 0x4000  # MAP_NORESERVE: address space only, else the kernel refuses large reservations
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_PAGE = 2 << 20  # a huge page
_SMALL = 4 << 20  # below this much use nothing is made in advance
AHEAD = 64 << 20  # and never more than this,
_PART = 64  # nor than one in so many of the bytes in use, in whole pages
_NEAR = 16  # mappings fewer than the kernel's limit
_libc = ctypes.CDLL(None, use_errno=True)


def make_pages(populate: Callable[[int, int], object], start: int, end: int) -> None:
    """Have `populate(start, end)` called by a thread, after what was requested before.

    One thread serves all tables, and ends when there is nothing to do: pages of two tables at once would
    leave no core to pushes where there are two. Does not wait until the thread runs, as
    `threading.Thread.start` does: on a busy machine for milliseconds, and a push may come here thousands
    of times in a second.
    """
    global _runs
    with _growth_lock:
        _requests.append((populate, start, end))
        if _runs:
            return
        _runs = True
    try:
        _thread.start_new_thread(_make, ())
    except RuntimeError:  # there may be no more threads; pages are then made at first use
        with _growth_lock:
            _requests.clear()  # else they would grow, and keep memory of tables that are gone
            _runs = False


def _next() -> PageRequest | None:
    """The next request; None ends the thread."""
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
    """A range of zero bytes that never moves.

    Huge pages more than halve the cost of a random row, but one of them is more than a small table needs.
    So the arena uses ordinary pages until it holds more than one huge page.

    Attributes:
        address: Address of the first byte; at the start of a page.
        size: In bytes.
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
        """Prepare for the first `end` bytes being in use. Call it before they are written."""
        if end > _PAGE > self._page:
            self._page = _PAGE
            self._advise("MADV_HUGEPAGE")

    def populate(self, start: int, end: int) -> bool:
        """Have the pages of bytes start to end made now, not at first use. False: the kernel cannot.

        Zeroing a huge page takes 2 ms: too long for a push that happens to be the first to use it.
        """
        self.expect(end)
        first = start // _PAGE * _PAGE
        size = min(-(-end // _PAGE) * _PAGE, self.size) - first
        if first + size > self._made:  # what was requested in advance counts already
            self._made = first + size
        return size <= 0 or _libc.madvise(self.address + first, size, _POPULATE_WRITE) == 0

    def taken(self, end: int) -> int:
        """Memory that the arena takes when its first `end` bytes are in use: whole pages."""
        end = max(end, self._made)
        page = _PAGE if end > _PAGE else self._page
        return -(-end // page) * page

    def keep_ahead(self, end: int, most: int = AHEAD) -> None:
        """Have pages behind the first `end` bytes, `most` at most, made by a thread. They count as taken.

        Each by itself: the kernel holds a lock meanwhile that a push needs for its large arrays.
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
        """Tell the kernel, where it knows this advice: one that has no huge pages refuses it."""
        if hasattr(mmap, name):
            with suppress(OSError):
                self._map.madvise(getattr(mmap, name))


def _why() -> str:
    """Explain why memory cannot be reserved, and what to do, as the end of a sentence."""
    with suppress(OSError):
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        with open("/proc/self/maps", "rb") as maps:
            there = sum(1 for _ in maps)
        if there > most - _NEAR:
            return (
                f"the process has {there} memory mappings and the kernel allows {most}: make fewer tables in "
                "one process, or raise the limit (sysctl vm.max_map_count)"
            )
    return "give it fewer rows or raise the limit on address space (ulimit -v)"
