"""Memory shared by a worker and a server on one host, so that tensors need not be copied through a socket.

The worker creates an anonymous file in memory (memfd). It sends a MemoryHandle to the server, with the id of
its process and the file's descriptor in that process. The server opens /proc/PID/fd/N, which the kernel
allows only for processes of the same user. The file has no name in any file system, so it disappears when
both processes have closed it or have been killed.

The file is sealed, so that its size cannot change. Otherwise a worker could shorten it, and the server would
be killed by SIGBUS when it accesses the missing pages. All pages are allocated at creation, and only if
plenty of memory is free. Otherwise the kernel might have no page later, and would kill a process.
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
"""Offset of the first byte that calls may use. The bytes before it are reserved for the token."""

_TOKEN = 16
_SEALS = 0x0004 | 0x0002 | 0x0001  # F_SEAL_GROW, F_SEAL_SHRINK, F_SEAL_SEAL
_ADD_SEALS, _GET_SEALS = 1033, 1034  # F_ADD_SEALS, F_GET_SEALS
_SHARE = 4  # one memory may take at most 1/4 of the memory that is available; not measured
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """Location of a shared memory, which its creator sends to the other process.

    Attributes:
        boot: Boot id of the kernel, which differs on every other host.
        pid, descriptor: Process that created the memory, and the file's descriptor in that process.
        size: Size in bytes.
        token: Random first bytes of the memory. They prove that the right file was opened.
    """

    boot: str
    pid: int
    descriptor: int
    size: int
    token: bytes


class SharedMemory:
    """A memory-mapped file that two processes share. It is unmapped once no array views it any longer.

    Attributes:
        bytes: The whole memory, as a writable array.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self.bytes = np.frombuffer(mmap.mmap(descriptor, size, flags=flags), np.uint8)
        self._size = size

    def __len__(self) -> int:
        return self._size

    def part(self, offset: int, size: int) -> NDArray[np.uint8]:
        """Return a writable view of `size` bytes from `offset` on.

        Raises:
            FrameError: The bytes lie outside of the memory.
        """
        if not FIRST <= offset <= self._size - size:
            raise FrameError(
                f"{size} bytes at {offset} lie outside of the {self._size} bytes of shared memory"
            )
        return self.bytes[offset : offset + size]

    @classmethod
    def make(cls, size: int) -> "tuple[SharedMemory, MemoryHandle] | None":
        """Create a memory of `size` bytes.

        Returns None if it would be too large or the system has no such memory.

        The caller must close the handle's descriptor once the other process has opened the memory.
        """
        if not sys.platform.startswith("linux") or size > available_memory() // _SHARE:
            return None
        with contextlib.suppress(OSError):
            descriptor = os.memfd_create("psfleet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                # Linux creates it with mode 0o777. A second guard, beside the check of processes under /proc.
                os.fchmod(descriptor, 0o600)
                # Allocate all pages before sealing, so that neither process can access a page that does not
                # exist.
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
        """Map the memory that another process has created, or return None if that is impossible.

        It is impossible if the memory is on another host or belongs to another user, or if the process that
        created it has ended. The token is checked because the process id and the descriptor of an ended
        process may by now refer to another process or file.
        """
        if offer.boot != _boot() or not offer.boot or len(offer.token) != _TOKEN:
            return None
        with contextlib.suppress(OSError):
            path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
            # O_NONBLOCK, because this may be any file by now, and some devices block when they are opened.
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
    """Allocates blocks of a shared memory. Reuses freed blocks first, because they may still be in the cache.

    Not thread-safe. A worker calls it in the training thread, where requests are filled and closed. Arrays
    that NumPy releases in other threads wait in a queue of LaneMemory until the training thread frees them.

    Sizes are rounded up to a small set of sizes, and blocks are neither split nor merged. That suits a
    training loop, whose sizes repeat from step to step.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._next = FIRST
        self._free: dict[int, list[int]] = {}
        self._sizes: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """Allocate a block of at least `nbytes`. Returns its offset, or None if no block is free.

        Blocks begin at multiples of 64 bytes, a cache line.
        """
        # Round up by at most 1/8, so that the next step's slightly different sizes can reuse the same blocks.
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
        """Allocate the smallest free block larger than `size`.

        Returns its offset, or None if there is none.
        """
        larger = [wide for wide, free in self._free.items() if free and wide > size]
        if not larger:
            return None
        wide = min(larger)
        offset = self._free[wide].pop()
        self._sizes[offset] = wide
        return offset

    def give(self, offset: int) -> None:
        """Free the block at this offset."""
        self._free.setdefault(self._sizes.pop(offset), []).append(offset)

    @property
    def taken(self) -> int:
        """Number of blocks in use."""
        return len(self._sizes)


def _is_ours(descriptor: int, size: int) -> bool:
    """Return whether the descriptor is sealed memory of this size that belongs to this user."""
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
