"""Feature sets in programs and in TOML files: optimizers of tables, and saved models."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet import fleet, fluid, initializer, layers
from psfleet.core.base.errors import ConfigError
from psfleet.core.engine.schema.entry import (
    CapacityEntry,
    CountFilterEntry,
    DecayedFrequency,
    TTLEntry,
)
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.program.program import Program, program_guard
from psfleet.core.runtime.process_runtime import current
from psfleet.features import Feature, FeatureSet, Jagged, Number, Table, feed, load_features
from psfleet.initializer import Normal
from psfleet.optimizer import SGD, LookAhead

ONE = initializer.Constant(1.0)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A program, and no runtime before or afterwards."""
    before = current().use(None)
    with program_guard(Program(), Program()):
        yield
    psfleet.reset()
    current().use(before)


def trained(features: FeatureSet, optimizer: Any, batch: Any, steps: int = 1) -> list[Any]:
    """The last values of all features, after steps whose loss is their sum."""
    values = layers.features(features)
    loss = layers.sums([layers.reduce_sum(value) for value in values.values()])
    optimizer.minimize(loss)
    executor = Executor()
    for _ in range(steps):
        executor.run(feed=feed(features, batch), fetch_list=[loss])
    test = psfleet.default_main_program().clone(for_test=True)
    return executor.run(test, feed=feed(features, batch), fetch_list=list(values.values()))


def test_optimizers_of_tables() -> None:
    """A table's own optimizer has its own rate; a table without one has that of the other."""
    own, other = Table("own", 2, SGD(0.5), ONE), Table("other", 2, None, ONE)
    features = FeatureSet([Feature("a", own), Feature("b", other)])
    a, b = trained(features, SGD(0.25), {"a": [3], "b": [3]}, steps=2)
    np.testing.assert_array_equal(a, [[0, 0]])
    np.testing.assert_array_equal(b, [[0.5, 0.5]])


def test_an_optimizer_that_works_on_the_worker_is_refused() -> None:
    """A table's own optimizer must be one that the servers do."""
    features = FeatureSet([Feature("a", Table("own", 2, LookAhead(SGD(0.5)), ONE))])
    with pytest.raises(ConfigError, match="the optimizer of table 'own' is LookAhead"):
        trained(features, SGD(0.25), {"a": [3]})


def test_a_saved_model(tmp_path: Path) -> None:
    """A model with features is saved and predicts the same, for all kinds of pooling."""
    features = FeatureSet(
        [
            Feature("a", Table("one", 5), pooling="mean", weighted=True),
            Feature("b", Table("two", 5), pooling="none", last=2),
            Number("n"),
        ]
    )
    batch = {
        "a": Jagged([1, 2, 3], [2, 1], weights=[1.0, 0.5, 2.0]),
        "b": [[1], [2, 3, 4]],
        "n": [1, 2],
    }
    fleet.init()
    values = layers.features(features)
    rows = layers.reshape(values["b"], [-1, 10])
    out = layers.fc(layers.concat([values["a"], rows, values["n"]], axis=1), 1)
    loss = layers.mean(layers.square(out))
    fleet.distributed_optimizer(SGD(0.1)).minimize(loss)
    executor, given = Executor(), feed(features, batch)
    executor.run(feed=given, fetch_list=[loss])
    test = psfleet.default_main_program().clone(for_test=True)
    (expected,) = executor.run(test, feed=given, fetch_list=[out])
    main = psfleet.default_main_program()
    for number, places in enumerate(((executor,), ())):
        folder = str(tmp_path / f"placed{number}")
        fleet.save_inference_model(*places, folder, list(given), [out], main)
        assert (tmp_path / f"placed{number}" / "program.json").exists()
    fleet.save_inference_model(executor, str(tmp_path / "model"), list(given), [out])
    program, names, targets = fluid.io.load_inference_model(str(tmp_path / "model"), executor)
    assert sorted(names) == sorted(given)
    (outputs,) = executor.run(program, feed=given, fetch_list=targets)
    assert outputs.tobytes() == expected.tobytes()


def test_samples_are_counted_by_the_first_input() -> None:
    """What is fed begins with an input that has one entry for each sample."""
    features = FeatureSet([Feature("a", Table("t", 2), pooling="none", last=3), Number("n")])
    given = feed(features, {"a": [[1, 2], [3]], "n": [1, 2]})
    assert len(next(iter(given.values()))) == 2
    assert given["a.lengths"].tolist() == [1, 1, 0, 1, 0, 0]


FILE = """
[tables.users]
dim = 16
optimizer = { kind = "Adagrad", learning_rate = 0.05, epsilon = 1e-8 }
initializer = { kind = "Normal", scale = 0.02 }
entry = [{ kind = "CountFilterEntry", count_filter = 3 }, { kind = "TTLEntry", steps = 100 }]

[tables.items]
dim = 8
entry = { kind = "CapacityEntry", rows = 9, policy = { kind = "DecayedFrequency", half_life = 7.0 } }

[features.user]
table = "users"

[features.friends]
table = "users"
pooling = "mean"
last = 50

[features.age]
default = -1.0

[features.item]
table = "items"
hashed = true
"""


def test_load(tmp_path: Path) -> None:
    """The file's features are in its order, with the tables that they name."""
    path = tmp_path / "features.toml"
    path.write_text(FILE)
    features = load_features(path)
    assert list(features.features) == ["user", "friends", "age", "item"]
    user, friends, age, item = features
    assert isinstance(user, Feature)
    assert isinstance(friends, Feature)
    assert isinstance(item, Feature)
    assert user.table is friends.table is features.tables["users"]
    assert (friends.pooling, friends.last, item.hashed) == ("mean", 50, True)
    assert age == Number("age", default=-1.0)
    assert user.table.initializer == Normal(scale=0.02)
    assert user.table.entry == CountFilterEntry(3) & TTLEntry(steps=100)
    assert user.table.optimizer.get_lr() == 0.05
    assert user.table.optimizer.rule().epsilon == 1e-8
    assert features.tables["items"].optimizer is None
    assert features.tables["items"].entry == CapacityEntry(9, policy=DecayedFrequency(7.0))
