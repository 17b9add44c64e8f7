"""The sparse table against a dictionary, over growth, removal and the whole range of ids."""

import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.kernels.hashing import ids_of
from psfleet.core.engine.kernels.id_routing import VIRTUAL_SHARDS, routes
from psfleet.core.engine.kernels.initial_values import initial_rows
from psfleet.core.engine.rules import ASGD, SGD, Adagrad, Adam
from psfleet.core.engine.schema.entry import CapacityEntry
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec
from psfleet.core.engine.tables.row_data import TableClock
from psfleet.core.engine.tables.row_expiry import RowLifetime
from psfleet.core.engine.tables.row_memory import RowLimits, RowTraffic
from psfleet.core.engine.tables.sparse import SparseTable
from tests.tables.test_policies import push

pytestmark = pytest.mark.quick

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
EDGES = [0, -1, 1, 2**63 - 1, -(2**63)]
IDS = st.lists(
    st.one_of(st.sampled_from(EDGES), st.integers(-(2**63), 2**63 - 1), st.integers(0, 300)),
    max_size=200,
    unique=True,
)
SPEC = TableSpec("rows", "sparse", (3,), Adagrad(initial_accumulator_value=0.5), seed=4)
WIDTH = 6  # weights and the accumulator


def first(ids: Ids) -> Floats:
    weights = initial_rows(ids, 3, SPEC.initializer, SPEC.seed, SPEC.name)
    return np.concatenate([weights, np.full_like(weights, 0.5)], axis=1)


def updated(rows: Floats, gradients: Floats) -> Floats:
    weights, moment = rows[:, :3], rows[:, 3:] + gradients * gradients
    step = np.float32(0.1) * gradients / (np.sqrt(moment) + np.float32(1e-6))
    return np.concatenate([weights - step, moment], axis=1)


class Model(RuleBasedStateMachine):
    """A table beside a dictionary id -> row."""

    @initialize()
    def start(self) -> None:
        self.table = self.make(300_000)  # 25 steps push at most 200,000
        self.rows: dict[int, Floats] = {}
        self.steps = 0
        self.traffic = RowTraffic()
        self.admitted = 0

    def make(self, max_rows: int) -> SparseTable:
        return SparseTable(SPEC, max_rows=max_rows)

    def wanted(self, ids: Ids) -> Floats:
        rows = first(ids)
        for place, id_ in enumerate(ids.tolist()):
            rows[place] = self.rows.get(id_, rows[place])
        return rows

    @rule(ids=IDS, seed=st.integers(0, 999))
    def push(self, ids: list[int], seed: int) -> None:
        self.apply(np.array(ids, np.int64), seed)

    @rule(count=st.integers(1000, 8000), seed=st.integers(0, 999))
    def push_many(self, count: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.apply(np.unique(random.integers(-(2**63), 2**63 - 1, count)), seed)

    def apply(self, ids: Ids, seed: int) -> None:
        gradients = np.random.default_rng(seed).standard_normal((len(ids), 3)).astype(np.float32)
        new = updated(self.wanted(ids), gradients)
        self.table.push(ids, gradients, 0.1)
        self.traffic.updated += len(ids)
        self.admitted += len(set(ids.tolist()) - self.rows.keys())
        self.rows.update(zip(ids.tolist(), new, strict=True))
        self.steps += 1

    @rule(ids=IDS)
    def pull(self, ids: list[int]) -> None:
        batch = np.array([*ids, *ids[::-1]], np.int64)
        out = np.empty((len(batch), 3), np.float32)
        self.table.pull_into(batch, out)
        np.testing.assert_array_equal(out, self.wanted(batch)[:, :3])
        self.traffic.pulled += len(batch)
        self.traffic.unknown += sum(one not in self.rows for one in batch.tolist())

    @rule(ids=IDS)
    def restore(self, ids: list[int]) -> None:
        batch = np.array(ids, np.int64)
        rows = np.arange(len(ids) * WIDTH, dtype=np.float32).reshape(-1, WIDTH)
        self.table.restore(batch, rows)
        self.traffic.restored += len(set(ids) - self.rows.keys())
        self.rows.update(zip(ids, rows, strict=True))

    @rule(part=st.floats(0, 1), seed=st.integers(0, 999))
    def remove(self, part: float, seed: int) -> None:
        known = np.array(list(self.rows), np.int64)
        gone = known[np.random.default_rng(seed).random(len(known)) < part]
        assert self.table.remove(np.append(gone, gone[:1])) == len(gone)
        for id_ in gone.tolist():
            del self.rows[id_]

    @rule(limit=st.integers(1, 5000))
    def read(self, limit: int) -> None:
        pages = [self.table.state(at, limit) for at in range(0, max(len(self.rows), 1), limit)]
        ids = np.concatenate([page[0] for page in pages])
        assert ids.tolist() == sorted(self.rows)
        np.testing.assert_array_equal(np.concatenate([page[1] for page in pages]), self.wanted(ids))

    @invariant()
    def same_size(self) -> None:
        if hasattr(self, "table"):
            assert len(self.table) == len(self.rows)
            assert self.table.step == self.steps
            assert (self.table.traffic, self.table.admitted) == (self.traffic, self.admitted)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_growth_through_many_doublings() -> None:
    """200,000 rows added in small and large pushes are all there, each with its own values."""
    spec = TableSpec("t", "sparse", (2,), SGD(), initializer=InitializerSpec("constant", 1.0))
    table = SparseTable(spec)
    ids = np.unique(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 200_000))
    shuffled = np.random.default_rng(1).permutation(ids)
    for start in range(0, len(ids), 7001):
        part = shuffled[start : start + 7001]
        table.push(part, np.stack([part % 1000, part % 77], axis=1).astype(np.float32), 1.0)
    assert len(table) == len(ids)
    actual, rows = table.state(0, len(ids))
    np.testing.assert_array_equal(actual, ids)
    np.testing.assert_array_equal(
        rows, 1 - np.stack([ids % 1000, ids % 77], axis=1).astype(np.float32)
    )


def test_churn_reuses_memory() -> None:
    """Rows that come and go for ever take the memory of those that are there at one time."""
    table = SparseTable(TableSpec("t", "sparse", (4,), SGD()), max_rows=10_000)
    for round_ in range(30):
        ids = np.arange(5000, dtype=np.int64) + round_ * 5000
        table.push(ids, np.zeros((5000, 4), np.float32), 0.1)
        if round_ == 5:
            settled = table.bytes
        assert table.remove(ids) == 5000
    assert table.bytes <= 2 * settled


def test_a_full_table_refuses() -> None:
    """A push that would pass the limit changes nothing; one of known ids is still served."""
    table = SparseTable(TableSpec("t", "sparse", (1,), SGD()), max_rows=100)
    table.push(np.arange(100), np.zeros((100, 1), np.float32), 0.1)
    with pytest.raises(UsageError, match="holds 100 rows of at most 100 and was asked to add 5"):
        table.push(np.arange(95, 105), np.ones((10, 1), np.float32), 0.1)
    assert (len(table), table.step) == (100, 1)
    table.push(np.arange(100), np.zeros((100, 1), np.float32), 0.1)
    assert table.step == 2


def test_room_is_counted_over_parts() -> None:
    """Ids of several pushes count once each, and rows that are there or were removed not at all."""
    table = SparseTable(TableSpec("t", "sparse", (1,), SGD()), max_rows=10)
    table.push(np.arange(8), np.zeros((8, 1), np.float32), 0.1)
    table.check_room([np.arange(9), np.arange(10), np.arange(8, 10)])
    with pytest.raises(UsageError, match="holds 8 rows of at most 10 and was asked to add 3"):
        table.check_room([np.arange(9), np.array([9, 10])])
    table.remove(np.array([0]))
    table.check_room([np.arange(9) + 1, np.array([10])])


def test_pull_beside_push() -> None:
    """A row that is pulled while others push is one whole version of it."""
    table = SparseTable(
        TableSpec("t", "sparse", (16,), SGD(), initializer=InitializerSpec("constant"))
    )
    ids = np.arange(2000)
    torn: list[Floats] = []

    def pull() -> None:
        out = np.empty((2000, 16), np.float32)
        for _ in range(50):
            table.pull_into(ids, out)
            torn.extend(row for row in out if (row != row[0]).any())

    reader = threading.Thread(target=pull)
    reader.start()
    for step in range(50):
        table.push(ids, np.full((2000, 16), step, np.float32), 0.1)
    reader.join()
    assert not torn


@pytest.mark.parametrize("dim", [1, 1024])
def test_widths(dim: int) -> None:
    """The narrowest and the widest rows work."""
    table = SparseTable(TableSpec("t", "sparse", (dim,), SGD()))
    ids = np.arange(-100, 100)
    start = initial_rows(ids, dim, InitializerSpec(), 0, "t")
    table.push(ids, np.ones((200, dim), np.float32), 0.5)
    out = np.empty((200, dim), np.float32)
    table.pull_into(ids, out)
    np.testing.assert_array_equal(out, start - np.float32(0.5))


def test_a_table_takes_the_address_space_there_is() -> None:
    """Wide rows with much state: the limit on rows comes down until the reservation succeeds."""
    table = SparseTable(TableSpec("t", "sparse", (1024,), ASGD(3000)))
    table.push(np.arange(3), np.ones((3, 1024), np.float32), 0.1)
    assert len(table) == 3


@pytest.mark.parametrize("servers", [1, 3, 12, 100, 1024])
def test_a_full_table_fits_on_any_number_of_servers(servers: int) -> None:
    """The server with most virtual shards may hold its share of a full table; pushes keep the limit."""
    rows = 10_000_000
    spec = TableSpec("t", "sparse", (16,), Adam(), entry=CapacityEntry(rows=rows))
    limits = RowLimits.from_spec(spec, 48, servers, 2**31)
    most = max((routes(servers) == group).sum() for group in range(servers))
    assert limits.held >= rows * most / VIRTUAL_SHARDS
    assert rows <= limits.pushed * servers < rows + servers


def test_without_an_entry_memory_alone_limits() -> None:
    """A table without a capacity has the places that the server has."""
    assert RowLimits.from_spec(TableSpec("t", "sparse", (16,), Adam()), 48, 7, 1000) == (1000, 1000)


def test_churn_of_chosen_ids_is_refused_before_the_index_outgrows_its_place() -> None:
    """Ids whose hashes begin alike, then others whose hashes do, do no harm."""
    table = SparseTable(TableSpec("t", "sparse", (2,), SGD()), max_rows=1 << 16)
    dice, refused = np.random.default_rng(0), 0
    push(table, np.unique(dice.integers(-(2**63), 2**63 - 1, 60_000)))
    table.remove(table.ids())
    for number in range(8):
        low = np.unique(dice.integers(0, 2**48, 60_000, np.uint64))
        ids = ids_of(low | np.uint64(number * 8191 << 48))
        try:
            push(table, ids)
        except UsageError as error:
            refused += "so much alike" in str(error)
        assert table.remove(ids) in (0, len(ids))
    push(table, np.arange(50))
    assert len(table) == 50
    assert refused


def test_ids_whose_hashes_are_alike_are_found() -> None:
    """A chunk that splits do not help is enlarged; its rows are read, swept and removed all the same."""
    table = SparseTable(TableSpec("t", "sparse", (2,), SGD()))
    alike = ids_of(np.arange(5000, dtype=np.uint64) + (np.uint64(200) << np.uint64(56)))
    push(table, alike)
    push(table, np.arange(3000))
    assert table.ids().tolist() == sorted([*alike.tolist(), *range(3000)])
    assert (table.rows(alike).touched == 1).all()
    assert table.remove(alike[::2]) == 2500
    assert table.ids().tolist() == sorted([*alike[1::2].tolist(), *range(3000)])
    table.set_clock(TableClock(2**40))
    assert set(table.rows(alike[1::2]).touched.tolist()) == {2**40 - 2**31}
    frozen = table.freeze()
    pages = [page["ids"] for page in frozen.pages() if "ids" in page]
    assert sorted(np.concatenate(pages).tolist()) == table.ids().tolist()
    frozen.close()


def test_a_step_is_set_between_two_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of shrinks are read and set again under one lock: a shrink in between would be forgotten."""
    table, clock = SparseTable(SPEC), RowLifetime.clock
    other = threading.Thread(target=table.shrink, kwargs={"unseen": 1})

    def slow(lifetime: RowLifetime, step: int) -> TableClock:
        found = clock(lifetime, step)
        if other.ident is None:
            other.start()
            other.join(0.5)
        return found

    monkeypatch.setattr(RowLifetime, "clock", slow)
    table.restore_step(7)
    other.join()
    assert table.clock == TableClock(7, (7,))
