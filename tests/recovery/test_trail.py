"""A log does not fill the memory of the operating system with what nobody reads."""

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from psfleet_server.durability.log import LogHeader, ServerLog, records

MIB = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def in_memory(path: Path) -> int:
    """Bytes of a file that the operating system holds in memory."""
    size = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as view:
        whole = (ctypes.c_char * size).from_buffer(view)
        assert _libc.mincore(whole, ctypes.c_size_t(size), pages) == 0, os.strerror(
            ctypes.get_errno()
        )
        del whole
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def lets_go(path: Path) -> bool:
    """Whether the file system is one of a disk: it can drop what is on it from memory."""
    with path.open("wb") as file:
        file.write(bytes(MIB))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return in_memory(path) < MIB


def open_files() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def test_what_is_on_the_disk_leaves_memory(tmp_path: Path) -> None:
    """Of a long log that is on the disk, the next records let memory go; it reads as it was written."""
    if not lets_go(tmp_path / "probe"):
        pytest.skip("files in the folder for temporary files live in memory")
    before = open_files()
    log = ServerLog(tmp_path / "log", LogHeader(server=0))
    log.forget()
    body = np.random.default_rng(1).integers(0, 256, MIB, np.uint8)
    for _ in range(20):
        log.append(4, [body])
    os.fsync(log._file)
    for _ in range(20):
        log.append(4, [body])
    log.close()
    assert in_memory(log.path) < 24 * MIB
    contents = [bytes(said) == body.tobytes() for kind, said, *_ in records(log.path) if kind]
    assert contents == [True] * 40
    assert open_files() == before
