"""The changes of a shard's tables that followers ask for: a limited number, and none while nobody asks."""

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.follower_changes import ChangeLog
from psfleet.core.engine.shard.shard_tables import ShardTables
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.sparse import SparseTable

pytestmark = pytest.mark.quick

Ids = NDArray[np.int64]

SGD = make_rule("sgd", {})
SPECS = {key: TableSpec(f"table {key}", "sparse", (2,), SGD) for key in (1, 2)}
DENSE = 3


class Trained:
    """Two sparse tables of 100 rows and a dense one, with a log of their changes."""

    def __init__(self, limit: int = 1000) -> None:
        self.tables = ShardTables(0, 1)
        self.tables.changes = self.log = ChangeLog(limit)
        for key, spec in SPECS.items():
            self.tables[key] = SparseTable(spec)
            self.push(key, *range(100))
        self.tables[DENSE] = DenseTable(
            TableSpec("dense", "dense", (3,), SGD), np.zeros(3, np.float32)
        )

    def sparse(self, key: int) -> SparseTable:
        """A table."""
        table = self.tables[key]
        assert isinstance(table, SparseTable)
        return table

    def push(self, key: int, *ids: int) -> None:
        """Update rows."""
        given = np.array(ids)
        self.sparse(key).push(given, np.ones((len(ids), 2), np.float32), 0.1)
        given[:] = 0  # arrays are the caller's

    def since(self, version: int) -> dict[int, tuple[list[int], list[int]] | None] | None:
        """By table the ids that changed and those that have gone, ascending."""
        changed = self.log.since(version, self.tables)
        if changed is None:
            return None
        return {
            key: None
            if each is None
            else (sorted(each.ids.tolist()), sorted(each.removed.tolist()))
            for key, each in changed.items()
        }


def test_since() -> None:
    """Each question gets what changed since a version, by table, each id once, and what has gone."""
    job = Trained()
    assert not job.log.is_kept
    assert job.since(0) is None
    first = job.log.version
    job.push(1, 3, 1)
    job.push(2, 7)
    assert job.since(first) == {1: ([1, 3], []), 2: ([7], [])}
    second = job.log.version
    job.push(1, 2, 3)
    job.sparse(2).remove(np.array([7, 8, 5000]))
    job.push(2, 8)
    assert job.since(second) == {1: ([2, 3], []), 2: ([8], [7])}
    assert job.since(first) == {1: ([1, 2, 3], []), 2: ([8], [7])}
    assert job.since(job.log.version) == {}
    assert job.since(job.log.version + 1) is None
    dense = job.tables[DENSE]
    assert isinstance(dense, DenseTable)
    dense.push(np.ones(3, np.float32), 0.1)
    job.sparse(1).restore_step(9)
    assert job.since(second) == {1: None, 2: ([8], [7]), DENSE: None}


@pytest.mark.parametrize("count", [1, 10])
def test_most_of_a_table(count: int) -> None:
    """Of a table of which pushes name a large part no ids are kept: its stamps say which they were."""
    job, everything = Trained(limit=60), range(0, 100, 2)
    job.since(0)
    before = job.log.version
    for place in range(count):
        job.push(1, *everything[place::count])
        assert count > 1 or job.log._count == 0
    job.sparse(1).remove(np.array([2, 50]))
    job.push(1, 2, 500)
    assert job.since(before) == {1: (sorted({*everything, 500} - {50}), [50])}
    job.push(1, 1)
    assert job.since(job.log.version) == {1: ([1], [])}


def test_limit() -> None:
    """Of too many ids the oldest are forgotten, and whoever needs them is told that they are not known."""
    job = Trained(limit=10)
    job.since(0)
    versions = []
    for low in range(0, 40, 4):
        versions.append(job.log.version)
        job.push(1, *range(low, low + 4))
        job.since(job.log.version)
    assert job.since(versions[-3]) is None
    assert job.since(versions[-2]) == {1: ([*range(32, 40)], [])}
    gone = np.arange(11)
    job.sparse(1).remove(gone)  # more than it may hold between two questions
    assert job.since(versions[-1]) is None
    assert job.since(job.log.version) == {}


def test_nobody_asks() -> None:
    """16 times as many changes as it may hold without a question: it keeps nothing until the next one."""
    job = Trained(limit=10)
    job.since(0)
    last = job.log.version
    for _ in range(40):
        job.push(1, *range(4))
    assert job.log.is_kept
    job.push(1, 1)
    assert not job.log.is_kept
    assert job.since(last) is None
    assert job.log.is_kept
    assert job.since(job.log.version) == {}
