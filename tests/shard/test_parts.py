"""The state of a dense table is read and written in parts, whatever its size."""

import numpy as np
import pytest

from psfleet.core.base.errors import ShapeError
from psfleet.core.engine.consistency import AsyncMode
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.events import Join, PartState, SendError, SendOutcome, WriteState
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.dense import DenseTable

pytestmark = pytest.mark.quick

SPEC = TableSpec("d", "dense", (10,), make_rule("adam", {}))
ROWS = TableSpec("r", "dense", (5, 2), make_rule("rowwise_adagrad", {}))


def table(shard: Shard, spec: TableSpec) -> DenseTable:
    """The table, made if it is not there."""
    shard.create(spec, np.zeros(10, np.float32))
    found = shard.tables[spec.key]
    assert isinstance(found, DenseTable)
    return found


def test_parts_make_the_whole() -> None:
    """Pages of 4 of 10 values, with their state, in any order."""
    one, other = Shard(), Shard()
    source, target = table(one, SPEC), table(other, SPEC)
    for seed in range(3):
        source.push(np.random.default_rng(seed).standard_normal(10, np.float32), 0.1)
    for start in (8, 0, 4):
        step, values = source.part(start, start + 4)
        state = PartState(SPEC.key, step, values, start=start)
        assert isinstance(other.handle(WriteState((state,)), "call")[0], SendOutcome)
    assert target.step == 3
    for ours, theirs in zip(source.state(), target.state(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("start", "length"), [(8, 4), (11, 0), (2**63, 1), (0, 11)])
def test_parts_beyond_the_end_are_refused(start: int, length: int) -> None:
    """Nothing is changed."""
    shard = Shard()
    table(shard, SPEC)
    state = PartState(SPEC.key, 1, np.ones((3, length), np.float32), start=start)
    [refused] = shard.handle(WriteState((state,)), "call")
    assert isinstance(refused, SendError)
    assert isinstance(refused.error, ShapeError)
    assert table(shard, SPEC).step == 0


def test_rows_that_share_a_value_stay_together() -> None:
    """A rule with one state value for a row takes the whole state only."""
    shard = Shard()
    rows = table(shard, ROWS)
    rows.restore(1, list(np.ones((2, 10), np.float32)))
    with pytest.raises(ShapeError):
        rows.restore(1, list(np.ones((2, 4), np.float32)), 2)


def test_a_repeated_write_changes_nothing() -> None:
    """A write whose answer was lost comes once more, after another one, and does not undo it."""
    shard = Shard()
    target = table(shard, SPEC)
    shard.handle(Join(0, 1, AsyncMode()), "join")
    first, second = (
        WriteState((PartState(SPEC.key, 1, np.full((3, 10), number, np.float32)),), 0, 1, number)
        for number in (1, 2)
    )
    for write in (first, second, first):
        assert isinstance(shard.handle(write, "call")[0], SendOutcome)
    assert (target.state()[0] == 2).all()
