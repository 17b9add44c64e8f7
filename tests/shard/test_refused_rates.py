"""A learning rate that a table's rule refuses is refused before anything changes."""

import numpy as np
import pytest

import psfleet
from psfleet.core.base.errors import ConfigError
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.rules import Ftrl
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.events import Join, Push, Record, SendError, SendOutcome
from psfleet.core.engine.shard.shard import Shard

pytestmark = pytest.mark.quick

SPECS = TableSpec("rows", "sparse", (2,), Ftrl()), TableSpec("weights", "dense", (2,), Ftrl())


def push(sequence: int, rate: float) -> Push:
    ids, values = np.array([7]), np.ones((1, 2), np.float32)
    rows = Gradient(SPECS[0].key, values, ids, rate)
    return Push(0, 1, sequence, (rows, Gradient(SPECS[1].key, values[0], None, rate)))


def test_it_leaves_no_record() -> None:
    """A log has no push that a restart could not replay, and the number is free for the next push."""
    shard, records = Shard(workers=1), list[Record]()
    for spec in SPECS:
        shard.create(spec, np.zeros(0 if spec.kind == "sparse" else 2, np.float32))
    shard.handle(Join(0, 1, find_mode("async")), "join")
    shard.journal = records.append
    for _ in range(2):
        [refused] = shard.handle(push(1, 0.0), "refused")
        assert isinstance(refused, SendError)
        assert "Ftrl divides by the learning rate" in str(refused.error)
    assert records == []
    assert shard.handle(push(1, 0.1), "taken") == [SendOutcome("taken", "applied")]
    assert len(records) == 1


def test_no_push_is_lost_after_it() -> None:
    """Every refused push raises, and the next one counts; each second one was dropped in silence."""
    rate = psfleet.optimizer.lr.LambdaDecay(0.1, lambda epoch: 0.0 if epoch == 1 else 1.0)
    with psfleet.connect() as client:
        rows = client.sparse_table("rows", 2, psfleet.optimizer.Ftrl(rate))
        rows.push([7], np.ones((1, 2))).wait()
        before = rows.pull([7])
        rate.step()
        for _ in range(3):
            with pytest.raises(ConfigError, match="it must be above 0"):
                rows.push([7], np.ones((1, 2))).wait()
        np.testing.assert_array_equal(rows.pull([7]), before)
        rate.step()
        rows.push([7], np.ones((1, 2))).wait()
        assert (rows.pull([7]) < before).all()
