"""A trained model gets other features: `psfleet ckpt migrate`."""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet import optimizer
from psfleet.checkpoint import plan_migration
from psfleet.entry import (
    CapacityEntry,
    CountFilterEntry,
    DecayedFrequency,
    EvictionStreamEntry,
    ShowClickEntry,
    TTLEntry,
)
from psfleet.errors import CheckpointError, ConfigError
from psfleet.features import Feature, FeatureSet, Table, find_features
from psfleet.initializer import Uniform
from psfleet.runtime.interface import TableState
from psfleet.schema.table import key_of
from psfleet.settings.environment import Environment
from psfleet_launch.commands.psfleet_cli import main


def features(**tables: Table) -> FeatureSet:
    """A feature of each table."""
    return FeatureSet(Feature(name, table) for name, table in tables.items())


def table(name: str, dim: int, **more: Any) -> Table:
    """One that is trained by SGD unless told otherwise."""
    return Table(name, dim, **{"optimizer": optimizer.SGD(0.1), **more})


def saved(folder: Path, *tables: Table, names: str = "") -> str:
    """A snapshot of these tables, each with rows 0 to 4 of 1 pushed once, and of dense ones."""
    path = str(folder / "model")
    with psfleet.connect(Environment(None, 0, (), 1)) as client:
        for given in tables:
            made = client.features(features(f=given)).tables[given.name]
            made.push(np.arange(5), np.ones((5, given.dim)))
        for name in names.split():
            client.dense_table(name, np.ones(3), optimizer.SGD(0.1))
        client.flush()
        client.save(path)
    return path


def loaded(path: str, wanted: Table) -> TableState:
    """A table as a client with these features finds it."""
    with psfleet.connect(Environment(None, 0, (), 1)) as client:
        client.features(features(f=wanted))
        client.load(path)
        return client.runtime.read_table(key_of(wanted.name))


def test_a_value_that_a_row_shares_stays(tmp_path: Path) -> None:
    """One accumulator for each row goes on, for the new columns too."""
    rate = optimizer.RowWiseAdagrad(0.1)
    path = saved(tmp_path, table("t", 2, optimizer=rate))
    before, wider = loaded(path, table("t", 2, optimizer=rate)), table("t", 3, optimizer=rate)
    plan_migration(path, features(f=wider)).apply(tmp_path / "new")
    after = loaded(str(tmp_path / "new"), wider)
    assert np.all(before.values[1] > 0)
    assert np.array_equal(after.values[1], np.repeat(before.values[1][:, :1], 3, axis=1))


def test_admission_and_first_values_may_change(tmp_path: Path) -> None:
    """Rows stay as they are; ids that waited for a row start anew where every id gets one."""
    path = saved(tmp_path, table("t", 2, entry=CountFilterEntry(2)))
    new = table("t", 2, entry=TTLEntry(steps=9), initializer=Uniform(3, 4))
    plan = plan_migration(path, features(f=new))
    assert str(plan).startswith("change t: 0 rows; new rows start from")
    assert "entry TTLEntry(steps=9" in str(plan)
    plan.apply(tmp_path / "new")
    assert len(loaded(str(tmp_path / "new"), new).values[0]) == 0
    path = saved(tmp_path, table("s", 2, entry=ShowClickEntry("show", "click")))
    plan_migration(path, features(f=table("s", 2))).apply(tmp_path / "scores")
    assert len(loaded(str(tmp_path / "scores"), table("s", 2)).values[0]) == 5


def test_an_eviction_policy_may_change(tmp_path: Path) -> None:
    """Frequencies stay where both policies count them, beside shows and clicks that go; else they are 1."""
    lfu, shown = CapacityEntry(rows=9, policy="lfu"), ShowClickEntry("show", "click")
    plain, decayed = table("p", 2), CapacityEntry(rows=9, policy=DecayedFrequency(5.0))
    path = saved(tmp_path, table("f", 2, entry=lfu & shown), plain)
    with psfleet.connect(Environment(None, 0, (), 1)) as client:
        made = client.features(features(f=table("f", 2, entry=lfu & shown), p=plain)).tables
        client.load(path)
        made["f"].push([3], [[1.0, 1.0]])
        client.save(path)
    wanted = [table("f", 2, entry=decayed & EvictionStreamEntry()), table("p", 2, entry=lfu)]
    plan_migration(path, features(f=wanted[0], p=wanted[1])).apply(tmp_path / "new")
    found = [loaded(str(tmp_path / "new"), new).scores for new in wanted]
    assert [scores.tolist() for scores in found if scores is not None] == [
        [[1.0], [1.0], [1.0], [2.0], [1.0]],
        [[1.0]] * 5,
    ]
    plan_migration(str(tmp_path / "new"), features(f=table("f", 2), p=plain)).apply(
        tmp_path / "off"
    )
    assert len(loaded(str(tmp_path / "off"), table("f", 2)).values[0]) == 5


def test_tables_may_be_kept_and_dropped(tmp_path: Path) -> None:
    """By name: sparse ones of no feature, dense ones that fit no longer, and those that start anew."""
    path = saved(tmp_path, table("a", 2), table("b", 2), names="fc bias")
    plan = plan_migration(path, features(a=table("a", 1)), keep=["b"], drop=["a", "fc"])
    assert str(plan).splitlines() == [
        "drop a: 2 wide; 5 rows",
        "keep b: 5 rows",
        "drop fc: 3 values",
        "keep bias: 3 values",
        "add a: 1 wide, sgd; 0 rows",
    ]
    plan.apply(tmp_path / "new")
    assert len(loaded(str(tmp_path / "new"), table("b", 2)).values[0]) == 5
    assert len(loaded(str(tmp_path / "new"), table("a", 1)).values[0]) == 0


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (table("t", 1), "table 't' is 2 wide in the snapshot and 1 in the features; .* --drop t"),
        (
            table("t", 2, optimizer=optimizer.Adam(0.1)),
            r"table 't' was trained with SGD\(\) and its features say Adam\(.* keep the optimizer",
        ),
        (
            table("t", 2, optimizer=optimizer.SGD(0.1, weight_decay=0.5)),
            r"trained with SGD\(\) and its features say SGD\(\) and DecaySpec\(.*l2=0.5",
        ),
        (
            table("t", 2, entry=ShowClickEntry("show", "click")),
            "table 't' has counted no shows and clicks, which its new entry ShowClickEntry",
        ),
        (
            table("t", 2, entry=CapacityEntry(rows=3)),
            "table 't' has 5 rows and its new entry CapacityEntry.* holds 3; let rows go",
        ),
        (table("fc", 2), "table 'fc' is dense in the snapshot"),
    ],
)
def test_what_cannot_be_migrated(tmp_path: Path, new: Table, message: str) -> None:
    """The plan says in a sentence which table, why, and what to do."""
    path = saved(tmp_path, table("t", 2), names="fc")
    with pytest.raises(CheckpointError, match=message):
        plan_migration(path, features(f=new))


def test_what_is_asked_for_wrongly(tmp_path: Path) -> None:
    """Unknown tables, a table that is kept and dropped, and a source in the way of its migration."""
    path = saved(tmp_path, table("t", 2), names="fc")
    new = features(f=table("t", 2))
    with pytest.raises(CheckpointError, match="has no table 'u' to keep or to drop; it has t, fc"):
        plan_migration(path, new, drop=["u"])
    with pytest.raises(CheckpointError, match="'t' cannot be both kept and dropped"):
        plan_migration(path, new, keep=["t"], drop=["t"])
    with pytest.raises(CheckpointError, match="would replace its source"):
        plan_migration(path, new).apply(path)
    plan_migration(path, new).apply(tmp_path / "new")


def test_the_plan_is_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a yes nothing is written. The features may come from a module in the present folder."""
    path = saved(tmp_path, table("t", 2))
    (tmp_path / "migrated_model.py").write_text(
        "from psfleet.features import *\n"
        "from psfleet.optimizer import SGD\n"
        "mine = FeatureSet([Feature('f', Table('t', 4, SGD(0.1)))])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    command = ["ckpt", "migrate", path, "--features", "migrated_model:mine", "--to", "new"]
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert main(command) == 1
    assert "widen t: 5 rows; from 2 to 4 wide" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert main(command) == 0
    assert (tmp_path / "new" / "manifest.json").exists()
    for wrong in ("migrated_model:other", "missing_model:mine", "migrated_model:SGD", "no.toml"):
        with pytest.raises(ConfigError, match=wrong):
            find_features(wrong)
