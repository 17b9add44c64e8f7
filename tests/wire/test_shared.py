"""Memory that two processes share."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psfleet.core.base.errors import FrameError
from psfleet.core.net.shared_memory import FIRST, BlockAllocator, MemoryHandle, SharedMemory
from tests.programs import PYTHONPATH

SIZE = 1 << 16


@pytest.fixture
def offered() -> Iterator[tuple[SharedMemory, MemoryHandle]]:
    """A memory, its descriptor open for the length of a test."""
    made = SharedMemory.make(SIZE)
    assert made is not None
    memory, offer = made
    yield memory, offer
    os.close(offer.descriptor)


def test_both_ends_see_the_same_bytes(offered: tuple[SharedMemory, MemoryHandle]) -> None:
    """What one mapping writes the other reads, while no file system has a name for it."""
    before = set(os.listdir("/dev/shm"))
    memory, offer = offered
    other = SharedMemory.open(offer)
    assert other is not None
    memory.part(FIRST, 24).view(np.float32)[:] = 7
    assert other.part(FIRST, 24).view(np.float32).tolist() == [7] * 6
    assert set(os.listdir("/dev/shm")) == before


def test_another_process_can_open_it(offered: tuple[SharedMemory, MemoryHandle]) -> None:
    """A process of the same user finds the memory by the offer alone and writes into it."""
    memory, offer = offered
    program = (
        "from psfleet.core.net.shared_memory import *; import numpy as np; "
        f"SharedMemory.open({offer!r}).part(FIRST, 16).view(np.int64)[:] = 5, 6"
    )
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)
    assert memory.part(FIRST, 16).view(np.int64).tolist() == [5, 6]


def test_a_wrong_offer_is_declined(offered: tuple[SharedMemory, MemoryHandle]) -> None:
    """An offer from another host, of another file, size or token opens nothing."""
    offers: dict[str, list[Any]] = {
        "boot": ["elsewhere", ""],
        "pid": [2**22 + 1],
        "descriptor": [0],
    }
    offers |= {"size": [SIZE - 1, 2**50], "token": [bytes(16), b""]}
    for name, values in offers.items():
        for value in values:
            assert SharedMemory.open(replace(offered[1], **{name: value})) is None, (name, value)


def test_a_file_that_can_shrink_is_declined() -> None:
    """Memory whose size is not sealed could be cut under the server; it is not opened."""
    descriptor = os.memfd_create("loose")
    os.ftruncate(descriptor, SIZE)
    token = os.read(descriptor, 16)
    offer = MemoryHandle(SharedMemory.make(SIZE)[1].boot, os.getpid(), descriptor, SIZE, token)  # type: ignore[index]
    try:
        assert SharedMemory.open(offer) is None
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("offset", "count"),
    [(0, 1), (FIRST - 1, 1), (SIZE - 3, 1), (SIZE, 1), (FIRST, SIZE), (2**63, 1), (FIRST, 2**62)],
)
def test_a_place_outside_is_refused(
    offered: tuple[SharedMemory, MemoryHandle], offset: int, count: int
) -> None:
    """No array reaches into the memory's head or beyond its end."""
    with pytest.raises(FrameError, match="outside of the 65536 bytes"):
        offered[0].part(offset, 4 * count)


def test_memory_that_is_not_to_be_had() -> None:
    """A size beyond the machine's memory gives nothing, before a page of it is taken."""
    assert SharedMemory.make(2**60) is None


@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=60))
def test_places_do_not_overlap(steps: list[tuple[int, bool]]) -> None:
    """Places in use never overlap and lie within the memory, whatever is taken and given."""
    blocks = BlockAllocator(SIZE)
    held: dict[int, int] = {}
    for size, give in steps:
        if give and held:
            blocks.give(held.popitem()[0])
        elif (offset := blocks.take(size)) is not None:
            held[offset] = size
    ends = sorted((low, low + size) for low, size in held.items())
    assert all(low >= FIRST and high <= SIZE and low % 64 == 0 for low, high in ends)
    assert all(high <= low for (_, high), (low, _) in itertools.pairwise(ends))
    assert blocks.taken == len(held)


def test_a_place_given_back_is_dealt_again() -> None:
    """The same few places serve call after call of about the same size."""
    blocks = BlockAllocator(SIZE)
    first = blocks.take(1000)
    assert first is not None
    blocks.give(first)
    assert blocks.take(1010) == first


def test_a_larger_place_serves_when_there_is_no_other() -> None:
    """When memory runs out of places of a size, a free one that is larger is dealt, and comes back."""
    blocks = BlockAllocator(SIZE)
    large = blocks.take(SIZE // 2)
    assert large is not None
    blocks.give(large)
    while (offset := blocks.take(64)) is not None and offset != large:
        pass
    assert offset == large
    assert blocks.take(64) is None
    blocks.give(large)
    assert blocks.take(SIZE // 2) == large
