"""Bags in another order than that of the file, in memory that is used again."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")

from psfleet.data.feature_sets.jagged import Jagged, joined
from psfleet.data.packed_bags import PackedBags  # after the check for pyarrow

pytestmark = pytest.mark.quick

ORDER = np.random.default_rng(1).permutation(50)


def parts(values: Any, weighted: bool) -> list[Jagged]:
    """Bags of up to four of these values, in pieces of 20, 20 and 10."""
    dice, parts = np.random.default_rng(2), []
    for size in (20, 20, 10):
        lengths = dice.integers(0, 5, size)
        count = int(lengths.sum())
        weights = dice.random(count, np.float32) if weighted else None
        parts.append(Jagged(np.resize(values, count), lengths, weights=weights))
        values = np.roll(values, -count)
    return parts


def check(bags: PackedBags, parts: list[Jagged]) -> None:
    """What is made of the pieces is what indexing them gives."""
    bags.clear(len(ORDER))
    for part in parts:
        bags.append(part)
    bags.order = ORDER
    expected = joined(parts)
    for low, high in ((0, 50), (7, 8), (30, 30), (41, 50)):
        found, rows = bags[low:high], expected[ORDER[low:high]]
        assert found.values.dtype == rows.values.dtype
        assert found.values.tolist() == rows.values.tolist()
        assert found.lengths.tolist() == rows.lengths.tolist()
        assert (found.weights is None) == (rows.weights is None)
        if found.weights is not None and rows.weights is not None:
            assert found.weights.tolist() == rows.weights.tolist()


VALUES = {
    "small": np.arange(-70, 70),
    "edges": np.array([2**31 - 1, -(2**31), 5]),
    "wide": np.array([2**31, 3]),
    "negative": np.array([-(2**31) - 1, 3]),
    "late": np.arange(2**31 - 60, 2**31 + 80),
    "int32": np.arange(140, dtype=np.int32),
    "int16": np.arange(140, dtype=np.int16),
    "texts": np.array([f"t{i}" for i in range(140)], object),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_order(values: Any, weighted: bool) -> None:
    """Bags of every type, and ids that do or do not fit in 32 bits, come in the order that is asked for."""
    check(PackedBags(), parts(values, weighted))


def test_memory_is_used_again() -> None:
    """It takes row groups one after the other, whatever the one before was like."""
    bags = PackedBags()
    for name in ("small", "late", "small", "int32", "texts", "edges"):
        check(bags, parts(VALUES[name], weighted=name == "small"))
