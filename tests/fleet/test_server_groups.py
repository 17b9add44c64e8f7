"""`servers=` as each interface says it: programs, feature sets, files of features, migrations."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet import ParamAttr, layers
from psfleet.checkpoint import plan_migration
from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.environment import Environment
from psfleet.core.client import Client
from psfleet.core.engine.runtime_interface import Read
from psfleet.core.engine.schema.table import key_of
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.program.program import Program, program_guard
from psfleet.core.runtime.process_runtime import current
from psfleet.core.runtime.script_runtime import ScriptRuntime
from psfleet.features import Feature, FeatureSet, Table, feed, load_features
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer import Adam

IDS = np.arange(-30, 30)
STEPS = 4


def features(servers: int | None) -> FeatureSet:
    """Two tables of one feature each."""
    tables = (Table(name, 5, Adam(0.1), servers=servers) for name in ("u", "v"))
    return FeatureSet([Feature(table.name, table) for table in tables])


@contextmanager
def active(runtime: ScriptRuntime) -> Iterator[None]:
    """A runtime for a program, and no model afterwards."""
    before = current().use(runtime)
    try:
        with program_guard(Program(), Program()):
            yield
    finally:
        current().use(before)
        psfleet.reset()


def program(runtime: ScriptRuntime, servers: int | None) -> None:
    """An embedding and features of a program."""
    with active(runtime):
        attr = ParamAttr(name="e", servers=servers)
        ids = layers.data("ids", [None], dtype="int64")
        rows = layers.embedding(ids, [None, 5], is_distributed=True, param_attr=attr)
        told = features(servers)
        inputs = [rows, *layers.features(told).values()]
        loss = layers.sums([layers.mean(layers.square(one - 1.0)) for one in inputs])
        Adam(0.1).minimize(loss)
        given = {"ids": IDS, **feed(told, {"u": IDS, "v": IDS + 7})}
        for _ in range(STEPS):
            Executor().run(feed=given, fetch_list=[loss])
        runtime.flush()


def bits(runtime: ScriptRuntime) -> list[bytes]:
    """The rows of all tables."""
    return [runtime.pull([Read(key_of(name), IDS)])[0].tobytes() for name in "euv"]


def test_groups_change_no_bit(tmp_path: Path) -> None:
    """Sync mode: the same bits with and without them, also after a snapshot on another number of servers."""
    digests = []
    for servers in (None, 1):
        with LocalFleet(3, 1, in_process=True) as fleet:
            runtime = fleet.connect(0, "sync")
            program(runtime, servers)
            if servers:
                runtime.save(str(tmp_path / "model"))
            digests.append(bits(runtime))
            runtime.close()
    with LocalFleet(2, 1, in_process=True) as fleet:
        runtime = fleet.connect(0, "sync")
        runtime.load(str(tmp_path / "model"))
        assert [digests[0], bits(runtime)] == [digests[1], digests[1]]
        groups = [(spec.first, spec.servers) for spec in runtime.specs().values()]
        assert sorted(groups) == [(0, 1), (1, 1), (2, 1)]
        runtime.close()


def test_dense_weights_too() -> None:
    """`ParamAttr(servers=2)` of a small dense parameter puts it on two servers, not on one."""
    with LocalFleet(3, 1, in_process=True) as fleet:
        runtime = fleet.connect(0, "async")
        with active(runtime):
            x = layers.data("x", [None, 100])
            out = layers.fc(x, 100, name="fc", param_attr=ParamAttr(servers=2), bias_attr=False)
            loss = layers.mean(out)
            Adam(0.1).minimize(loss)
            Executor().run(feed={"x": np.ones((1, 100), np.float32)}, fetch_list=[loss])
            runtime.flush()
        counts = [server["tables"][0]["count"] for server in runtime.stats()]
        assert sum(counts) == 100 * 100
        assert [count > 0 for count in counts] == [True, True, False]
        runtime.close()


def test_a_file_of_features(tmp_path: Path) -> None:
    """`servers = 2` of a table in TOML is that of Python."""
    (tmp_path / "f.toml").write_text(
        '[tables.u]\ndim = 4\nservers = 2\n[features.f]\ntable = "u"\n'
    )
    assert load_features(tmp_path / "f.toml").tables["u"] == Table("u", 4, servers=2)


@pytest.mark.parametrize("wrong", [0, -1, 1025, 1.5, "two", True])
def test_wrong_numbers(wrong: Any) -> None:
    """Every interface refuses them in the same words."""
    sentence = rf"servers is {wrong!r}, it must be a whole number in \[1, 1024\] or None"
    ps = psfleet.connect(Environment(None, 0, (), 1))
    with pytest.raises(ConfigError, match=sentence):
        ps.sparse_table("t", 4, Adam(0.1), servers=wrong)
    with pytest.raises(ConfigError, match=sentence):
        ps.dense_table("t", np.ones(3), Adam(0.1), servers=wrong)
    with pytest.raises(ConfigError, match=sentence):
        Table("t", 4, servers=wrong)
    with pytest.raises(ConfigError, match=f"ParamAttr: {sentence}"):
        ParamAttr(servers=wrong)
    ps.close()


def test_a_trained_table_moves(tmp_path: Path) -> None:
    """A migration puts a table on other servers, with the same rows; the plan says so. A model that was
    trained in one process has its groups side by side."""

    def told(servers: int | None) -> FeatureSet:
        one = Table("v", 5, Adam(0.1), servers=1)
        return FeatureSet(
            [Feature("u", Table("u", 5, Adam(0.1), servers=servers)), Feature("v", one)]
        )

    with psfleet.connect(Environment(None, 0, (), 1)) as ps:
        for table in ps.features(told(None)).tables.values():
            table.push(IDS, np.ones((len(IDS), 5), np.float32)).wait()
        ps.save(str(tmp_path / "all"))
        rows = [table.pull(IDS).tobytes() for table in ps.features(told(None)).tables.values()]
    plan = plan_migration(tmp_path / "all", told(2))
    assert str(plan).splitlines() == [
        "move u: 60 rows; on 2 servers in place of all servers",
        "keep v: 60 rows",
    ]
    plan.apply(tmp_path / "two")
    with LocalFleet(4, 1, in_process=True) as fleet:
        runtime = fleet.connect(0, "sync")
        runtime.load(str(tmp_path / "two"))
        ps = Client(runtime)
        tables = ps.features(told(2)).tables.values()
        assert [table.pull(IDS).tobytes() for table in tables] == rows
        counts = [[table["count"] for table in server["tables"]] for server in runtime.stats()]
        assert [count > 0 for count in [row[0] for row in counts]] == [False, True, True, False]
        ps.save(str(tmp_path / "four"))
        ps.close()
    back = plan_migration(tmp_path / "four", told(None))
    assert str(back).startswith("move u: 60 rows; on all servers in place of 2 servers")
    back.apply(tmp_path / "back")
    with psfleet.connect(Environment(None, 0, (), 1)) as ps:
        tables = ps.features(told(None)).tables.values()
        ps.load(str(tmp_path / "back"))
        assert [table.pull(IDS).tobytes() for table in tables] == rows
