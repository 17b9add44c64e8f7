"""An admission rule is an entry and what it does: it travels, and its candidates survive snapshots."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from psfleet import optimizer
from psfleet.checkpoint import load_shard, plan_migration, read_specs, reshard, save_fleet
from psfleet.entry import (
    FORMS,
    CountFilterEntry,
    Entry,
    ProbabilityEntry,
    TTLEntry,
    make_entry,
    stored_as,
)
from psfleet.errors import ConfigError
from psfleet.features import Feature, FeatureSet, Table
from psfleet.rules import SGD
from psfleet.schema.table import TableSpec
from psfleet.shard.shard import Shard
from psfleet.tables.admission import AdmissionRule, admits
from psfleet.tables.lifetime import CandidateCounts, CandidateIds
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
    shard = Shard()
    load_shard(tmp_path / "model", shard)
    assert sorted(sparse(shard, spec).candidates().ids) == [1, 3, 5]
    entry = CountFilterEntry(3) if later is None else odd_entry(later)  # type: ignore[call-arg]
    expected = FeatureSet([Feature("f", Table("t", 2, optimizer=optimizer.SGD(0.1), entry=entry))])
    plan_migration(str(tmp_path / "model"), expected).apply(tmp_path / "new")
    (new,) = read_specs(str(tmp_path / "new"))
    assert new.entry == entry
    again = Shard()
    load_shard(tmp_path / "new", again)
    assert sorted(sparse(again, new).candidates().ids) == [1, 3, 5]
    assert sparse(again, new).candidates().values["counts"].tolist() == [1, 1, 1]


@pytest.fixture
def warm_entry() -> Iterator[type[Entry]]:
    """An entry that gives a row to ids that are pushed often in a short time."""
    before = dict(FORMS)

    @stored_as("warm", needed=float, kept=int)
    @dataclass(frozen=True, slots=True)
    class WarmEntry(Entry):
        needed: float = 1.4
        kept: int = 64
        admits = True
        candidate: ClassVar = {"warmth": float, "first_steps": int}

    @admits(WarmEntry)
    class WarmRule(AdmissionRule):
        candidates: CandidateIds

        def __init__(self, entry: WarmEntry, spec: TableSpec, servers: int) -> None:
            self._needed = entry.needed
            self.candidates = CandidateIds(entry.candidate, entry.kept)

        def _warmth(self, ids: Ids, step: int) -> NDArray[np.float32]:
            """1 for each push, halved with each step since it was first pushed."""
            known = self.candidates.known(ids)
            since = np.where(known["first_steps"], step - known["first_steps"], 0)
            warmth: NDArray[np.float32] = 1 + known["warmth"] * 0.5 ** since.astype(np.float32)
            return warmth

        def passing(self, ids: Ids, step: int) -> NDArray[np.bool_]:
            warm: NDArray[np.bool_] = self._warmth(ids, step) >= self._needed
            return warm

        def pushed(self, ids: Ids, step: int) -> None:
            warmth = self._warmth(ids, step)
            firsts = self.candidates.known(ids)["first_steps"]
            firsts = np.where(firsts, firsts, step)
            waits = warmth < self._needed
            values = {"warmth": warmth[waits], "first_steps": firsts[waits]}
            self.candidates.remember(ids[waits], values, step)
            self.candidates.forget(ids[~waits])

    yield WarmEntry
    FORMS.clear()
    FORMS.update(before)


def only_table(shard: Shard) -> SparseTable:
    """The only table of a shard."""
    [table] = shard.tables.values()
    assert isinstance(table, SparseTable)
    return table


def pushed_thrice(entry: Entry) -> Shard:
    """A shard whose table was pushed id 7 at step 1, and ids 3 and 9 at steps 2 and 3."""
    shard = Shard()
    shard.create(TableSpec("t", "sparse", (2,), SGD(), entry=entry), np.zeros(0, np.float32))
    push(only_table(shard), 7)
    push(only_table(shard), 3)
    push(only_table(shard), 9)
    return shard


def push(table: SparseTable, *ids: int) -> None:
    """A push of some ids."""
    table.push(np.array(ids), np.ones((len(ids), 2), np.float32), 1.0)


def said(table: SparseTable) -> dict[str, list[float]]:
    """The candidates, with what is known of them."""
    candidates = table.candidates()
    columns = {"ids": candidates.ids, **candidates.values, "touched": candidates.touched}
    return {name: column.tolist() for name, column in columns.items()}


def test_the_rule_says_what_is_remembered(warm_entry: type[Entry]) -> None:
    """An id that was pushed lately gets its row with the next push; one long ago waits on."""
    table = only_table(pushed_thrice(warm_entry()))
    assert said(table) == {
        "ids": [3, 7, 9],
        "warmth": [1, 1, 1],
        "first_steps": [2, 1, 3],
        "touched": [2, 1, 3],
    }
    push(table, 7, 9)
    assert table.ids().tolist() == [9]
    assert said(table) == {
        "ids": [3, 7],
        "warmth": [1, 1.125],
        "first_steps": [2, 1],
        "touched": [2, 4],
    }
    assert len(only_table(pushed_thrice(warm_entry(kept=2))).candidates()) == 2  # type: ignore[call-arg]


def test_snapshots_hold_it(warm_entry: type[Entry], tmp_path: Path) -> None:
    """Under names and types of its own, on another number of servers too; a rule that remembers the same
    gets it, and one that remembers something else begins anew."""
    entry = warm_entry() & TTLEntry(steps=100)
    before = pushed_thrice(entry)
    save_fleet(str(tmp_path / "one"), [before])
    stored = load_file(tmp_path / "one" / "shard-0-of-1.safetensors")
    names = ("candidates", "candidate_warmth", "candidate_first_steps", "candidate_touched")
    assert [stored[f"t/{name}"].dtype.str for name in names] == ["<i8", "<f4", "<i8", "<i8"]
    reshard(str(tmp_path / "one"), str(tmp_path / "three"), 3)
    again = Shard()
    load_shard(tmp_path / "three", again)
    assert said(only_table(again)) == said(only_table(before))
    for number, (after, kept) in enumerate(
        [(warm_entry(2.5), [3, 7, 9]), (CountFilterEntry(3), [])]  # type: ignore[call-arg]
    ):
        table = Table("t", 2, optimizer=optimizer.SGD(0.1), entry=after)
        migration = plan_migration(str(tmp_path / "one"), FeatureSet([Feature("f", table)]))
        migration.apply(tmp_path / f"new{number}")
        shard = Shard()
        load_shard(tmp_path / f"new{number}", shard)
        assert said(only_table(shard))["ids"] == kept
