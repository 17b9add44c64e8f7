"""Reserved memory."""

import _thread
import ctypes

import pytest

from psfleet.errors import UsageError
from psfleet.rules.adam import Adam
from psfleet.schema.table import TableSpec
from psfleet.tables.arena import Arena
from psfleet.tables.sparse import SparseTable
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
    assert arena.taken(0) == 0
    arena.keep_ahead(8 << 20)
    arena.keep_ahead(8 << 20)
    until(lambda: arena.taken(0) == 10 << 20)
    until(lambda: _thread._count() == before)
    assert used(arena, 9 << 20) == 7


def test_an_impossible_size_is_refused() -> None:
    """More address space than a process has is an error of its own, not a crash."""
    with pytest.raises(UsageError, match="cannot reserve"):
        Arena(1 << 60)


def test_hundreds_of_tables_fit_into_the_address_space() -> None:
    """Of the widest rows too; each may still grow to gigabytes."""
    specs = [TableSpec(f"t{n}", "sparse", (1024,), Adam()) for n in range(300)]
    tables = [SparseTable(spec) for spec in specs]
    assert Arena(1 << 40).size == 1 << 40  # and much is left
    assert len(tables) == 300
