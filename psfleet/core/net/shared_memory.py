"""Memory that a worker and a server on one host share, so that tensors need no copy through gRPC.

The worker makes an anonymous file in memory and says under which descriptor of which process it is
found; the server opens it through /proc, which the kernel allows to the same user only. There is no
name in any file system: when both processes have let go of it, or have been killed, it is gone.

The file is sealed: nobody can make it shorter, so a mapping of it can never fault. Its pages are
taken when it is made, and only out of memory that is free: the kernel would rather end a process
than refuse them.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import FrameError
from psfleet.core.base.memory import available_memory

FIRST = 64
"""Offset of the first byte that calls may use."""

_TOKEN = 16
_SEALS = 0x0004 | 0x0002 | 0x0001  # F_SEAL_GROW, F_SEAL_SHRINK, F_SEAL_SEAL
_ADD_SEALS, _GET_SEALS = 1033, 1034  # F_ADD_SEALS, F_GET_SEALS
_SHARE = 4  # take at most one part in so many of the memory that is available
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """Location of a memory.

    Attributes:
        boot: The kernel's boot id, which differs on another host.
        pid, descriptor: The process that holds it, and its descriptor there.
        size: Its size in bytes.
        token: Its first bytes, by which it is recognised.
    """

    boot: str
    pid: int
    descriptor: int
    size: int
    token: bytes


class SharedMemory:
    """A mapped piece of memory. It goes when the last array in it is gone.

    Attributes:
        bytes: All of it.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self.bytes = np.frombuffer(mmap.mmap(descriptor, size, flags=flags), np.uint8)
        self._size = size

    def __len__(self) -> int:
        return self._size

    def part(self, offset: int, size: int) -> NDArray[np.uint8]:
        """Return `size` bytes from `offset` on, writable.

        Raises:
            FrameError: They lie outside of the memory.
        """
        if not FIRST <= offset <= self._size - size:
            raise FrameError(
                f"{size} bytes at {offset} lie outside of the {self._size} bytes of shared memory"
            )
        return self.bytes[offset : offset + size]

    @classmethod
    def make(cls, size: int) -> "tuple[SharedMemory, MemoryHandle] | None":
        """New memory and the offer of it, whose descriptor the caller closes; None: not to be had."""
        if not sys.platform.startswith("linux") or size > available_memory() // _SHARE:
            return None
        with contextlib.suppress(OSError):
            descriptor = os.memfd_create("psfleet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.fchmod(descriptor, 0o600)
                os.posix_fallocate(descriptor, 0, size)
                fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
                memory = cls(descriptor, size)
            except BaseException:
                os.close(descriptor)
                raise
            token = secrets.token_bytes(_TOKEN)
            memory.bytes[:_TOKEN] = np.frombuffer(token, np.uint8)
            return memory, MemoryHandle(_boot(), os.getpid(), descriptor, size, token)
        return None

    @classmethod
    def open(cls, offer: MemoryHandle) -> "SharedMemory | None":
        """Return the memory of another process; None if it is on another host, of another user or not it."""
        if offer.boot != _boot() or not offer.boot or len(offer.token) != _TOKEN:
            return None
        with contextlib.suppress(OSError):
            path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if not _is_ours(descriptor, offer.size):
                    return None
                memory = cls(descriptor, offer.size)
            finally:
                os.close(descriptor)
            return memory if memory.bytes[:_TOKEN].tobytes() == offer.token else None
        return None


class BlockAllocator:
    """Deals out places of a memory; a place given back is dealt again first, while it is in cache."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._next = FIRST
        self._free: dict[int, list[int]] = {}
        self._sizes: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """Offset of a place for so many bytes, on a cache line; None: there is none left."""
        # Sizes are rounded up by at most an eighth, so that those of one step fit those of the next.
        unit = 64 if nbytes < 1024 else 1 << nbytes.bit_length() - 4
        length = max(-(-nbytes // unit), 1) * unit
        free = self._free.get(length)
        if free:
            offset = free.pop()
        elif self._next + length <= self.size:
            offset, self._next = self._next, self._next + length
        else:
            return self._take_larger(length)
        self._sizes[offset] = length
        return offset

    def _take_larger(self, size: int) -> int | None:
        """Return a free place that is larger than it must be; None: there is none."""
        larger = [wide for wide, free in self._free.items() if free and wide > size]
        if not larger:
            return None
        wide = min(larger)
        offset = self._free[wide].pop()
        self._sizes[offset] = wide
        return offset

    def give(self, offset: int) -> None:
        """Give a place back."""
        self._free.setdefault(self._sizes.pop(offset), []).append(offset)

    @property
    def taken(self) -> int:
        """Number of places in use."""
        return len(self._sizes)


def _is_ours(descriptor: int, size: int) -> bool:
    """Return whether it is memory of this user, of that size, that cannot shrink."""
    status = os.fstat(descriptor)
    seals = fcntl.fcntl(descriptor, _GET_SEALS)  # fails for anything but memory
    return (
        status.st_uid == os.geteuid()
        and status.st_size == size > FIRST
        and seals & _SEALS == _SEALS
    )


@cache
def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
