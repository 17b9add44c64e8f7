"""Admission and eviction against a model in plain Python that knows the definitions, not the index."""

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from psfleet.entry import CapacityEntry, CountFilterEntry, Entry, ShowClickEntry, TTLEntry
from psfleet.errors import UsageError
from psfleet.kernels.hashing import hash_ids, ids_of
from psfleet.kernels.initial_values import initial_rows
from psfleet.rules import SGD, Adagrad, Adam
from psfleet.rules.rule import Rule
from psfleet.schema.table import TableSpec
from psfleet.tables.row_data import TableClock
from psfleet.tables.row_memory import ROW_BYTES
from psfleet.tables.sparse import SparseTable

Ids = NDArray[np.int64]
SPEC = TableSpec("rows", "sparse", (2,), SGD(), seed=5)
CAPACITY, WAITING, TTL, NEEDED = 24, 40, 6, 2
ENTRY = (
    CountFilterEntry(NEEDED, candidates=WAITING)
    & TTLEntry(steps=TTL, seconds=4.0)
    & CapacityEntry(rows=CAPACITY)
    & ShowClickEntry("show", "click", delete_threshold=0.3, delete_after_unseen=2)
)
EDGES = [0, -1, 1, 2**63 - 1, -(2**63)]
ANY = st.one_of(st.sampled_from(EDGES), st.integers(0, 60))
IDS = st.lists(ANY, min_size=1, max_size=CAPACITY, unique=True)


def hashed(id_: int) -> int:
    return int(hash_ids(np.array([id_], np.int64))[0])


def is_due(id_: int, step: int, ttl: int) -> bool:
    """Whether this step looks at the segment of the id: the top 8 bits of its hash."""
    period = max(ttl // 8, 1)
    return (hashed(id_) >> 56) * period // 256 == step % period


@dataclass
class Row:
    weights: NDArray[np.float32]
    touched: int
    show: np.float32 = field(default_factory=lambda: np.float32(0))
    click: np.float32 = field(default_factory=lambda: np.float32(0))


class Model(RuleBasedStateMachine):
    """A table with every kind of entry beside dictionaries of rows and of waiting ids."""

    @initialize()
    def start(self) -> None:
        self.table = SparseTable(dataclasses.replace(SPEC, entry=ENTRY))
        self.rows: dict[int, Row] = {}
        self.waiting: dict[int, list[int]] = {}  # count, touched
        self.step = 0
        self.shrinks: list[int] = []
        self.ticks: list[tuple[float, int]] = []
        self.marks: list[tuple[object, dict[int, bytes]]] = []

    def oldest(self, touched: dict[int, int], count: int) -> list[int]:
        old = [id_ for id_ in touched if touched[id_] < self.step]
        return sorted(old, key=lambda id_: (touched[id_], hashed(id_)))[:count]

    @rule(ids=IDS, seed=st.integers(0, 99))
    def push(self, ids: list[int], seed: int) -> None:
        self.update(ids, np.random.default_rng(seed))

    @rule(turns=st.integers(1, 5), count=st.integers(1, CAPACITY), seed=st.integers(0, 9999))
    def push_often(self, turns: int, count: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(turns):
            self.update(random.choice(70, count, replace=False).tolist(), random)

    def update(self, ids: list[int], random: np.random.Generator) -> None:
        values = random.integers(-4, 5, (len(ids), 4)).astype(np.float32)
        values[:, 2:] = np.abs(values[:, 2:])
        self.table.push(np.array(ids, np.int64), values, 0.5)
        self.step += 1
        unknown = [id_ for id_ in ids if id_ not in self.rows]
        admitted = {i for i in unknown if self.waiting.get(i, [0])[0] + 1 >= NEEDED}
        for id_ in unknown:
            if id_ in self.waiting:
                self.waiting[id_][1] = self.step
        fresh = [id_ for id_ in unknown if id_ not in self.waiting]
        short = len(self.waiting) + len(fresh) - WAITING
        if short > 0:
            stamps = {id_: stamp for id_, (_, stamp) in self.waiting.items()}
            for id_ in self.oldest(stamps, max(short, WAITING // 16)):
                del self.waiting[id_]
        room = WAITING - len(self.waiting)
        for id_ in [i for i in unknown if i in self.waiting] + fresh[:room]:
            count = self.waiting.get(id_, [0, 0])[0] + 1
            self.waiting[id_] = [count, self.step]
        for id_ in admitted:
            self.waiting.pop(id_, None)
        kept = [id_ for id_ in ids if id_ in self.rows or id_ in admitted]
        for id_ in kept:
            if id_ in self.rows:
                self.rows[id_].touched = self.step
        short = len(self.rows) + len(admitted) - CAPACITY
        if short > 0:
            stamps = {id_: row.touched for id_, row in self.rows.items()}
            for id_ in self.oldest(stamps, max(short, CAPACITY // 16)):
                del self.rows[id_]
        for place, id_ in enumerate(ids):
            if id_ in kept:
                row = self.rows.setdefault(id_, Row(self.first(id_), self.step))
                row.touched = self.step
                row.weights = row.weights - np.float32(0.5) * values[place, :2]
                row.show, row.click = row.show + values[place, 2], row.click + values[place, 3]
        self.expire(lambda id_, stamp: self.step - stamp >= TTL and is_due(id_, self.step, TTL))

    def first(self, id_: int) -> NDArray[np.float32]:
        ids = np.array([id_], np.int64)
        return initial_rows(ids, 2, SPEC.initializer, SPEC.seed, SPEC.name).reshape(2)

    def expire(self, is_over: object) -> None:
        assert callable(is_over)
        self.rows = {i: row for i, row in self.rows.items() if not is_over(i, row.touched)}
        self.waiting = {i: held for i, held in self.waiting.items() if not is_over(i, held[1])}

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def tick(self, seconds: float) -> None:
        self.table.tick(seconds)
        now = (self.ticks[-1][0] if self.ticks else 0.0) + seconds
        self.ticks.append((now, self.step))
        over = [step for time, step in self.ticks if time <= now - 4.0]
        if over:
            self.expire(lambda _, stamp: stamp <= over[-1])

    @rule(threshold=st.sampled_from([None, 0.0, 1.0]), unseen=st.sampled_from([None, 1]))
    def shrink(self, threshold: float | None, unseen: int | None) -> None:
        self.table.shrink(threshold, unseen)
        least = 0.3 if threshold is None else threshold
        for row in self.rows.values():
            row.show = np.float32(float(row.show) * 0.98)
            row.click = np.float32(float(row.click) * 0.98)
        self.rows = {
            i: row
            for i, row in self.rows.items()
            if 0.1 * (float(row.show) - float(row.click)) + float(row.click) >= least
        }
        back = unseen or 2
        if len(self.shrinks) >= back:
            self.expire(lambda _, stamp: stamp <= self.shrinks[-back])
        self.shrinks.append(self.step)

    @rule(part=st.floats(0, 1), seed=st.integers(0, 99))
    def remove(self, part: float, seed: int) -> None:
        known = np.array([*self.rows, *self.waiting], np.int64)
        gone = known[np.random.default_rng(seed).random(len(known)) < part]
        assert self.table.remove(gone) == len([i for i in gone.tolist() if i in self.rows])
        for id_ in gone.tolist():
            self.rows.pop(id_, None)
            self.waiting.pop(id_, None)

    @rule()
    def go_on_elsewhere(self) -> None:
        """What is handed out makes an equal table, which takes the place of this one."""
        again = SparseTable(self.table.spec)
        again.set_clock(self.table.clock)
        again.write(self.table.rows(self.table.ids()))
        again.write_candidates(self.table.candidates())
        self.table = again
        self.marks.clear()

    @rule(offset=st.sampled_from([1, 2**29 - 3, 2**32 - 5, 2**33]))
    def step_is_set(self, offset: int) -> None:
        """The clock may be set to any later step; rows then have the age that this means."""
        clock = self.table.clock
        if self.rows or self.waiting or clock.step > 2**40:
            return
        self.table.set_clock(TableClock(clock.step + offset, clock.shrinks, clock.ticks))
        self.step += offset

    @rule()
    def mark(self) -> None:
        self.marks.append((self.table.mark(), self.content()))

    @rule(which=st.integers(0, 3))
    def changes(self, which: int) -> None:
        """All that differs from a mark's content is named; none is named as removed that is there."""
        if not self.marks:
            return
        mark, before = self.marks.pop(which % len(self.marks))
        changes = self.table.changed_since(mark)  # type: ignore[arg-type]
        self.table.release(mark)  # type: ignore[arg-type]
        now = self.content()
        assert set(before) - set(now) <= set(changes.removed.tolist())
        assert not set(changes.removed.tolist()) & set(now)
        differ = {id_ for id_, row in now.items() if before.get(id_) != row}
        assert differ <= set(changes.ids.tolist()) <= set(now)

    def content(self) -> dict[int, bytes]:
        rows = self.table.rows(self.table.ids())
        return {id_: row.tobytes() for id_, row in zip(rows.ids.tolist(), rows.values, strict=True)}

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "table"):
            return
        rows = self.table.rows(self.table.ids())
        assert rows.ids.tolist() == sorted(self.rows)
        expected = [self.rows[id_] for id_ in sorted(self.rows)]
        assert rows.touched.tolist() == [row.touched for row in expected]
        assert [v.tolist() for v in rows.values] == [row.weights.tolist() for row in expected]
        assert rows.scores.tolist() == [[row.show, row.click] for row in expected]
        held = self.table.candidates()
        assert held.ids.tolist() == sorted(self.waiting)
        assert held.values["counts"].tolist() == [self.waiting[i][0] for i in sorted(self.waiting)]
        assert held.touched.tolist() == [self.waiting[i][1] for i in sorted(self.waiting)]
        assert self.table.step == self.step


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def push(table: SparseTable, ids: Ids) -> None:
    table.push(ids, np.ones((len(ids), table.spec.push_width), np.float32), 1.0)


def whole(*tables: SparseTable) -> dict[int, tuple[bytes, int]]:
    pages = [table.rows(table.ids()) for table in tables]
    return {
        id_: (values.tobytes(), touched)
        for page in pages
        for id_, values, touched in zip(
            page.ids.tolist(), page.values, page.touched.tolist(), strict=True
        )
    }


@pytest.mark.parametrize(
    "entry",
    [
        CountFilterEntry(3),
        TTLEntry(steps=5),
        TTLEntry(steps=400) & CountFilterEntry(2),
        ShowClickEntry("s", "c") & TTLEntry(steps=9),
    ],
)
def test_policies_of_steps_are_the_same_on_any_number_of_servers(entry: Entry) -> None:
    """Rows and their ages over three tables are those of one table, step by step and after shrinks."""
    spec = dataclasses.replace(SPEC, rule=Adam(), entry=entry)
    one, parts = SparseTable(spec), [SparseTable(spec, servers=3) for _ in range(3)]
    random = np.random.default_rng(0)
    for step in range(60):
        ids = np.unique(random.zipf(1.3, 200) % 500)
        push(one, ids)
        for server, part in enumerate(parts):
            push(part, ids[server == ids % 3])
        if step % 20 == 19:
            gone = one.shrink(unseen=1)
            assert gone == sum(part.shrink(unseen=1) for part in parts)
        assert whole(one) == whole(*parts)
    assert len(one) > 10


def test_changes_since_a_mark() -> None:
    """Rows pushed, set and removed since a mark are told apart, and each mark has its own past."""
    table = SparseTable(dataclasses.replace(SPEC, entry=CapacityEntry(rows=100)))
    push(table, np.arange(100))
    first = table.mark()
    push(table, np.array([5, 6]))
    second = table.mark()
    table.remove(np.array([6, 7]))
    table.write(table.rows(np.array([8])))
    push(table, np.array([7, 200]))
    changes = table.changed_since(first)
    assert (changes.ids.tolist(), changes.removed.tolist()) == ([5, 7, 8, 200], [6])
    changes = table.changed_since(second)
    assert (changes.ids.tolist(), changes.removed.tolist()) == ([7, 8, 200], [6])
    table.release(first)
    push(table, np.arange(300, 310))  # lets the oldest go
    changes = table.changed_since(second)
    assert set(changes.removed.tolist()) == set(range(100)) - set(table.ids().tolist())
    table.release(second)
    table.set_clock(TableClock(7))
    third = table.mark()
    table.set_clock(TableClock(3))
    assert table.changed_since(third).ids.tolist() == table.ids().tolist()


def test_a_bounded_mark_is_given_up() -> None:
    """With more removed ids than the limit a bounded mark is not known any more; others and new ones are."""
    table = SparseTable(dataclasses.replace(SPEC, entry=CapacityEntry(rows=100)))
    push(table, np.arange(100))
    table.scan._history.limit = 20
    bounded, firm = table.mark(bounded=True), table.mark()
    table.remove(np.arange(20))
    assert table.changed_since(bounded).removed.tolist() == list(range(20))
    table.release(firm)
    assert table.scan.knows(bounded)
    table.remove(np.arange(20, 22))
    assert not table.scan.knows(bounded)
    assert not table.scan._history._removed
    table.release(bounded)
    later = table.mark(bounded=True)
    table.remove(np.arange(22, 24))
    assert table.changed_since(later).removed.tolist() == [22, 23]
    table.release(later)
    assert not table.scan._history.is_kept


def test_a_row_that_was_evicted_starts_anew() -> None:
    """Its next value is the first one again, optimizer state included."""
    spec = dataclasses.replace(SPEC, shape=(3,), rule=Adagrad(), entry=CapacityEntry(rows=4))
    table = SparseTable(spec)
    push(table, np.arange(4))
    once = whole(table)[0][0]
    push(table, np.arange(4))
    push(table, np.arange(10, 14))
    assert sorted(whole(table)) == [10, 11, 12, 13]
    push(table, np.arange(1))
    assert whole(table)[0][0] == once


def test_a_capacity_is_dealt_to_servers_and_never_passed() -> None:
    """Each of three servers holds a third, rounded up; one push cannot name more rows than fit."""
    spec = dataclasses.replace(SPEC, entry=CapacityEntry(rows=1000))
    table = SparseTable(spec, servers=3)
    for start in range(0, 5000, 250):
        push(table, np.arange(start, start + 250))
        assert len(table) <= 334
    assert set(range(4750, 5000)) <= set(table.ids().tolist())
    with pytest.raises(
        UsageError, match="at most 334 rows on this server and was asked to set 400"
    ):
        push(table, np.arange(400))
    assert table.step == 20


def test_a_capacity_that_refuses() -> None:
    """A push for which there is no room changes neither rows nor counts; bytes limit rows as well."""
    entry = CapacityEntry(rows=10, full="refuse") & CountFilterEntry(2)
    table = SparseTable(dataclasses.replace(SPEC, entry=entry))
    push(table, np.arange(8))
    push(table, np.arange(8))
    push(table, np.arange(8, 12))
    before = whole(table), table.candidates().values["counts"].tolist(), table.step
    with pytest.raises(UsageError, match="holds 8 rows of at most 10 and was asked to add 4"):
        push(table, np.arange(6, 12))
    assert before == (whole(table), table.candidates().values["counts"].tolist(), table.step)
    small = SparseTable(dataclasses.replace(SPEC, entry=CapacityEntry(bytes=1 << 20)))
    push(small, np.arange(20_000))
    push(small, np.arange(30_000, 50_000))
    assert len(small) <= (1 << 20) // (8 + ROW_BYTES) < 40_000


def test_ages_outlive_32_bits_of_steps() -> None:
    """Stamps are 32 bits wide, steps are not: ages stay right while the step passes 2**32 many times."""
    table = SparseTable(dataclasses.replace(SPEC, entry=TTLEntry(steps=2**30)))
    for turn in range(40):
        push(table, np.array([turn]))
        table.set_clock(TableClock(table.step + 2**28))
        push(table, np.array([1000]))
        ages = {id_: table.step - touched for id_, (_, touched) in whole(table).items()}
        assert ages == {
            1000: 0,
            **{t: (turn - t + 1) * 2**28 + 2 * (turn - t) + 1 for t in range(turn + 1)},
        }
        if turn == 6:
            break
    table.set_clock(TableClock(2**40))
    assert {t for i, (_, t) in whole(table).items()} == {2**40 - 2**31}


def test_churn_of_chosen_ids_is_refused_before_the_index_outgrows_its_place() -> None:
    """Ids whose hashes begin alike, then others whose hashes do, do no harm."""
    table = SparseTable(dataclasses.replace(SPEC, entry=None), max_rows=1 << 16)
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
    table = SparseTable(dataclasses.replace(SPEC, entry=None))
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


@pytest.mark.parametrize(("dim", "made"), [(1, SGD()), (5, Adam())])
def test_any_width_and_rule_keeps_its_scores(dim: int, made: Rule) -> None:
    """Shows and clicks lie behind rows of any width and any state, apart from both."""
    plain = TableSpec("t", "sparse", (dim,), made)
    tables = [
        SparseTable(plain),
        SparseTable(dataclasses.replace(plain, entry=ShowClickEntry("show", "click"))),
    ]
    ids = np.array(EDGES)
    for table in tables:
        values = np.ones((5, table.spec.push_width), np.float32)
        table.push(ids, values, 0.1)
        table.push(ids, values, 0.1)
    assert whole(tables[0]) == whole(tables[1])
    assert (tables[1].rows(ids).scores == 2).all()
    assert tables[1].shrink(1.9) == 0
    assert tables[1].shrink(2.0) == 5 == 5 - len(tables[1])
