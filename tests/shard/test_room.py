"""A full table: what would overfill it is refused before anything changes."""

import numpy as np
import pytest

from psfleet.core.base.errors import UsageError
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.rules import SGD, Adam
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.events import (
    Instruction,
    Join,
    PartState,
    Pull,
    Push,
    Record,
    SendError,
    SendOutcome,
    WriteState,
)
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.sparse import SparseTable

pytestmark = pytest.mark.quick

ROWS = TableSpec("rows", "sparse", (2,), Adam(), seed=5)
OTHER = TableSpec("other", "sparse", (2,), SGD())


def make(mode: Mode, workers: int = 1) -> Shard:
    """A shard whose table `rows` has room for four."""
    shard = Shard(workers=workers)
    for spec in (ROWS, OTHER):
        shard.create(spec, np.zeros(0, np.float32))
    shard.tables[ROWS.key] = SparseTable(ROWS, max_rows=4)
    for worker in range(workers):
        shard.handle(Join(worker, 1, find_mode(mode)), "join")
    return shard


def push(sequence: int, ids: list[int], worker: int = 0) -> Push:
    values = np.ones((len(ids), 2), np.float32)
    gradients = tuple(
        Gradient(spec.key, values, np.array(ids, np.int64), 0.1) for spec in (OTHER, ROWS)
    )
    return Push(worker, 1, sequence, gradients)


def refused(instructions: list[Instruction]) -> bool:
    first = instructions[0]
    return isinstance(first, SendError) and isinstance(first.error, UsageError)


def sizes(shard: Shard) -> list[tuple[int, int]]:
    tables = [shard.tables[spec.key] for spec in (OTHER, ROWS)]
    return [(len(table), table.step) for table in tables if isinstance(table, SparseTable)]


def test_async_push_is_refused_whole() -> None:
    """No table of the push changes, nothing is recorded, and its number is free for the next push."""
    shard, records = make("async"), list[Record]()
    shard.handle(push(1, [1, 2, 3]), "a")
    shard.journal = records.append
    assert refused(shard.handle(push(2, [3, 4, 5]), "b"))
    assert (sizes(shard), shard.workers.sequences, records) == ([(3, 1), (3, 1)], {0: 1}, [])
    assert shard.handle(push(2, [3, 4]), "c") == [SendOutcome("c", "applied")]
    assert shard.handle(push(2, [3, 4]), "d") == [SendOutcome("d", "applied")]
    assert sizes(shard) == [(4, 2), (4, 2)]


def test_sync_push_is_refused_when_it_would_be_held() -> None:
    """Rows of pushes that are held already count, each id once; the round can still close."""
    shard = make("sync", workers=2)
    assert shard.handle(push(1, [1, 2, 3]), "a") == [SendOutcome("a", "held")]
    assert refused(shard.handle(push(1, [3, 4, 5], worker=1), "b"))
    assert list(shard.rounds.held) == [0]
    assert shard.handle(push(1, [2, 3, 4], worker=1), "c") == [SendOutcome("c", "held")]
    for worker in range(2):
        shard.handle(Pull(worker, 1, (), commit=1), f"pull {worker}")
    assert (sizes(shard), shard.rounds.closed) == ([(4, 1), (4, 1)], 1)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_write_is_refused_whole(mode: Mode) -> None:
    """A write of several parts that do not fit together sets none, whatever is held."""
    shard = make(mode)
    shard.handle(push(1, [1, 2]), "a")
    parts = [
        PartState(ROWS.key, 7, np.zeros((2, 6), np.float32), np.array(ids))
        for ids in ([3, 4], [5, 6])
    ]
    before = sizes(shard)
    assert refused(shard.handle(WriteState(tuple(parts), 0, 1, 1), "b"))
    assert (sizes(shard), shard.workers.writes) == (before, {0: 0})
    assert shard.handle(WriteState((parts[0],), 0, 1, 1), "c") == [SendOutcome("c")]
