"""Entries: which ids of a push get a row."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet import layers, optimizer
from psfleet.checkpoint import read_specs
from psfleet.core.base.errors import ShapeError, TableConflict
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.engine.kernels.initial_values import initial_rows
from psfleet.core.engine.rules import SGD, Adam
from psfleet.core.engine.schema.entry import ProbabilityEntry, TTLEntry
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec
from psfleet.core.engine.tables.assigned_weights import add_rows
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.graph.program.program import default_startup_program
from psfleet.core.net.table_messages import read_spec, write_spec
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from tests.runtimes import own_programs

pytestmark = pytest.mark.quick

SPEC = TableSpec("rows", "sparse", (2,), SGD(), seed=3, entry=ProbabilityEntry(0.25))
IDS = np.arange(-4000, 4000)


def push(table: SparseTable, ids: NDArray[np.int64]) -> None:
    table.push(ids, np.ones((len(ids), table.spec.dim), np.float32), 1.0)


def rows(*tables: SparseTable) -> dict[int, bytes]:
    pages = [table.state(0, len(table)) for table in tables]
    return {
        id_: row.tobytes()
        for ids, values in pages
        for id_, row in zip(ids.tolist(), values, strict=True)
    }


def test_part_of_the_unknown_ids_gets_a_row() -> None:
    """A quarter of them each time; a row counts the gradients since it came, others none."""
    table = SparseTable(SPEC)
    before = initial_rows(IDS, 2, InitializerSpec(), 3, "rows")
    out, times = np.empty_like(before), np.zeros(len(IDS), np.int64)
    left = len(IDS)
    for _ in range(4):
        push(table, IDS)
        known = np.isin(IDS, table.state(0, len(IDS))[0])
        times[known] += 1
        gone = left - (len(IDS) - int(known.sum()))
        assert abs(gone - left / 4) < 5 * np.sqrt(left * 3 / 16)
        left -= gone
        table.pull_into(IDS, out)
        np.testing.assert_allclose(out, before - times[:, None], atol=1e-6)
    assert table.step == 4


def test_the_draw_is_the_same_on_any_number_of_servers() -> None:
    """Ids over three tables get the rows that one table gives them, also after a restart."""
    whole, parts = SparseTable(SPEC), [SparseTable(SPEC) for _ in range(3)]
    for _ in range(3):
        push(whole, np.random.default_rng(0).permutation(IDS))
        for server, part in enumerate(parts):
            push(part, IDS[server == IDS % 3])
    assert rows(whole) == rows(*parts)
    again = SparseTable(SPEC)
    again.restore(*whole.state(0, len(whole)))
    again.restore_step(whole.step)
    for table in (whole, again):
        push(table, IDS)
    assert rows(whole) == rows(again)


def test_a_certain_entry_is_none() -> None:
    """Probability 1 gives every id its row, with the bits of a table without an entry."""
    certain = SparseTable(dataclasses.replace(SPEC, rule=Adam(), entry=ProbabilityEntry(1)))
    plain = SparseTable(dataclasses.replace(SPEC, rule=Adam(), entry=None))
    for table in (certain, plain):
        push(table, IDS)
        push(table, IDS[:5])
        push(table, IDS[:0])
    assert rows(certain) == rows(plain)
    assert len(certain) == len(IDS)


def test_another_table_or_seed_draws_anew() -> None:
    """Which ids get a row differs by the table's name and seed."""
    tables = [
        SparseTable(spec)
        for spec in (
            SPEC,
            dataclasses.replace(SPEC, seed=4),
            dataclasses.replace(SPEC, name="other"),
        )
    ]
    for table in tables:
        push(table, IDS)
    known = [set(rows(table)) for table in tables]
    assert all(100 < len(a & b) < 1000 for a, b in zip(known, [*known[1:], known[0]], strict=True))


def test_the_entry_travels_and_is_saved(tmp_path: Path) -> None:
    """A message and a checkpoint hold the entry; a table without one stays without one."""
    runtime = EmbeddedRuntime()
    for spec in (SPEC, dataclasses.replace(SPEC, name="plain", entry=None)):
        assert read_spec(write_spec(spec)) == spec
        runtime.create(spec)
    with pytest.raises(TableConflict, match=r"probability=0\.25"):
        runtime.create(dataclasses.replace(SPEC, entry=None))
    runtime.save(str(tmp_path / "model"))
    assert {spec.entry for spec in read_specs(str(tmp_path / "model"))} == {None, SPEC.entry}


def test_an_embedding_trains_the_rows_that_came() -> None:
    """An embedding's entry reaches its table: about half of the ids of one step have moved."""
    with own_programs():
        ids = layers.data("ids", [None, 1], dtype="int64")
        layers.embedding(ids, [None, 2], is_distributed=True, name="e", entry=ProbabilityEntry(0.5))
        weights = default_startup_program().parameters["e.w_0"]
        before = weights.lookup(IDS)
        with pytest.raises(ShapeError, match="another kind"):
            layers.embedding(ids, [None, 2], is_distributed=True, name="e")
    gradients = SparseGrad(IDS, np.ones((len(IDS), 2), np.float32))
    optimizer.SGD(0.1).apply_gradients([(weights, gradients)])
    moved = (weights.lookup(IDS) != before).all(axis=1).mean()
    assert 0.45 < moved < 0.55


def test_rows_expire_after_added_deltas_too() -> None:
    """In geo mode a table with a limit of steps kept every row for ever."""
    spec = dataclasses.replace(SPEC, entry=TTLEntry(steps=8))
    pushed, added = SparseTable(spec), SparseTable(spec)
    deltas = np.ones((4, 2), np.float32)
    for step in range(100):
        push(pushed, ids := np.arange(step, step + 4))
        add_rows(added, ids, -deltas)
    assert len(pushed) < 20
    assert rows(added) == rows(pushed)
    assert added.step == 100
