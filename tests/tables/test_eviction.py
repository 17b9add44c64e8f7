"""Eviction policies and the stream of evicted ids against a model in plain Python."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from psfleet.checkpoint import reshard
from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.entry import (
    CapacityEntry,
    CountFilterEntry,
    DecayedFrequency,
    Entry,
    EvictionPolicy,
    EvictionStreamEntry,
    ShowClickEntry,
    TTLEntry,
)
from psfleet.errors import ConfigError, RuleError, UsageError
from psfleet.kernels.hashing import hash_ids
from psfleet.rules import SGD
from psfleet.runtime.evictions import EvictedIds, EvictionCause, EvictionReader
from psfleet.runtime.interface import Gradient
from psfleet.schema.entry import make_entry
from psfleet.schema.table import TableSpec
from psfleet.tables.assigned_weights import add_rows, refill, set_rows
from psfleet.tables.memory_choice import MemoryChoice
from psfleet.tables.sparse import SparseTable

Ids = NDArray[np.int64]
CAPACITY, KEEP, TTL = 24, 40, 7
SPEC = TableSpec("rows", "sparse", (2,), SGD(), seed=5)


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


def value(shows: float, clicks: float) -> float:
    return clicks / shows


@dataclass(frozen=True)
class ClickRate(EvictionPolicy):
    """Clicks of a show: no number for a row that was never shown."""

    name = "click_rate"

    def score(self) -> Callable[..., float]:
        return value


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
    touched: int
    frequency: np.float32 = field(default_factory=lambda: np.float32(1))


class Model(RuleBasedStateMachine):
    """A table with a policy, a TTL and a stream beside dictionaries."""

    @initialize(policy=st.sampled_from(sorted(SCORES)))
    def start(self, policy: str) -> None:
        given, self.score = SCORES[policy]
        self.half_life = 1.0 if policy == "decayed" else 0.0
        entry = CapacityEntry(CAPACITY, policy=given) & TTLEntry(steps=TTL)
        self.table = SparseTable(dataclasses.replace(SPEC, entry=entry & EvictionStreamEntry(KEEP)))
        self.scored = policy != "lru"
        self.rows: dict[int, Row] = {}
        self.events: list[tuple[int, int, int]] = []
        self.step = 0

    @rule(seed=st.integers(0, 9999), count=st.integers(1, CAPACITY), turns=st.integers(1, 4))
    def push(self, seed: int, count: int, turns: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(turns):
            self.update(random.permutation(np.unique(random.zipf(1.2, count) % 90 - 3)))

    def update(self, ids: Ids) -> None:
        self.table.push(ids, np.ones((len(ids), 2), np.float32), 0.5)
        self.step += 1
        new = []
        for id_ in ids.tolist():
            row = self.rows.get(id_)
            if row is None:
                new.append(id_)
                continue
            decay = 0.5 ** (self.step - row.touched) if self.half_life else 1.0
            row.frequency = np.float32(float(row.frequency) * decay + 1)
            row.touched = self.step
        short = len(self.rows) + len(new) - CAPACITY
        if short > 0:
            old = [i for i, row in self.rows.items() if row.touched < self.step]
            first = sorted(old, key=lambda i: (self.worth(i), self.rows[i].touched, hashed(i)))
            self.drop(first[: max(short, CAPACITY // 16)], EvictionCause.CAPACITY)
        self.rows |= {id_: Row(self.step) for id_ in new}
        over = [i for i, row in self.rows.items() if self.step - row.touched >= TTL]
        self.drop(over, EvictionCause.EXPIRED)

    def worth(self, id_: int) -> float:
        row = self.rows[id_]
        return self.score(float(row.frequency), self.step - row.touched)

    def drop(self, ids: list[int], cause: EvictionCause) -> None:
        self.events += [(id_, self.step, int(cause)) for id_ in sorted(ids)]
        for id_ in ids:
            del self.rows[id_]

    @rule(threshold=st.sampled_from([-1.0, 0.5, 1.0, 2.5]))
    def shrink(self, threshold: float) -> None:
        if self.scored:
            below = [i for i in self.rows if self.worth(i) < threshold]
            assert self.table.shrink(threshold) == len(below)
            self.drop(below, EvictionCause.SHRUNK)

    @rule(part=st.floats(0, 1), seed=st.integers(0, 99))
    def remove(self, part: float, seed: int) -> None:
        """What is removed by hand is no eviction."""
        known = np.array([*self.rows], np.int64)
        gone = known[np.random.default_rng(seed).random(len(known)) < part]
        self.table.remove(gone)
        for id_ in gone.tolist():
            del self.rows[id_]

    @rule()
    def go_on_elsewhere(self) -> None:
        """What a frozen table holds makes an equal one, stream included, which takes its place."""
        frozen, again = self.table.freeze(), SparseTable(self.table.spec)
        for page in frozen.pages():
            refill(again, frozen.clock, page)
        refill(again, frozen.clock, {})
        frozen.close()
        self.table = again

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "table"):
            return
        rows = self.table.rows(self.table.ids())
        expected = [self.rows[id_] for id_ in sorted(self.rows)]
        assert rows.ids.tolist() == sorted(self.rows)
        assert rows.touched.tolist() == [row.touched for row in expected]
        if self.scored:
            assert rows.scores[:, 0].tolist() == [row.frequency for row in expected]

    @rule(back=st.integers(0, KEEP + 20), limit=st.integers(0, 9))
    def read(self, back: int, limit: int) -> None:
        position = max(len(self.events) - back, 0)
        page = self.table.evicted(position, limit)
        first = max(position, len(self.events) - KEEP)
        assert events_of(page) == self.events[first : first + limit]
        assert page.missed == first - position
        assert page.position == (first + len(page),)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def events_of(page: EvictedIds) -> list[tuple[int, int, int]]:
    return list(zip(page.ids.tolist(), page.steps.tolist(), page.causes.tolist(), strict=True))


def push(table: SparseTable, ids: Ids) -> None:
    table.push(ids, np.ones((len(ids), table.spec.push_width), np.float32), 1.0)


def made(policy: EvictionPolicy | str, rows: int = 1000, also: Entry | None = None) -> SparseTable:
    entry: Entry = CapacityEntry(rows, policy=policy)
    return SparseTable(dataclasses.replace(SPEC, entry=entry & also if also else entry))


@settings(max_examples=25, deadline=None)
@given(
    half_life=st.sampled_from([1.0, 7.0]),  # few, for each has a kernel of its own
    gaps=st.lists(st.integers(1, 200), min_size=1, max_size=30),
)
def test_a_decayed_frequency_is_its_definition(half_life: float, gaps: list[int]) -> None:
    """Each update counts 0.5 ** (age / half_life), whichever other updates there were."""
    table = made(DecayedFrequency(half_life))
    steps = np.cumsum(gaps)
    for step in steps:
        table.restore_step(int(step) - 1)
        push(table, np.array([3]))
    expected = np.sum(0.5 ** ((steps[-1] - steps) / half_life))
    np.testing.assert_allclose(table.rows(np.array([3])).scores[0, 0], expected, rtol=1e-5)


def test_frequencies_and_thresholds_are_the_same_on_any_number_of_servers() -> None:
    """Frequencies of rows, and which rows `shrink` removes by their score, on 1, 2 and 4 servers."""
    random = np.random.default_rng(0)
    batches = [np.unique(random.zipf(1.3, 200) % 500) for _ in range(40)]
    figures = []
    for servers in (1, 2, 4):
        entry = CapacityEntry(10_000, policy=DecayedFrequency(7.0))
        spec = dataclasses.replace(SPEC, entry=entry & EvictionStreamEntry(9999))
        parts = [SparseTable(spec, servers=servers) for _ in range(servers)]
        for number, ids in enumerate(batches):
            for server, part in enumerate(parts):
                push(part, ids[server == ids % servers])
                if number % 15 == 14:
                    part.shrink(0.75)
        rows = [part.rows(part.ids()) for part in parts]
        state = {
            id_: (values.tobytes(), scores.tobytes())
            for part in rows
            for id_, values, scores in zip(part.ids.tolist(), part.values, part.scores, strict=True)
        }
        gone = [event for part in parts for event in events_of(part.evicted(0, 9999))]
        assert len(gone) > 50
        figures.append((state, sorted(gone)))
    assert figures[0] == figures[1] == figures[2]


def test_deltas_of_geo_mode_count_as_updates() -> None:
    """Rows to which deltas are added have the frequencies and ages of rows that were pushed."""
    pushed, added = made("lfu"), made("lfu")
    for ids in ([1, 2], [2, 3], [2]):
        push(pushed, np.array(ids))
        add_rows(added, np.array(ids), np.ones((len(ids), 2), np.float32))
    rows = [table.rows(table.ids()) for table in (pushed, added)]
    assert rows[1].scores.tolist() == rows[0].scores.tolist() == [[1], [3], [1]]
    assert rows[1].touched.tolist() == rows[0].touched.tolist()
    set_rows(added, np.array([2, 9]), np.zeros((2, 2), np.float32))
    assert added.rows(np.array([2, 9])).scores.tolist() == [[3], [0]]


def test_a_policy_of_shows_and_clicks() -> None:
    """A user's score of shows and clicks orders rows without more memory; no number goes first."""
    plain = made("lru", 4, ShowClickEntry("s", "c"))
    table = made(ClickRate(), 4, ShowClickEntry("s", "c"))
    assert table.spec.scores == plain.spec.scores == 2
    shown = np.array([[10, 1], [10, 5], [0, 0], [2, 1]], np.float32)
    table.push(np.arange(4), np.concatenate([np.ones((4, 2), np.float32), shown], axis=1), 1.0)
    gone = []
    for id_ in (10, 11, 12):
        before = set(table.ids().tolist())
        push(table, np.array([id_]))
        gone += sorted(before - set(table.ids().tolist()))
    assert gone == [2, 0, 3]  # 0 / 0, then 0.1, then 0.5; row 1 has 0.5 too and a larger hash


def powered(frequency: float, h: tuple[float]) -> float:
    return math.pow(frequency, h[0])


@dataclass(frozen=True)
class Powered(Blend):
    """Its score takes a power, which is another function on a device."""

    name = "powered"

    def score(self) -> Callable[..., float]:
        return powered


def test_a_policy_that_a_device_would_round_otherwise_is_in_host_memory() -> None:
    """Also where other tables are on a GPU; one that asks for the GPU is refused. Other policies go there."""
    choice = MemoryChoice("cuda", has_devices=True)
    other, lfu = (
        dataclasses.replace(SPEC, entry=CapacityEntry(10, policy=policy))
        for policy in (Powered(), "lfu")
    )
    assert [choice.of(spec).name for spec in (other, lfu)] == ["cpu", "cuda"]
    with pytest.raises(
        ConfigError, match="its eviction policy 'powered' takes powers or remainders, whose last"
    ):
        EmbeddedRuntime().create(dataclasses.replace(other, device="cuda"))


@pytest.mark.parametrize(
    "entry",
    [
        CapacityEntry(5, 7),
        CapacityEntry(bytes=5, full="refuse"),
        CountFilterEntry(5),
        CapacityEntry(5, policy="lfu"),
        CapacityEntry(5, policy=DecayedFrequency(30.5)) & TTLEntry(3),
        EvictionStreamEntry(12) & CapacityEntry(5, policy=Blend(0.75)),
    ],
)
def test_an_entry_travels_as_words_and_numbers(entry: Entry) -> None:
    """What messages and snapshots hold of it makes it again; without a policy it is what it always was."""
    assert make_entry(entry.kind, entry.values()) == entry
    assert CapacityEntry(5, 7).kind == "capacity:evict"
    assert CapacityEntry(5, 7).values() == {"rows": 5.0, "bytes": 7.0}


def test_a_policy_with_another_definition_is_refused() -> None:
    """A user's policy is referred to by a digest of its source: a server with another text says so."""
    entry = CapacityEntry(5, policy=Blend())
    with pytest.raises(RuleError, match="eviction policy 'blend' is defined differently here"):
        make_entry(entry.kind[:-1] + "x", entry.values())
    with pytest.raises(RuleError, match="eviction policy 'blend' is defined differently here"):
        make_entry("capacity:evict:blend", entry.values())


def gradient(spec: TableSpec, ids: Ids) -> Gradient:
    return Gradient(spec.key, np.ones((len(ids), 2), np.float32), ids, 0.5)


def test_snapshots_hold_frequencies_and_the_stream(tmp_path: Path) -> None:
    """A loaded table evicts the same rows at the same positions; on other servers positions count anew."""
    entry = CapacityEntry(20, policy="lfu") & EvictionStreamEntry(100)
    spec = dataclasses.replace(SPEC, entry=entry)
    saved, loaded = EmbeddedRuntime(), EmbeddedRuntime()
    random = np.random.default_rng(1)
    batches = [np.unique(random.zipf(1.2, 12) % 80) for _ in range(40)]
    saved.create(spec)
    for ids in batches[:20]:
        saved.push([gradient(spec, ids)])
    saved.save(str(tmp_path / "model"))
    loaded.load(str(tmp_path / "model"))
    for ids in batches[20:]:
        for runtime in (saved, loaded):
            runtime.push([gradient(spec, ids)])
    readers = [EvictionReader(runtime, "rows") for runtime in (saved, loaded)]
    pages = [reader.read() for reader in readers]
    assert events_of(pages[0]) == events_of(pages[1])
    assert pages[0].position == pages[1].position == readers[0].position
    assert pages[0].position[0] > len(pages[0]) == 100
    assert [*readers[0]] == []


def test_a_stream_begins_anew_on_other_servers(tmp_path: Path) -> None:
    """A snapshot of one server for two has no positions; a reader that has one is told."""
    spec = dataclasses.replace(SPEC, entry=TTLEntry(4) & EvictionStreamEntry(100))
    runtime, again = EmbeddedRuntime(), EmbeddedRuntime()
    runtime.create(spec)
    for id_ in range(20):
        runtime.push([gradient(spec, np.array([id_]))])
    assert len(EvictionReader(runtime, spec).read()) > 10
    runtime.save(str(tmp_path / "one"))
    reshard(str(tmp_path / "one"), str(tmp_path / "two"), 2)
    again.load(str(tmp_path / "two"))
    with pytest.raises(UsageError, match="position 1 and this server has come to 0"):
        again.evictions(spec.key, [1], 10)
    with pytest.raises(
        UsageError, match=r"\(1, 2\) of evictions is one of 2 servers and the fleet has 1"
    ):
        EvictionReader(again, spec, (1, 2)).read()


def test_tables_without_a_stream_say_how_to_get_one() -> None:
    """Evictions of a table without a stream, and of a dense table, are refused."""
    runtime = EmbeddedRuntime()
    key = runtime.create(SPEC)
    dense = runtime.create(TableSpec("d", "dense", (3,), SGD()), np.zeros(3, np.float32))
    with pytest.raises(
        UsageError, match="'rows' does not remember evicted ids; join its entry with an Ev"
    ):
        runtime.evictions(key, [0], 10)
    with pytest.raises(UsageError, match="'d' is dense; only rows are evicted"):
        runtime.evictions(dense, [0], 10)
