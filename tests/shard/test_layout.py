"""How dense tables are dealt to servers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psfleet.core.engine.rules.momentum import SGD
from psfleet.core.engine.schema.table import BLOCK, TableSpec
from psfleet.core.engine.shard.table_placement import dense_ranges, split_elements

pytestmark = pytest.mark.quick


@given(size=st.integers(0, 40 * BLOCK), servers=st.integers(1, 9), name=st.text(min_size=1))
def test_ranges_partition_the_array(size: int, servers: int, name: str) -> None:
    """Every value belongs to exactly one server, in contiguous runs of whole blocks."""
    spec = TableSpec(name, "dense", (size,), SGD())
    ranges = sorted(r for r in dense_ranges(spec, servers) if r[0] < r[1])
    assert [low for low, _ in ranges] == [0, *(high for _, high in ranges)][: len(ranges)]
    assert sum(high - low for low, high in ranges) == size
    assert all(low % BLOCK == 0 for low, _ in ranges)


@given(blocks=st.integers(1, 60), servers=st.integers(1, 9))
def test_ranges_are_balanced(blocks: int, servers: int) -> None:
    """No server holds more than one block above another."""
    spec = TableSpec("w", "dense", (blocks * BLOCK,), SGD())
    counts = [(high - low) // BLOCK for low, high in dense_ranges(spec, servers)]
    assert max(counts) - min(counts) <= 1


@given(places=st.sets(st.integers(0, 10 * BLOCK - 1)), servers=st.integers(1, 5))
def test_elements_go_where_their_values_are(places: set[int], servers: int) -> None:
    """Every position is dealt once, to the server whose range has it."""
    ranges = dense_ranges(TableSpec("w", "dense", (10 * BLOCK,), SGD()), servers)
    positions = np.array(sorted(places), np.int64)
    dealt = [positions[part] for part in split_elements(positions, ranges)]
    assert sum(len(part) for part in dealt) == len(places)
    assert all(
        ((low <= part) & (part < high)).all()
        for part, (low, high) in zip(dealt, ranges, strict=True)
    )
