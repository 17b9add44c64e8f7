"""A trained model gets other features: `psfleet ckpt migrate`."""

import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet import optimizer
from psfleet.checkpoint import plan_migration, reshard
from psfleet.core.base.errors import ConfigError, TableConflict
from psfleet.core.base.settings.environment import Environment
from psfleet.core.engine.runtime_interface import TableState
from psfleet.core.engine.schema.entry import (
    CapacityEntry,
    CountFilterEntry,
    DecayedFrequency,
    EvictionStreamEntry,
    ShowClickEntry,
    TTLEntry,
)
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec, key_of
from psfleet.core.engine.shard.shard import Shard
from psfleet.features import Feature, FeatureSet, Table, find_features
from psfleet.initializer import Uniform
from psfleet_launch.commands.psfleet_cli import main
from tests.refusals import check_refusals

pytestmark = pytest.mark.quick


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


def loaded(path: str, expected: Table) -> TableState:
    """A table as a client with these features finds it."""
    with psfleet.connect(Environment(None, 0, (), 1)) as client:
        client.features(features(f=expected))
        client.load(path)
        return client.runtime.read_table(key_of(expected.name))


def test_a_value_that_a_row_shares_stays(tmp_path: Path) -> None:
    """One accumulator for each row goes on, for the new columns too."""
    rate = optimizer.RowWiseAdagrad(0.1)
    path = saved(tmp_path, table("t", 5, optimizer=rate))
    before, wider = loaded(path, table("t", 5, optimizer=rate)), table("t", 16, optimizer=rate)
    plan_migration(path, features(f=wider)).apply(tmp_path / "new")
    after = loaded(str(tmp_path / "new"), wider)
    assert np.all(before.values[1] > 0)
    assert np.array_equal(after.values[1], np.repeat(before.values[1][:, :1], 16, axis=1))


def test_state_of_new_columns_is_that_of_a_new_row(tmp_path: Path) -> None:
    """Accumulators of the columns that a row had stay, and the others begin where the optimizer begins."""
    rate = optimizer.Adagrad(0.1, initial_accumulator_value=0.5)
    path = saved(tmp_path, table("t", 5, optimizer=rate))
    wider = table("t", 16, optimizer=rate)
    plan_migration(path, features(f=wider)).apply(tmp_path / "new")
    accumulators = loaded(str(tmp_path / "new"), wider).values[1]
    assert accumulators.tolist() == [[1.5] * 5 + [0.5] * 11] * 5


def test_admission_and_first_values_may_change(tmp_path: Path) -> None:
    """Rows stay as they are; ids that waited for a row start again where every id gets one."""
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
        tables = client.features(features(f=table("f", 2, entry=lfu & shown), p=plain)).tables
        client.load(path)
        tables["f"].push([3], [[1.0, 1.0]])
        client.save(path)
    expected = [table("f", 2, entry=decayed & EvictionStreamEntry()), table("p", 2, entry=lfu)]
    plan_migration(path, features(f=expected[0], p=expected[1])).apply(tmp_path / "new")
    actual = [loaded(str(tmp_path / "new"), new).scores for new in expected]
    assert [scores.tolist() for scores in actual if scores is not None] == [
        [[1.0], [1.0], [1.0], [2.0], [1.0]],
        [[1.0]] * 5,
    ]
    plan_migration(str(tmp_path / "new"), features(f=table("f", 2), p=plain)).apply(
        tmp_path / "off"
    )
    assert len(loaded(str(tmp_path / "off"), table("f", 2)).values[0]) == 5


def test_tables_may_be_kept_and_dropped(tmp_path: Path) -> None:
    """By name: sparse ones of no feature, dense ones that fit no longer, and those that start again."""
    path = saved(tmp_path, table("a", 2), table("b", 2), names="fc bias")
    plan = plan_migration(path, features(a=table("a", 1)), keep=["b"], drop=["a", "fc"])
    assert str(plan).splitlines() == [
        "drop a: 2 wide; 5 rows",
        "keep b: 5 rows",
        "drop fc: 3 values",
        "keep bias: 3 values; shape 3",
        "add a: 1 wide, sgd; 0 rows",
        "dense tables keep their shapes: the model loads only if its own are the same; for one that is not, "
        "name its new shape (--shape bias=3) or leave it behind (--drop bias)",
    ]
    plan.apply(tmp_path / "new")
    assert len(loaded(str(tmp_path / "new"), table("b", 2)).values[0]) == 5
    assert len(loaded(str(tmp_path / "new"), table("a", 1)).values[0]) == 0


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        (optimizer.SGD(0.1), (5, 7)),
        (optimizer.Adam(0.1), (3, 9)),
        (optimizer.Lamb(0.1), (4, 8)),
        (optimizer.LarsMomentum(0.1, 0.9), (5, 7)),
        (optimizer.RowWiseAdagrad(0.1), (4, 9)),
    ],
)
def test_dense_tables_get_longer_axes(tmp_path: Path, rule: Any, shape: tuple[int, int]) -> None:
    """What is trained keeps its bits and state, on any number of servers; new weights start small, and
    train. Without a new shape the load is refused, and the sentence says how to go on."""
    shapes, path = {"w": shape, "b": (4,)}, str(tmp_path / "model")
    with psfleet.connect(Environment(None, 0, (), 1)) as client:
        for name, small in {"w": (3, 7), "b": (4,)}.items():
            made = client.dense_table(name, np.ones(small), rule)
            made.push(np.arange(made.spec.size, dtype=np.float32).reshape(small))
        client.flush()
        client.save(path)
        before = client.runtime.read_table(key_of("w"))
    plan = plan_migration(path, features(f=table("f", 2)), shapes=shapes)
    assert f"widen w: 21 values; from 3x7 to {shape[0]}x{shape[1]}" in str(plan).splitlines()
    plan.apply(tmp_path / "one")
    reshard(str(tmp_path / "one"), str(tmp_path / "two"), 2)
    with psfleet.connect(Environment(None, 0, (), 1)) as client:
        made = client.dense_table("w", np.zeros(shape), rule)
        with pytest.raises(TableConflict, match=r"not \(3, 7\).*--drop w.*--shape"):
            client.load(path)
        client.load(str(tmp_path / "two"))
        after = client.runtime.read_table(key_of("w"))
        assert after.step == before.step
        for old, new in zip(before.values, after.values, strict=True):
            assert np.array_equal(old.reshape(3, 7), new.reshape(shape)[:3, :7])
        is_new = np.ones(shape, bool)
        is_new[:3, :7] = False
        fresh = after.values[0].reshape(shape)[is_new]
        assert np.all(np.abs(fresh) <= 0.01)
        assert len({*fresh.tolist()}) == shape[0] * shape[1] - 21
        made.push(np.ones(shape))
        client.flush()
        assert np.all(made.pull()[is_new] != fresh)


def test_dense_tables_with_other_first_values_are_the_same() -> None:
    """A script may declare a dense table with other first values than the snapshot's had, as Xavier's do when
    a layer gets wider; those of a sparse table are still to come, and must be the same."""
    other = InitializerSpec("uniform", -0.5, 0.5)
    for kind, shape in (("dense", (2, 3)), ("sparse", (3,))):
        shard, value = Shard(), np.zeros(6 if kind == "dense" else 0, np.float32)
        spec = TableSpec("t", kind, shape, optimizer.SGD(0.1).rule())  # type: ignore[arg-type]
        assert shard.create(spec, value)
        again = replace(spec, initializer=other)
        if kind == "dense":
            assert not shard.create(again, value)
        else:
            with pytest.raises(TableConflict, match="its initializer is"):
                shard.create(again, value)


REFUSED = """
plan(shapes={"fc": (2,)})  # 'fc' has the shape 3 in the snapshot and cannot get 2; ...--drop fc
plan(shapes={"fc": (3, 3)})  # cannot get 3x3
plan(shapes={"t": (3,)})  # 't' is sparse; the dim of its Table
plan(shapes={"x": (3,)})  # no table 'x'
plan(table("t", 1))  # table 't' is 2 wide in the snapshot and 1 in the features; ... --drop t
plan(table("t", 2, optimizer=Adam(0.1)))  # with SGD() and its features say Adam(... keep the optimizer
plan(table("t", 2, optimizer=SGD(0.1, weight_decay=0.5)))  # its features say SGD() and DecaySpec(...l2=0.5
plan(table("t", 2, entry=ShowClickEntry("show", "click")))  # counted no shows and clicks, which its new entry
plan(table("t", 2, entry=CapacityEntry(rows=3)))  # 5 rows and its new entry CapacityEntry... holds 3; let
plan(table("fc", 2))  # table 'fc' is dense in the snapshot
plan(drop=["u"])  # has no table 'u' to keep or to drop; it has t, fc
plan(keep=["t"], drop=["t"])  # 't' cannot be both kept and dropped
plan().apply(path)  # would replace its source"""


def test_what_cannot_be_migrated(tmp_path: Path) -> None:
    """A sentence says which table, why, and what to do: tables and shapes that do not fit, unknown ones,
    one that is kept and dropped, a source in the way of its migration, and what is no shape."""
    path = saved(tmp_path, table("t", 2), names="fc")

    def plan(new: Table | None = None, **more: Any) -> Any:
        return plan_migration(path, features(f=new or table("t", 2)), **more)

    check_refusals(REFUSED, vars(optimizer) | globals() | {"plan": plan, "path": path})
    plan().apply(tmp_path / "new")
    for said in ("fc", "fc=", "fc=3x", "=3", "fc=-3"):
        command = ["ckpt", "migrate", path, "--features", "no.toml", "--to", "n", "--shape", said]
        assert main(command) == 2


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
