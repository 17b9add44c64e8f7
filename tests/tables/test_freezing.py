"""A table that is read while it changes: what is read is what it was at the first moment."""

import threading

import numpy as np
import pytest

from psfleet.core.engine.rules import ASGD, SGD, Adam, RowWiseAdagrad, Rule, make_rule
from psfleet.core.engine.schema.entry import (
    CapacityEntry,
    CountFilterEntry,
    ShowClickEntry,
    TTLEntry,
)
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.row_memory import EVERY
from psfleet.core.engine.tables.row_snapshot import FrozenTable
from psfleet.core.engine.tables.sparse import SparseTable

pytestmark = pytest.mark.quick

PLAIN = TableSpec("t", "sparse", (5,), make_rule("adam", {}), seed=1)
EVERY_ROW = TableSpec("t", "sparse", (5,), make_rule("adam", {}), seed=1, every_row=True)


def with_entry(entry: object) -> TableSpec:
    """The same table with an entry."""
    return TableSpec("t", "sparse", (5,), make_rule("adam", {}), seed=1, entry=entry)  # type: ignore[arg-type]


SPECS = {
    "plain": PLAIN,
    "every row": EVERY_ROW,
    "ttl": with_entry(TTLEntry(steps=6)),
    "capacity": with_entry(CapacityEntry(rows=150)),
    "count": with_entry(CountFilterEntry(2)),
    "scores": with_entry(ShowClickEntry("s", "c")),
}


def push(table: SparseTable, dice: np.random.Generator) -> None:
    """One update of up to 80 of 400 ids."""
    ids = dice.permutation(400)[: dice.integers(1, 80)].astype(np.int64)
    values = dice.standard_normal((len(ids), table.spec.push_width), np.float32)
    table.push(ids, np.abs(values), 0.1)


def change(table: SparseTable, dice: np.random.Generator) -> None:
    """Anything that may become of a table."""
    match dice.integers(0, 8):
        case 0:
            table.remove(dice.integers(0, 400, 20))
        case 1:
            table.shrink(0.5, 3)
        case 2:
            table.write(table.rows(dice.integers(0, 400, 5)))
        case 3:
            table.evict(7)
        case _:
            push(table, dice)


def content(arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    """Columns of rows, in ascending order of id."""
    order = np.argsort(arrays["ids"])
    own = {"ids", "rows", "touched", "scores"}
    return {
        name: (column[order] if name in own else column).tobytes()
        for name, column in arrays.items()
    }


def read(frozen: FrozenTable, between: object = None) -> dict[str, np.ndarray]:
    """Every column, put together; `between` is called before each page."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in frozen.columns()}
    for page in frozen.pages():
        for name, part in page.items():
            parts[name].append(part)
        if callable(between):
            between()
    frozen.close()
    shapes = frozen.columns()
    arrays = {
        name: np.concatenate(actual) if actual else np.empty(shapes[name][1], shapes[name][0])
        for name, actual in parts.items()
    }
    for name, (dtype, shape) in shapes.items():
        assert arrays[name].shape == shape, name
        assert arrays[name].dtype == dtype, name
    return arrays


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("seed", range(2))
def test_changes_meanwhile_are_not_seen(kind: str, seed: int) -> None:
    """Pushes, removals, evictions, shrinks and writes while it is read change nothing of what is read."""
    dice = np.random.default_rng(seed)
    table = SparseTable(SPECS[kind])
    for _ in range(12):
        change(table, dice)
    expected = content(read(table.freeze()))
    frozen, also = table.freeze(), table.freeze()
    for _ in range(dice.integers(0, 3)):
        change(table, dice)

    def sometimes() -> None:
        if dice.random() < 0.2:
            change(table, dice)

    assert content(read(frozen, sometimes)) == expected
    for _ in range(3):
        change(table, dice)
    assert content(read(also)) == expected
    assert content(read(table.freeze())) != expected
    assert not table._index.stores[0].views


def test_only_what_has_changed() -> None:
    """A view of the changes since a mark gives those rows as they were, and the removed ids."""
    dice = np.random.default_rng(5)
    table = SparseTable(PLAIN)
    for _ in range(5):
        push(table, dice)
    mark = table.mark()
    table.remove(np.arange(10))
    push(table, dice)
    changes = table.changed_since(mark)
    expected = table.rows(changes.ids)
    frozen = table.freeze(changes)
    for _ in range(5):
        change(table, dice)
    actual = read(frozen, lambda: change(table, dice))
    order = np.argsort(actual["ids"])
    np.testing.assert_array_equal(actual["ids"][order], expected.ids)
    np.testing.assert_array_equal(actual["rows"][order], expected.values)
    np.testing.assert_array_equal(actual["removed"], changes.removed)
    table.release(mark)


def test_kernels_say_what_the_tables_own_columns_say() -> None:
    """Sections list every row once; what is recalled of ids is the same; a slot is claimed once."""
    dice = np.random.default_rng(3)
    table = SparseTable(PLAIN)
    for _ in range(20):
        change(table, dice)
    rows = table.rows(np.arange(400))
    index, expected = table._index.stores[0], dict(zip(rows.ids, rows.touched, strict=True))
    entries: dict[int, tuple[int, int]] = {}
    for number in range(*EVERY):
        ids, slots, touched = index.listed(number, number + 1, table.step)
        entries |= {i: (s, t) for i, s, t in zip(ids, slots, touched, strict=True)}
    assert {i: t for i, (_, t) in entries.items()} == expected
    ids = dice.permutation(500).astype(np.int64)
    named, slots, touched = index.recall(ids, table.step)
    assert [*zip(slots, touched, strict=True)] == [entries.get(i, (0, 0)) for i in named]
    view = table.freeze()._rows[0]
    known = named[slots != 0]
    for part in (ids[:200], ids):  # the second time the first are claimed already
        actual, _, _ = view._claim(index.recall(part, table.step))
        now = np.isin(known, part)
        np.testing.assert_array_equal(actual, known[now])
        known = known[~now]


def test_a_dense_table_is_read_as_it_was() -> None:
    """Weights and state are those of the moment, whether an update comes before the reader or not."""
    spec = TableSpec("d", "dense", (50,), make_rule("adam", {}))
    table = DenseTable(spec, np.ones(50, np.float32))
    table.push(np.ones(50, np.float32), 0.1)
    expected = [array.tobytes() for array in table.state()]
    early, late = table.freeze(), table.freeze()
    assert [read(early)[name].tobytes() for name in spec.slot_names] == expected
    table.push(np.ones(50, np.float32), 0.1)
    assert [read(late)[name].tobytes() for name in spec.slot_names] == expected
    assert [array.tobytes() for array in table.state()] != expected


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_no_view_is_closed_while_a_change_keeps_rows(kind: str) -> None:
    """A change goes through the views of a table. One that another thread closes meanwhile waits, else the
    change would pass over the view behind it, which would then read what came later."""
    table: DenseTable | SparseTable
    if kind == "dense":
        table = DenseTable(
            TableSpec("d", "dense", (4,), make_rule("sgd", {})), np.ones(4, np.float32)
        )
    else:
        table = SparseTable(PLAIN)
        table.push(np.arange(9), np.ones((9, 5), np.float32), 0.1)
    first, second = table.freeze(), table.freeze()
    views = table._views if isinstance(table, DenseTable) else table._index.stores[0].views
    closing = threading.Thread(target=first.close)
    with table._lock:
        closing.start()
        closing.join(0.1)
        assert len(views) == 2
    closing.join()
    assert len(views) == 1
    second.close()
    assert not views


@pytest.mark.parametrize("rule", [SGD(), Adam(), ASGD(2), RowWiseAdagrad()])
def test_state_restores_the_table(rule: Rule) -> None:
    """A table made from another's state goes on with the same bits."""
    random = np.random.default_rng(0)
    start = random.standard_normal(12).astype(np.float32)
    spec = TableSpec("t", "dense", (3, 4), rule)
    table, copy = DenseTable(spec, start), DenseTable(spec, np.zeros(12, np.float32))
    for _ in range(3):
        table.push(random.standard_normal(12).astype(np.float32), 0.1)
    copy.restore(table.step, table.state())
    gradient = random.standard_normal(12).astype(np.float32)
    for each in (table, copy):
        each.push(gradient, 0.1)
    assert table.step == copy.step == 4
    for actual, expected in zip(copy.state(), table.state(), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_the_table_owns_its_memory() -> None:
    """Later changes of what it was made from, or of what it gave away, do not reach it."""
    start = np.ones(4, np.float32)
    table = DenseTable(TableSpec("t", "dense", (4,), SGD()), start)
    start[:] = 7
    table.state()[0][:] = 7
    out = np.empty(4, np.float32)
    table.pull_into(out)
    np.testing.assert_array_equal(out, 1)


@pytest.mark.parametrize("rule", [SGD(), Adam(), RowWiseAdagrad()])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_an_empty_slice(rule: Rule, shape: tuple[int, ...]) -> None:
    """A server that holds nothing of an array still makes the steps."""
    table = DenseTable(TableSpec("t", "dense", shape, rule), np.zeros(0, np.float32))
    table.push(np.zeros(0, np.float32), 0.1)
    assert (table.step, table.count, table.bytes) == (1, 0, 0)
    table.restore(5, table.state())
    assert table.step == 5
