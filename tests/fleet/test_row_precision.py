"""The precision of rows, as each interface says it: programs, feature sets, clients, snapshots, geo mode."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import psfleet
from psfleet import ParamAttr, layers
from psfleet.checkpoint import plan_migration
from psfleet.checkpoint.imported_rows import RowFile
from psfleet.checkpoint.rewriting import import_rows
from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.environment import Environment
from psfleet.core.client import Client
from psfleet.core.engine.schema.table import key_of
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.program.program import Program, program_guard
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import current
from psfleet.core.runtime.strategy import ConsistencySettings
from psfleet.features import Feature, FeatureSet, Table, feed, load_features
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer import SGD
from tests.trainings import TrainingWorkload


@pytest.fixture
def alone() -> Iterator[EmbeddedRuntime]:
    """A program and an embedded runtime, and neither afterwards."""
    runtime = EmbeddedRuntime()
    before = current().use(runtime)
    with program_guard(Program(), Program()):
        yield runtime
    psfleet.reset()
    current().use(before)


def is_short(values: np.ndarray) -> bool:
    """Whether bfloat16 holds all of them, and they are not all 0."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return bool(bits.any() and not (bits & np.uint32(0xFFFF)).any())


def test_an_embedding_of_a_program(alone: EmbeddedRuntime) -> None:
    """`ParamAttr(precision=...)` is its table's; training goes on in float32 around it."""
    ids = layers.data("ids", [None], dtype="int64")
    rows = layers.embedding(
        ids, [None, 16], is_distributed=True, name="e", param_attr=ParamAttr(precision="bfloat16")
    )
    loss = layers.mean(layers.square(rows))
    SGD(0.1).minimize(loss)
    losses = [
        float(Executor().run(feed={"ids": np.arange(9)}, fetch_list=[loss])[0]) for _ in range(20)
    ]
    assert losses[-1] < losses[0]
    assert alone.specs()[key_of("e.w_0")].precision == "bfloat16"
    assert is_short(alone.read_table(key_of("e.w_0")).values[0])


def test_dense_weights_are_refused(alone: EmbeddedRuntime) -> None:
    """Only rows have a precision; the message says of which table."""
    x = layers.data("x", [None, 3])
    out = layers.fc(x, 2, name="fc", param_attr=ParamAttr(precision="bfloat16"))
    loss = layers.mean(out)
    SGD(0.1).minimize(loss)
    with pytest.raises(ConfigError, match=r"table 'fc.w_0' is dense"):
        Executor().run(feed={"x": np.ones((1, 3), np.float32)}, fetch_list=[loss])
    assert not alone.specs()
    with pytest.raises(ConfigError, match="precision is 'bf16'"):
        ParamAttr(precision="bf16")  # type: ignore[arg-type]


def test_feature_sets(alone: EmbeddedRuntime, tmp_path: Path) -> None:
    """A feature's table says it in Python and in a file, for programs and for clients."""
    (tmp_path / "f.toml").write_text(
        '[tables.u]\ndim = 16\nprecision = "bfloat16"\n[features.f]\ntable = "u"\n'
    )
    table = Table("u", 16, precision="bfloat16")
    features = load_features(tmp_path / "f.toml")
    assert features.tables["u"] == table
    loss = layers.reduce_sum(layers.features(features)["f"])
    SGD(0.1).minimize(loss)
    Executor().run(feed=feed(features, {"f": [1, 2]}), fetch_list=[loss])
    assert alone.specs()[key_of("u")].precision == "bfloat16"
    client = Client(EmbeddedRuntime())
    feature_set_made = client.features(
        FeatureSet([Feature("f", Table("u", 16, SGD(0.1), precision="bfloat16"))])
    )
    assert feature_set_made.tables["u"].spec.precision == "bfloat16"


def test_a_trained_table_gets_another_precision(tmp_path: Path) -> None:
    """`plan_migration` rounds trained rows to the nearest, and back they keep their values; rows that are
    imported are rounded too."""
    wide, short = (Table("t", 16, SGD(0.1), precision=p) for p in ("float32", "bfloat16"))
    with psfleet.connect(Environment(None, 0, (), 1)) as client:
        tables = client.features(FeatureSet([Feature("f", wide)])).tables["t"]
        tables.push(np.arange(50), np.random.default_rng(1).standard_normal((50, 16)))
        client.flush()
        exact = tables.pull(np.arange(50))
        client.save(str(tmp_path / "a"))
    plan = plan_migration(tmp_path / "a", FeatureSet([Feature("f", short)]))
    assert str(plan) == "change t: 50 rows; rows in bfloat16 in place of float32"
    plan.apply(tmp_path / "b")
    plan_migration(tmp_path / "b", FeatureSet([Feature("f", wide)])).apply(tmp_path / "c")
    rows = RowFile(np.array([7]), np.full((1, 16), 1 + 2.0**-9, np.float32), {})
    import_rows(str(tmp_path / "b"), str(tmp_path / "d"), "t", rows)
    sentences = []
    for name, table in (("b", short), ("c", wide), ("d", short)):
        with psfleet.connect(Environment(None, 0, (), 1)) as client:
            tables = client.features(FeatureSet([Feature("f", table)])).tables["t"]
            client.load(str(tmp_path / name))
            sentences.append(tables.pull(np.arange(50)))
    assert is_short(sentences[0])
    np.testing.assert_allclose(sentences[0], exact, rtol=2.0**-8)
    np.testing.assert_array_equal(sentences[0], sentences[1])
    assert (sentences[2][7] == 1).all()


def test_geo_mode_copies_rows_in_float32() -> None:
    """The worker's copy is exact, and what it adds is rounded on the servers as by a push."""
    training = TrainingWorkload(steps=8, precision="bfloat16/bfloat16")
    with LocalFleet(1, 1, in_process=True) as fleet:
        runtime = psfleet.core.runtime.modes.switch.connect(
            fleet.environment(0), ConsistencySettings("geo", k_steps=4)
        )
        training.run(runtime)
        [_, rows] = training.result(runtime)
        runtime.close()
    alone = EmbeddedRuntime()
    training.run(alone)
    [_, expected] = training.result(alone)
    assert is_short(rows.values[0])
    np.testing.assert_array_equal(rows.ids, expected.ids)
    np.testing.assert_allclose(rows.values[0], expected.values[0], atol=0.02)
