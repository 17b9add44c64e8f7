"""A kind of memory is declared in one file: nothing else of tables, shards and servers knows its name."""

import ast
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.base.settings.kinds import DEVICE_PLACES, Device
from psfleet.core.engine.rules import Adam
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.entry import CapacityEntry
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.budget import MemoryBudget
from psfleet.core.engine.tables.host_rows import HostRowMemory
from psfleet.core.engine.tables.memory_choice import HOST, KINDS, MemoryChoice
from psfleet.core.engine.tables.memory_kind import DenseMemory, HostDenseMemory, MemoryKind
from psfleet.core.engine.tables.row_data import PackedRows
from psfleet.core.engine.tables.row_memory import RowMemory
from psfleet.core.engine.tables.row_update import HostRowUpdate, RowUpdate
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from tests.consistency.test_declarations import ROOT, decided

pytestmark = pytest.mark.quick

MIB = 1 << 20
DENSE = TableSpec("dense", "dense", (1000,), Adam())
ROWS = TableSpec("rows", "sparse", (16,), Adam(), seed=1, entry=CapacityEntry())
BATCH = 2048


class SecondRows(HostRowMemory):
    """Rows in the second memory, which is the host's."""

    @property
    def device_bytes(self) -> int:
        return self.bytes


class SecondMemory(MemoryKind):
    """Host memory under another name, with a budget of its own."""

    name: Device = "second"  # type: ignore[assignment]  # settings and definitions do not name it
    label = "the second memory"

    def dense(self, spec: TableSpec, value: NDArray[np.float32], width: int) -> DenseMemory:
        return HostDenseMemory(spec, value, width)

    def sparse(
        self, spec: TableSpec, max_rows: int, host: MemoryBudget, own: MemoryBudget
    ) -> tuple[RowMemory, RowUpdate, MemoryBudget]:
        rows = SecondRows(PackedRows(spec).width, max_rows, spec.every_row)
        return rows, HostRowUpdate(spec, rows), own


@pytest.fixture(autouse=True)
def second(monkeypatch: pytest.MonkeyPatch) -> MemoryKind:
    """The kind, declared."""
    kind = SecondMemory()
    monkeypatch.setitem(KINDS, kind.name, kind)
    return kind


def train(runtime: EmbeddedRuntime, kind: MemoryKind, limit: int, steps: int = 20) -> Shard:
    """Push new rows to a table of this memory, of which tables may take so many bytes, beside a dense one."""
    shard: Shard = runtime._shard
    shard.tables.choice = MemoryChoice(kind.name, True)
    shard.tables.budgets[kind.name] = kind.budget()
    shard.tables.budgets[kind.name].limit = limit
    if not kind.is_host:
        shard.tables.budget.limit = 0  # so whatever took host memory would be refused
    runtime.create(DENSE, np.zeros(1000, np.float32))
    runtime.create(ROWS)
    for step in range(steps):
        ids = np.arange(step * BATCH // 2, step * BATCH // 2 + BATCH)
        rows = Gradient(ROWS.key, np.ones((BATCH, 16), np.float32), ids, 0.1)
        runtime.push([Gradient(DENSE.key, np.full(1000, 0.5, np.float32), None, 0.1), rows])
    return shard


def state(runtime: EmbeddedRuntime) -> list[Any]:
    """All that the tables hold, as bits."""
    found = [runtime.read_table(spec.key) for spec in (DENSE, ROWS)]
    return [
        [None if part is None else np.asarray(part).tobytes() for part in (one.ids, *one.values)]
        for one in found
    ]


def test_a_memory_of_ones_own_holds_tables(second: MemoryKind, tmp_path: Path) -> None:
    """Its tables take what its own budget has, let the same rows go as in host memory, and come back from a
    snapshot in either memory, all with the same bits."""
    there, host = EmbeddedRuntime(), EmbeddedRuntime()
    shard = train(there, second, 2 * MIB)
    expected = train(host, HOST, 2 * MIB)
    rows = shard.tables[ROWS.key]
    assert [table.device for table in shard.tables.values()] == [second.name] * 2
    assert len(rows) == len(expected.tables[ROWS.key])  # type: ignore[arg-type]
    assert rows.dropped > BATCH  # type: ignore[union-attr]
    assert all(table.bytes == table.device_bytes > 0 for table in shard.tables.values())
    assert shard.tables.device_limit == 2 * MIB
    assert state(there) == state(host)
    there.save(str(tmp_path / "saved"))
    for kind in (second, HOST):
        again = EmbeddedRuntime()
        train(again, kind, 4 * MIB, steps=0)  # more at once than came step by step
        again.load(str(tmp_path / "saved"))
        assert state(again) == state(host)


def test_a_full_memory_says_which_it_is(second: MemoryKind) -> None:
    """A table that does not fit is refused by the name of its memory."""
    with pytest.raises(UsageError, match=r"needs 0\.0 MiB of the second memory; this server may"):
        train(EmbeddedRuntime(), second, 8000)


def test_each_memory_has_a_choice() -> None:
    """The kinds are those that a setting and a definition may name, and each has words for its setting."""
    assert list(get_args(Device)) == list(DEVICE_PLACES)
    assert set(KINDS) == {*DEVICE_PLACES, "second"}
    assert all(KINDS[name].name == name for name in KINDS)


@pytest.mark.long
def test_no_code_decides_by_the_name_of_a_memory() -> None:
    """It asks for properties of the kind."""
    shipped = [
        path
        for folder in ("psfleet", "server/psfleet_server", "worker/psfleet_worker")
        for path in (ROOT / folder).rglob("*.py")
        if path != ROOT / "psfleet" / "core" / "base" / "settings" / "kinds.py"
    ]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} decides by the memory {node.value!r}"
        for path in shipped
        for node in decided(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in get_args(Device)
    ]
    assert not found
