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
from psfleet.checkpoint import load_shard, plan_migration, reshard, save_fleet
from psfleet.core.base.errors import ConfigError
from psfleet.core.engine.rules import SGD
from psfleet.core.engine.schema.entry import (
    FORMS,
    CountFilterEntry,
    Entry,
    ProbabilityEntry,
    TTLEntry,
    make_entry,
    stored_as,
)
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.admission import AdmissionRule, admits
from psfleet.core.engine.tables.candidates import CandidateIds
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.net.table_messages import read_spec, write_spec
from psfleet.features import Feature, FeatureSet, Table

pytestmark = pytest.mark.quick

Ids = NDArray[np.int64]


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
            known = self.candidates.remembered(ids)
            since = np.where(known["first_steps"], step - known["first_steps"], 0)
            warmth: NDArray[np.float32] = 1 + known["warmth"] * 0.5 ** since.astype(np.float32)
            return warmth

        def passing(self, ids: Ids, step: int) -> NDArray[np.bool_]:
            warm: NDArray[np.bool_] = self._warmth(ids, step) >= self._needed
            return warm

        def pushed(self, ids: Ids, step: int) -> None:
            warmth = self._warmth(ids, step)
            firsts = self.candidates.remembered(ids)["first_steps"]
            firsts = np.where(firsts, firsts, step)
            waits = warmth < self._needed
            values = {"warmth": warmth[waits], "first_steps": firsts[waits]}
            self.candidates.remember(ids[waits], values, step)
            self.candidates.remove(ids[~waits])

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
    """An id that was pushed lately gets its row with the next push; one long ago waits on. The entry travels
    as its numbers, and beside another rule it is refused."""
    entry = make_entry("warm", {"needed": 1.4, "kept": 2.0})
    assert entry == warm_entry(kept=2)  # type: ignore[call-arg]  # the class is that of the fixture
    spec = TableSpec("t", "sparse", (2,), SGD(), entry=entry & TTLEntry(steps=9))
    assert read_spec(write_spec(spec)) == spec
    assert len(only_table(pushed_thrice(entry)).candidates()) == 2
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
    with pytest.raises(
        ConfigError, match=r"kept of entry 'warm' is 1\.5; it must be a whole number"
    ):
        make_entry("warm", {"needed": 1.0, "kept": 1.5})
    with pytest.raises(
        ConfigError, match="only one of ProbabilityEntry, CountFilterEntry and WarmEntry"
    ):
        warm_entry() & ProbabilityEntry(0.5)


def test_snapshots_hold_it(warm_entry: type[Entry], tmp_path: Path) -> None:
    """Under names and types of its own, on another number of servers too; a rule that remembers the same
    gets it, and one that remembers something else begins again."""
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
    save_fleet(str(tmp_path / "counted"), [pushed_thrice(CountFilterEntry(2))])
    for number, (model, after, kept) in enumerate(
        [
            ("one", warm_entry(2.5), [3, 7, 9]),  # type: ignore[call-arg]
            ("one", CountFilterEntry(3), []),
            ("counted", CountFilterEntry(3), [3, 7, 9]),
        ]
    ):
        table = Table("t", 2, optimizer=optimizer.SGD(0.1), entry=after)
        migration = plan_migration(str(tmp_path / model), FeatureSet([Feature("f", table)]))
        migration.apply(tmp_path / f"new{number}")
        shard = Shard()
        load_shard(tmp_path / f"new{number}", shard)
        assert said(only_table(shard))["ids"] == kept
