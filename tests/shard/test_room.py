"""A full table: what would overfill it is refused before anything changes."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet.core.base.errors import NoRoom, UsageError
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.rules import SGD, Adam
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.entry import CountFilterEntry
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard import events
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.row_data import RowData, TableClock, row_columns
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
        shard.handle(events.Join(worker, 1, find_mode(mode)), "join")
    return shard


def push(sequence: int, ids: list[int], worker: int = 0) -> events.Push:
    values = np.ones((len(ids), 2), np.float32)
    gradients = tuple(
        Gradient(spec.key, values, np.array(ids, np.int64), 0.1) for spec in (OTHER, ROWS)
    )
    return events.Push(worker, 1, sequence, gradients)


def refused(instructions: list[events.Instruction]) -> bool:
    first = instructions[0]
    return isinstance(first, events.SendError) and isinstance(first.error, UsageError)


def sizes(shard: Shard) -> list[tuple[int, int]]:
    tables = [shard.tables[spec.key] for spec in (OTHER, ROWS)]
    return [(len(table), table.step) for table in tables if isinstance(table, SparseTable)]


def test_async_push_is_refused_whole() -> None:
    """No table of the push changes, nothing is recorded, and its number is free for the next push."""
    shard, records = make("async"), list[events.Record]()
    shard.handle(push(1, [1, 2, 3]), "a")
    shard.journal = records.append
    assert refused(shard.handle(push(2, [3, 4, 5]), "b"))
    assert (sizes(shard), shard.workers.sequences, records) == ([(3, 1), (3, 1)], {0: 1}, [])
    assert shard.handle(push(2, [3, 4]), "c") == [events.SendOutcome("c", "applied")]
    assert shard.handle(push(2, [3, 4]), "d") == [events.SendOutcome("d", "applied")]
    assert sizes(shard) == [(4, 2), (4, 2)]


def test_deltas_give_every_id_a_row() -> None:
    """In geo mode the entry of a table admits every id, so each id needs room, also one that a push would
    not give a row yet. Otherwise the first table had its part of the push when the second refused its own."""
    spec = dataclasses.replace(ROWS, entry=CountFilterEntry(3))
    shard, records = make("geo"), list[events.Record]()
    shard.tables[ROWS.key] = SparseTable(spec, max_rows=4)
    shard.handle(push(1, [1, 2, 3]), "a")
    shard.journal = records.append
    assert refused(shard.handle(push(2, [3, 4, 5]), "b"))
    assert (sizes(shard), records, shard.torn) == ([(3, 1), (3, 1)], [], None)
    assert shard.handle(push(2, [3, 4]), "c") == [events.SendOutcome("c", "applied")]
    assert sizes(shard) == [(4, 2), (4, 2)]


def test_sync_push_is_refused_when_it_would_be_held() -> None:
    """Rows of pushes that are held already count, each id once; the round can still close."""
    shard = make("sync", workers=2)
    assert shard.handle(push(1, [1, 2, 3]), "a") == [events.SendOutcome("a", "held")]
    assert refused(shard.handle(push(1, [3, 4, 5], worker=1), "b"))
    assert list(shard.rounds.held) == [0]
    assert shard.handle(push(1, [2, 3, 4], worker=1), "c") == [events.SendOutcome("c", "held")]
    for worker in range(2):
        shard.handle(events.Pull(worker, 1, (), commit=1), f"pull {worker}")
    assert (sizes(shard), shard.rounds.closed) == ([(4, 1), (4, 1)], 1)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_write_is_refused_whole(mode: Mode) -> None:
    """A write of several parts that do not fit together sets none, whatever is held."""
    shard = make(mode)
    shard.handle(push(1, [1, 2]), "a")
    parts = [
        events.PartState(ROWS.key, 7, np.zeros((2, 6), np.float32), np.array(ids))
        for ids in ([3, 4], [5, 6])
    ]
    before = sizes(shard)
    assert refused(shard.handle(events.WriteState(tuple(parts), 0, 1, 1), "b"))
    assert (sizes(shard), shard.workers.writes) == (before, {0: 0})
    assert shard.handle(events.WriteState((parts[0],), 0, 1, 1), "c") == [events.SendOutcome("c")]


def part(ids: list[int]) -> events.RestorePart:
    """Rows of a snapshot."""
    rows = RowData(
        np.array(ids, np.int64),
        np.zeros((len(ids), 6), np.float32),
        np.zeros(len(ids), np.int64),
        np.zeros((len(ids), 0), np.float32),
    )
    return events.RestorePart(ROWS.key, TableClock(3), row_columns(rows))


def test_a_snapshot_leaves_the_room_of_held_pushes() -> None:
    """Rows that a load would put where those of a held push belong are refused; the round can still close."""
    shard = make("sync", workers=2)
    assert shard.handle(push(1, [1, 2, 3]), "a") == [events.SendOutcome("a", "held")]
    assert refused(shard.handle(part([8, 9]), "load"))
    assert shard.handle(part([9]), "load") == [events.SendOutcome("load")]
    shard.handle(events.Push(1, 1, 1, ()), "b")
    for worker in range(2):
        out = shard.handle(events.Pull(worker, 1, (), commit=1), f"pull {worker}")
        assert not any(isinstance(instruction, events.SendError) for instruction in out)
    assert (sizes(shard), shard.rounds.closed) == ([(3, 1), (4, 4)], 1)


def test_a_new_table_leaves_the_memory_of_held_pushes() -> None:
    """A table that would take it is refused, and has taken nothing; after the round it can be made."""
    shard = make("sync", workers=2)
    big = TableSpec("big", "sparse", (1024,), SGD())
    shard.create(big, np.zeros(0, np.float32))
    budget = shard.tables.budget
    budget.limit = budget.charged() + (64 << 20)
    ids = np.arange(4096)
    held = Gradient(big.key, np.ones((4096, 1024), np.float32), ids, 0.1)  # 16 MiB, and 16 of rows
    assert shard.handle(events.Push(0, 1, 1, (held,)), "a") == [events.SendOutcome("a", "held")]
    charged = budget.charged()
    dense = TableSpec("dense", "dense", (10 << 20,), SGD())  # 40 MiB
    with pytest.raises(
        UsageError, match=r"table 'dense' cannot be made while pushes wait .* table 'big'"
    ):
        shard.create(dense, np.zeros(10 << 20, np.float32))
    assert budget.charged() == charged
    shard.handle(events.Push(1, 1, 1, ()), "b")
    for worker in range(2):
        shard.handle(events.Pull(worker, 1, (), commit=1), f"pull {worker}")
    assert budget.used <= 1
    assert shard.create(
        TableSpec("more", "dense", (4 << 20,), SGD()), np.zeros(4 << 20, np.float32)
    )


def test_a_table_without_a_record_takes_no_memory() -> None:
    """If the log has no room for the record of a new table, its memory is free again."""

    def full(record: events.Record) -> None:
        raise NoRoom("the disk is full")

    shard = make("async")
    budget = shard.tables.budget
    budget.limit, shard.journal, charged = 1 << 30, full, budget.charged()
    for kind, shape in (("dense", (1 << 20,)), ("sparse", (8,))):
        spec = TableSpec(kind, kind, shape, SGD())  # type: ignore[arg-type]
        with pytest.raises(NoRoom):
            shard.create(spec, np.zeros(shape if kind == "dense" else 0, np.float32))
        assert budget.charged() == charged


DENSE = TableSpec("dense", "dense", (4,), Adam())


@pytest.mark.parametrize(
    ("spec", "change"),
    [
        (ROWS, {"rows": None}),
        (ROWS, {"rows": np.zeros((2, 5), np.float32)}),
        (ROWS, {"rows": np.zeros((2, 6))}),
        (ROWS, {"touched": np.zeros(3, np.int64)}),
        (ROWS, {"ids": np.zeros(2, np.int32)}),
        (ROWS, {"removed": np.zeros((2, 1), np.int64)}),
        (ROWS, {"candidates": np.arange(2), "candidate_touched": np.arange(2)}),
        (DENSE, {"value": None}),
        (DENSE, {"value": np.zeros(5, np.float32)}),
    ],
)
def test_columns_that_do_not_fit_change_nothing(
    spec: TableSpec, change: dict[str, NDArray[Any] | None]
) -> None:
    """No record of them is in the log, where it would keep the server from starting again."""
    shard, records = make("async"), list[events.Record]()
    shard.create(DENSE, np.zeros(4, np.float32))
    shard.handle(push(1, [1, 2]), "a")
    columns = dict.fromkeys(DENSE.slot_names, np.ones(4, np.float32))
    columns = {**part([3, 4]).columns} if spec is ROWS else columns
    changed = {name: column for name, column in (columns | change).items() if column is not None}
    before, shard.journal = sizes(shard), records.append
    assert refused(shard.handle(events.RestorePart(spec.key, TableClock(9), changed), "load"))
    assert (sizes(shard), records) == (before, [])
    assert shard.tables[DENSE.key].step == 0
    assert shard.handle(events.RestorePart(spec.key, TableClock(9), columns), "load") == [
        events.SendOutcome("load")
    ]
