"""Eviction policies, the stream of evicted ids, and marks; test_policies.py has a model of all three."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from psfleet.checkpoint import reshard
from psfleet.core.base.errors import RuleError, UsageError
from psfleet.core.engine.eviction_reader import EvictionReader
from psfleet.core.engine.rules import SGD
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.entry import (
    CapacityEntry,
    CountFilterEntry,
    DecayedFrequency,
    Entry,
    EvictionPolicy,
    EvictionStreamEntry,
    ShowClickEntry,
    TTLEntry,
    make_entry,
)
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.assigned_weights import add_rows, set_rows
from psfleet.core.engine.tables.row_data import TableClock
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from tests.tables.test_policies import SPEC, Blend, events_of, push

pytestmark = pytest.mark.quick

Ids = NDArray[np.int64]


def value(shows: float, clicks: float) -> float:
    return clicks / shows


@dataclass(frozen=True)
class ClickRate(EvictionPolicy):
    """Clicks of a show: no number for a row that was never shown."""

    name = "click_rate"

    def score(self) -> Callable[..., float]:
        return value


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
    """A loaded table evicts the same rows at the same positions; on other servers positions count again."""
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
    assert table.scan.has_history_since(bounded)
    table.remove(np.arange(20, 22))
    assert not table.scan.has_history_since(bounded)
    assert not table.scan._history._removed
    table.release(bounded)
    later = table.mark(bounded=True)
    table.remove(np.arange(22, 24))
    assert table.changed_since(later).removed.tolist() == [22, 23]
    table.release(later)
    assert not table.scan._history.is_kept
