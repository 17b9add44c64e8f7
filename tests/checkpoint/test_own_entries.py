"""An admission rule is an entry and what it does: it travels, and its candidates survive snapshots."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet import optimizer
from psfleet.checkpoint import load_shard, plan_migration, read_specs, save_fleet
from psfleet.entry import CountFilterEntry, Entry, ProbabilityEntry, TTLEntry
from psfleet.errors import ConfigError
from psfleet.features import Feature, FeatureSet, Table
from psfleet.rules import SGD
from psfleet.schema.entry import FORMS, make_entry, stored_as
from psfleet.schema.table import TableSpec
from psfleet.shard.shard import Shard
from psfleet.tables.admission import AdmissionRule, admits
from psfleet.tables.candidates import CandidateCounts
from psfleet.tables.sparse import SparseTable
from psfleet.wire.table_messages import read_spec, write_spec

Ids = NDArray[np.int64]
IDS = np.arange(6)


@pytest.fixture
def odd_entry() -> Iterator[type[Entry]]:
    """An entry whose even ids get a row at once, and odd ones with a later push."""
    before = dict(FORMS)

    @stored_as("odd", pushes=int, share=float)
    @dataclass(frozen=True, slots=True)
    class OddEntry(Entry):
        needed: int
        share: float = 0.5
        admits = True
        candidate = CountFilterEntry.candidate

    @admits(OddEntry)
    class OddRule(AdmissionRule):
        candidates: CandidateCounts

        def __init__(self, entry: OddEntry, spec: TableSpec, servers: int) -> None:
            self.candidates = CandidateCounts(entry.needed, 64)

        def passing(self, ids: Ids, step: int) -> NDArray[np.bool_]:
            even: NDArray[np.bool_] = ids % 2 == 0
            return even | self.candidates.passing(ids)

        def pushed(self, ids: Ids, step: int) -> None:
            self.candidates.count(np.ascontiguousarray(ids[ids % 2 != 0]), step)

    yield OddEntry
    FORMS.clear()
    FORMS.update(before)


def made(entry: Entry) -> TableSpec:
    """A table with that entry."""
    return TableSpec("t", "sparse", (2,), SGD(), entry=entry)


def sparse(shard: Shard, spec: TableSpec) -> SparseTable:
    """The table on a shard."""
    table = shard.tables[spec.key]
    assert isinstance(table, SparseTable)
    return table


def trained(spec: TableSpec) -> Shard:
    """A shard with the table, whose ids were pushed once."""
    shard = Shard()
    shard.create(spec, np.zeros(0, np.float32))
    sparse(shard, spec).push(IDS, np.ones((len(IDS), 2), np.float32), 1.0)
    return shard


def test_it_does_what_its_rule_says(odd_entry: type[Entry]) -> None:
    """Even ids have a row after their first push, odd ones after their second; it travels as its numbers."""
    entry = make_entry("odd", {"pushes": 2.0, "share": 0.25})
    assert entry == odd_entry(2, 0.25)  # type: ignore[call-arg]  # the class is that of the fixture
    spec = made(odd_entry(2) & TTLEntry(steps=9))  # type: ignore[call-arg]
    assert read_spec(write_spec(spec)) == spec
    assert spec.candidate == {"counts": int}
    table = sparse(trained(spec), spec)
    assert sorted(table.ids()) == [0, 2, 4]
    assert sorted(table.candidates().ids) == [1, 3, 5]
    table.push(IDS[:2], np.ones((2, 2), np.float32), 1.0)
    assert sorted(table.ids()) == [0, 1, 2, 4]
    with pytest.raises(
        ConfigError, match=r"pushes of entry 'odd' is 1\.5; it must be a whole number"
    ):
        make_entry("odd", {"pushes": 1.5, "share": 0.25})
    with pytest.raises(
        ConfigError, match="only one of ProbabilityEntry, CountFilterEntry and OddEntry"
    ):
        odd_entry(2) & ProbabilityEntry(0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize("later", [3, None])
def test_its_candidates_survive(odd_entry: type[Entry], tmp_path: Path, later: int | None) -> None:
    """A snapshot holds them, and so does one that was migrated to a table that keeps candidates."""
    spec = made(odd_entry(2))  # type: ignore[call-arg]
    save_fleet(str(tmp_path / "model"), [trained(spec)])
    found = Shard()
    load_shard(tmp_path / "model", found)
    assert sorted(sparse(found, spec).candidates().ids) == [1, 3, 5]
    entry = CountFilterEntry(3) if later is None else odd_entry(later)  # type: ignore[call-arg]
    wanted = FeatureSet([Feature("f", Table("t", 2, optimizer=optimizer.SGD(0.1), entry=entry))])
    plan_migration(str(tmp_path / "model"), wanted).apply(tmp_path / "new")
    (new,) = read_specs(str(tmp_path / "new"))
    assert new.entry == entry
    again = Shard()
    load_shard(tmp_path / "new", again)
    assert sorted(sparse(again, new).candidates().ids) == [1, 3, 5]
    assert sparse(again, new).candidates().values["counts"].tolist() == [1, 1, 1]
