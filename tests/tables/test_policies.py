"""Admission, eviction and its stream against a model in plain Python that knows the definitions alone."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.eviction_records import EvictedIds, EvictionCause
from psfleet.core.engine.kernels.hashing import hash_ids
from psfleet.core.engine.kernels.initial_values import initial_rows
from psfleet.core.engine.rules import SGD, Adam
from psfleet.core.engine.rules.rule import Rule
from psfleet.core.engine.schema.entry import (
    CapacityEntry,
    CountFilterEntry,
    DecayedFrequency,
    Entry,
    EvictionPolicy,
    EvictionStreamEntry,
    ShowClickEntry,
    TTLEntry,
)
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.assigned_weights import refill
from psfleet.core.engine.tables.row_data import TableClock
from psfleet.core.engine.tables.row_memory import ROW_BYTES
from psfleet.core.engine.tables.sparse import SparseTable

pytestmark = pytest.mark.quick

Ids = NDArray[np.int64]
SPEC = TableSpec("rows", "sparse", (2,), SGD(), seed=5)
CAPACITY, WAITING, TTL, NEEDED, KEEP = 24, 40, 6, 2, 40
ENTRY = (
    CountFilterEntry(NEEDED, candidates=WAITING)
    & TTLEntry(steps=TTL, seconds=4.0)
    & EvictionStreamEntry(KEEP)
)
SHOWS = ShowClickEntry("show", "click", delete_threshold=0.3, delete_after_unseen=2)
EDGES = [0, -1, 1, 2**63 - 1, -(2**63)]
ANY = st.one_of(st.sampled_from(EDGES), st.integers(0, 60))
IDS = st.lists(ANY, min_size=1, max_size=CAPACITY, unique=True)


def blend(age: float, h: tuple[float, ...], frequency: float) -> float:
    """Dyadic numbers: exact in any precision."""
    return 0.5 * frequency - h[0] * age


@dataclass(frozen=True)
class Blend(EvictionPolicy):
    """Frequency and age."""

    fading: float = 0.25
    name = "blend"

    def score(self) -> Callable[..., float]:
        return blend

    def scalars(self) -> tuple[float, ...]:
        return (self.fading,)


SCORES: dict[str, tuple[EvictionPolicy | str, Callable[[float, int], float]]] = {
    "lru": ("lru", lambda frequency, age: 0.0),
    "lfu": ("lfu", lambda frequency, age: frequency),
    "decayed": (DecayedFrequency(1.0), lambda frequency, age: frequency * 0.5**age),
    "blend": (Blend(0.5), lambda frequency, age: 0.5 * frequency - 0.5 * age),
}


def hashed(id_: int) -> int:
    return int(hash_ids(np.array([id_], np.int64))[0])


@dataclass
class Row:
    weights: NDArray[np.float32]
    touched: int
    frequency: np.float32 = field(default_factory=lambda: np.float32(1))
    show: np.float32 = field(default_factory=lambda: np.float32(0))
    click: np.float32 = field(default_factory=lambda: np.float32(0))


def events_of(page: EvictedIds) -> list[tuple[int, int, int]]:
    return list(zip(page.ids.tolist(), page.steps.tolist(), page.causes.tolist(), strict=True))


class Model(RuleBasedStateMachine):
    """A table with every kind of entry, an eviction policy and a stream beside dictionaries of rows and of
    waiting ids."""

    @initialize(policy=st.sampled_from(sorted(SCORES)), counts=st.booleans())
    def start(self, policy: str, counts: bool) -> None:
        given, self.score = SCORES[policy]
        self.half_life = 1.0 if policy == "decayed" else 0.0
        self.scored = policy != "lru"
        self.counts = counts and policy in ("lru", "lfu")  # others would be kernels more
        entry = ENTRY & CapacityEntry(rows=CAPACITY, policy=given)
        self.table = SparseTable(
            dataclasses.replace(SPEC, entry=entry & SHOWS if self.counts else entry)
        )
        self.rows: dict[int, Row] = {}
        self.waiting: dict[int, list[int]] = {}  # count, touched
        self.events: list[tuple[int, int, int]] = []
        self.step = 0
        self.shrinks: list[int] = []
        self.ticks: list[tuple[float, int]] = []
        self.marks: list[tuple[object, dict[int, bytes]]] = []

    @rule(ids=IDS, seed=st.integers(0, 99))
    def push(self, ids: list[int], seed: int) -> None:
        self.update(ids, np.random.default_rng(seed))

    @rule(turns=st.integers(1, 5), count=st.integers(1, CAPACITY), seed=st.integers(0, 9999))
    def push_often(self, turns: int, count: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(turns):
            self.update(random.choice(70, count, replace=False).tolist(), random)

    def update(self, ids: list[int], random: np.random.Generator) -> None:
        values = random.integers(-4, 5, (len(ids), self.table.spec.push_width)).astype(np.float32)
        values[:, 2:] = np.abs(values[:, 2:])
        self.table.push(np.array(ids, np.int64), values, 0.5)
        self.step += 1
        unknown = [id_ for id_ in ids if id_ not in self.rows]
        admitted = {i for i in unknown if self.waiting.get(i, [0])[0] + 1 >= NEEDED}
        self.wait(unknown)
        for id_ in admitted:
            self.waiting.pop(id_, None)
        for id_ in set(ids) - set(unknown):
            row = self.rows[id_]
            decay = 0.5 ** (self.step - row.touched) if self.half_life else 1.0
            row.frequency = np.float32(float(row.frequency) * decay + 1)
            row.touched = self.step
        short = len(self.rows) + len(admitted) - CAPACITY
        if short > 0:
            old = [i for i, row in self.rows.items() if row.touched < self.step]
            first = sorted(old, key=lambda i: (self.worth(i), self.rows[i].touched, hashed(i)))
            self.drop(first[: max(short, CAPACITY // 16)], EvictionCause.CAPACITY)
        for id_ in admitted:
            weights = initial_rows(np.array([id_]), 2, SPEC.initializer, SPEC.seed, SPEC.name)
            self.rows[id_] = Row(weights.reshape(2), self.step)
        for place, id_ in enumerate(ids):
            if id_ in self.rows:
                row = self.rows[id_]
                row.weights = row.weights - np.float32(0.5) * values[place, :2]
                if self.counts:
                    row.show, row.click = row.show + values[place, 2], row.click + values[place, 3]
        self.expire(self.step - TTL, EvictionCause.EXPIRED)

    def wait(self, unknown: list[int]) -> None:
        """Count ids without a row, and let the oldest of them go where there are too many."""
        fresh = [id_ for id_ in unknown if id_ not in self.waiting]
        for id_ in set(unknown) - set(fresh):
            self.waiting[id_][1] = self.step
        short = len(self.waiting) + len(fresh) - WAITING
        if short > 0:
            old = [i for i, (_, touched) in self.waiting.items() if touched < self.step]
            old.sort(key=lambda i: (self.waiting[i][1], hashed(i)))
            for id_ in old[: max(short, WAITING // 16)]:
                del self.waiting[id_]
        room = WAITING - len(self.waiting)
        for id_ in [i for i in unknown if i in self.waiting] + fresh[:room]:
            self.waiting[id_] = [self.waiting.get(id_, [0])[0] + 1, self.step]

    def worth(self, id_: int) -> float:
        row = self.rows[id_]
        return self.score(float(row.frequency), self.step - row.touched)

    def drop(self, ids: list[int], cause: EvictionCause) -> int:
        self.events += [(id_, self.step, int(cause)) for id_ in sorted(ids)]
        for id_ in ids:
            del self.rows[id_]
        return len(ids)

    def expire(self, last: int, cause: EvictionCause) -> int:
        self.waiting = {i: held for i, held in self.waiting.items() if held[1] > last}
        return self.drop([i for i, row in self.rows.items() if row.touched <= last], cause)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def tick(self, seconds: float) -> None:
        self.table.tick(seconds)
        now = (self.ticks[-1][0] if self.ticks else 0.0) + seconds
        self.ticks.append((now, self.step))
        over = [step for time, step in self.ticks if time <= now - 4.0]
        if over:
            self.expire(over[-1], EvictionCause.EXPIRED)

    @rule(threshold=st.sampled_from([None, 0.0, 0.5, 1.0, 2.5]), unseen=st.sampled_from([None, 1]))
    def shrink(self, threshold: float | None, unseen: int | None) -> None:
        gone = self.table.shrink(threshold, unseen)
        below: list[int] = []
        if self.counts:
            least = 0.3 if threshold is None else threshold
            unseen = unseen or 2
            for id_, row in self.rows.items():
                row.show = np.float32(float(row.show) * 0.98)
                row.click = np.float32(float(row.click) * 0.98)
                if 0.1 * (float(row.show) - float(row.click)) + float(row.click) < least:
                    below.append(id_)
        elif self.scored and threshold is not None:
            below = [id_ for id_ in self.rows if self.worth(id_) < threshold]
        elif unseen is None and threshold is not None:
            unseen = int(threshold)
        expected = self.drop(below, EvictionCause.SHRUNK)
        if unseen and len(self.shrinks) >= unseen:
            expected += self.expire(self.shrinks[-unseen], EvictionCause.SHRUNK)
        self.shrinks.append(self.step)
        assert gone == expected

    @rule(part=st.floats(0, 1), seed=st.integers(0, 99))
    def remove(self, part: float, seed: int) -> None:
        """What is removed by hand is no eviction."""
        known = np.array([*self.rows, *self.waiting], np.int64)
        gone = known[np.random.default_rng(seed).random(len(known)) < part]
        assert self.table.remove(gone) == len([i for i in gone.tolist() if i in self.rows])
        for id_ in gone.tolist():
            self.rows.pop(id_, None)
            self.waiting.pop(id_, None)

    @rule(frozen=st.booleans())
    def go_on_elsewhere(self, frozen: bool) -> None:
        """What is handed out makes an equal table, which takes the place of this one; what a frozen table
        holds makes one with its stream."""
        again = SparseTable(self.table.spec)
        if frozen:
            view = self.table.freeze()
            for page in [*view.pages(), {}]:
                refill(again, view.clock, page)
            view.close()
        else:
            again.set_clock(self.table.clock)
            again.write(self.table.rows(self.table.ids()))
            again.write_candidates(self.table.candidates())
            self.events.clear()
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
        counts = [[row.show, row.click] if self.counts else [] for row in expected]
        uses = [[row.frequency] if self.scored else [] for row in expected]
        assert rows.scores.tolist() == [a + b for a, b in zip(counts, uses, strict=True)]
        held = self.table.candidates()
        assert held.ids.tolist() == sorted(self.waiting)
        assert held.values["counts"].tolist() == [self.waiting[i][0] for i in sorted(self.waiting)]
        assert held.touched.tolist() == [self.waiting[i][1] for i in sorted(self.waiting)]
        assert self.table.step == self.step

    @rule(back=st.integers(0, KEEP + 20), limit=st.integers(0, 9))
    def read(self, back: int, limit: int) -> None:
        """The stream gives what it keeps of the evictions, and says how many were missed."""
        position = max(len(self.events) - back, 0)
        page = self.table.evicted(position, limit)
        first = max(position, len(self.events) - KEEP)
        assert events_of(page) == self.events[first : first + limit]
        assert page.missed == first - position
        assert page.position == (first + len(page),)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


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
    ("entry", "least"),
    [
        (CountFilterEntry(3), None),
        (TTLEntry(steps=5), None),
        (TTLEntry(steps=400) & CountFilterEntry(2), None),
        (ShowClickEntry("s", "c") & TTLEntry(steps=9), None),
        (CapacityEntry(10_000, policy=DecayedFrequency(7.0)), 0.75),
    ],
)
def test_policies_of_steps_are_the_same_on_any_number_of_servers(
    entry: Entry, least: float | None
) -> None:
    """Rows, their ages and scores, and evictions over three tables are those of one table, step by step and
    after shrinks."""
    spec = dataclasses.replace(SPEC, rule=Adam(), entry=entry & EvictionStreamEntry(9999))
    one, parts = SparseTable(spec), [SparseTable(spec, servers=3) for _ in range(3)]
    random = np.random.default_rng(0)
    for step in range(60):
        ids = np.unique(random.zipf(1.3, 200) % 500)
        push(one, ids)
        for server, part in enumerate(parts):
            push(part, ids[server == ids % 3])
        if step % 20 == 19:
            gone = one.shrink(least, unseen=1)
            assert gone == sum(part.shrink(least, unseen=1) for part in parts)
        assert whole(one) == whole(*parts)
    scores = [table.rows(table.ids()) for table in (one, *parts)]
    expected, *actual = ([*zip(rows.ids, rows.scores.tolist(), strict=True)] for rows in scores)
    assert expected == sorted(chain(*actual))
    events = [event for part in parts for event in events_of(part.evicted(0, 9999))]
    assert sorted(events) == sorted(events_of(one.evicted(0, 9999)))
    assert len(one) > 10


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
