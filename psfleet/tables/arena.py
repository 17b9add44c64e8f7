"""Reserved memory: an address range as large as a table may become, paid for page by page."""

import ctypes
import mmap
from contextlib import suppress

from psfleet.errors import UsageError
from psfleet.tables.page_maker import make_pages

__all__ = ["AHEAD", "Arena"]

_NORESERVE = 0x4000  # MAP_NORESERVE: address space only, else the kernel refuses large reservations
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_PAGE = 2 << 20  # a huge page
_SMALL = 4 << 20  # below this much use nothing is made in advance
AHEAD = 64 << 20  # and never more than this,
_PART = 64  # nor than one in so many of the bytes in use, in whole pages
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Arena:
    """A range of zero bytes that never moves.

    Huge pages more than halve the cost of a random row, but one of them is more than a small table needs.
    So the arena uses ordinary pages until it holds more than one huge page.

    Attributes:
        address: Of the first byte; at the start of a page.
        size: In bytes.
    """

    def __init__(self, size: int) -> None:
        size = -(-max(size, 1) // _PAGE) * _PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        try:
            self._map = mmap.mmap(-1, size, flags=flags)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"cannot reserve {size} bytes of address space for a table ({error}); "
                "give it fewer rows or raise the limit (ulimit -v)"
            ) from error
        self.size = size
        self._made = 0
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._page = mmap.PAGESIZE
        self._advise("MADV_NOHUGEPAGE")

    def expect(self, used: int) -> None:
        """Prepare for the first `used` bytes being in use. Call it before they are written."""
        if used > _PAGE > self._page:
            self._page = _PAGE
            self._advise("MADV_HUGEPAGE")

    def populate(self, start: int, end: int) -> bool:
        """Have the pages of bytes start to end made now, not at first use. False: the kernel cannot.

        Zeroing a huge page takes 2 ms: too long for a push that happens to be the first to use it.
        """
        self.expect(end)
        first = start // _PAGE * _PAGE
        size = min(-(-end // _PAGE) * _PAGE, self.size) - first
        if first + size > self._made:  # what was ordered in advance counts already
            self._made = first + size
        return size <= 0 or _libc.madvise(self.address + first, size, _POPULATE_WRITE) == 0

    def taken(self, used: int) -> int:
        """Memory that the arena takes when its first `used` bytes are in use: whole pages."""
        used = max(used, self._made)
        page = _PAGE if used > _PAGE else self._page
        return -(-used // page) * page

    def keep_ahead(self, used: int, most: int = AHEAD) -> None:
        """Have pages behind the first `used` bytes, `most` at most, made by a thread. They count as taken.

        Each by itself: the kernel holds a lock meanwhile that a push needs for its large arrays.
        """
        if used < _SMALL:
            return
        ahead = min(max(used // _PART, _PAGE), AHEAD, most) // _PAGE * _PAGE
        if not ahead or used + ahead // 2 < self._made:
            return
        start, self._made = max(used, self._made), used + ahead
        for page in range(start // _PAGE * _PAGE, used + ahead, _PAGE):
            make_pages(self.populate, page, page + _PAGE)

    def _advise(self, name: str) -> None:
        """Tell the kernel, where it knows this advice: one that has no huge pages refuses it."""
        if hasattr(mmap, name):
            with suppress(OSError):
                self._map.madvise(getattr(mmap, name))
