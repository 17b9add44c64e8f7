"""Reserved memory."""

import _thread
import ctypes
import re
import subprocess
import sys

import pytest

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.rules.momentum import SGD
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.arena import Arena
from psfleet.core.engine.tables.host_rows import HostRowMemory
from psfleet.core.engine.tables.sparse import SparseTable
from tests.waiting import until


def used(arena: Arena, offset: int) -> int:
    return ctypes.c_ubyte.from_address(arena.address + offset).value


def test_memory_is_zero_and_paid_for_late() -> None:
    """A terabyte may be reserved; what is touched reads as zero and keeps what is written."""
    arena = Arena(1 << 40)
    assert used(arena, (1 << 40) - 1) == 0
    ctypes.c_ubyte.from_address(arena.address + 12345).value = 7
    assert used(arena, 12345) == 7


def test_pages_are_made_ahead_by_a_thread_that_ends() -> None:
    """The thread ends by itself, keeps what is there, and small arenas have none."""
    arena, before = Arena(64 << 20), _thread._count()
    ctypes.c_ubyte.from_address(arena.address + (9 << 20)).value = 7
    arena.keep_ahead(1 << 20)
    assert _thread._count() == before
    assert arena.bytes_of(0) == 0
    arena.keep_ahead(8 << 20)
    arena.keep_ahead(8 << 20)
    until(lambda: arena.bytes_of(0) == 10 << 20)
    until(lambda: _thread._count() == before)
    assert used(arena, 9 << 20) == 7


def test_an_impossible_size_is_refused() -> None:
    """More address space than a process has is an error of its own, not a crash."""
    with pytest.raises(UsageError, match="cannot reserve"):
        Arena(1 << 60)


MAPPINGS = """
import mmap
from psfleet.core.engine.tables.arena import Arena
held = []
try:
    while True:  # neighbours of one kind are one mapping
        held.append(mmap.mmap(-1, 4096, prot=mmap.PROT_READ | (len(held) % 2) * mmap.PROT_WRITE))
except OSError:
    del held[-2:]
arenas = []
while True:
    arenas.append(Arena(1 << 21))
"""


def test_too_many_mappings_are_told_from_too_little_space() -> None:
    """The kernel gives the same error for both; ours says which limit it is."""
    ended = subprocess.run([sys.executable, "-c", MAPPINGS], capture_output=True, check=False)
    assert ended.returncode == 1
    assert re.search(
        rb"the process has \d+ memory mappings and the kernel allows \d+", ended.stderr
    )
    with pytest.raises(UsageError, match="ulimit -v"):
        Arena(1 << 60)


def test_thousands_of_tables_fit_into_the_address_space() -> None:
    """The last one may still grow to a hundred thousand rows, and much is left."""
    tables = [HostRowMemory(48, 2**28, marks=False) for _ in range(4000)]
    assert tables[0].max_rows >= tables[-1].max_rows > 100_000
    assert Arena(1 << 38).size == 1 << 38


def test_hundreds_of_tables_fit_into_the_address_space() -> None:
    """Of the widest rows too; each may still grow to gigabytes."""
    specs = [TableSpec(f"t{n}", "sparse", (1024,), SGD()) for n in range(300)]
    tables = [SparseTable(spec) for spec in specs]
    assert Arena(1 << 40).size == 1 << 40  # and much is left
    assert len(tables) == 300
