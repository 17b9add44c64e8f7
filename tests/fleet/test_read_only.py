"""Tables without an optimizer, and checkpoints: they are read, and nothing changes them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet import initializer, metrics
from psfleet.core.base.errors import ConfigError, TableConflict, UnknownTable, UsageError
from psfleet.core.client import Client
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.features import Feature, FeatureSet, Table
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer import SGD, Adam

IDS, MISSING = np.arange(9) - 4, np.array([77, 78])
START = initializer.Normal(scale=0.5, seed=3)
MODES = ["sync", "geo"]


def trained(ps: Client) -> Client:
    """Two tables with some pushes."""
    users = ps.sparse_table("users", 3, Adam(0.1), START)
    bias = ps.dense_table("bias", np.ones(5), SGD(0.1))
    for step in range(3):
        ps.push({users: (IDS, np.full((9, 3), step - 0.5)), bias: np.arange(5)})
        ps.pull({users: IDS, bias: None})
    ps.flush()
    return ps


def rows(ps: Client) -> int:
    """Rows of all tables, on all servers."""
    return sum(
        t["count"] for server in ps.stats() for t in server["tables"] if t["kind"] == "sparse"
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an embedded fleet."""
    folder = tmp_path_factory.mktemp("read") / "model"
    with Client(EmbeddedRuntime()) as ps:
        trained(ps).save(folder)
    return folder


@pytest.fixture(params=["embedded", *MODES])
def fleet(request: pytest.FixtureRequest) -> Iterator[Client]:
    """With trained tables."""
    if request.param == "embedded":
        with Client(EmbeddedRuntime()) as ps:
            yield trained(ps)
        return
    with (
        LocalFleet(2, 1, in_process=True) as servers,
        Client(servers.connect(0, request.param)) as ps,
    ):
        yield trained(ps)


def test_a_table_without_an_optimizer_is_read(fleet: Client, checkpoint: Path) -> None:
    """In every mode it gives the trainer's values, and first values of ids without a row, which it does not
    make; a checkpoint gives the same bits in modes that apply each push by itself. Pushes and writes are
    refused before anything is sent."""
    users, bias = fleet.sparse_table("users"), fleet.dense_table("bias")
    count, before = rows(fleet), fleet.pull({users: IDS, bias: None})
    fresh = fleet.sparse_table("users", 3, Adam(0.1), START).pull(MISSING)
    assert users.pull(MISSING).tobytes() == fresh.tobytes()
    with psfleet.connect(checkpoint=checkpoint) as ps:
        again, same = ps.sparse_table("users", 3), ps.dense_table("bias", np.zeros(5))
        cluster = fleet.runtime.cluster
        # Geo mode rounds in its own way, and half-async mode merges pushes that wait for each other.
        if cluster is None or cluster.mode.name not in ("geo", "half-async"):
            assert again.pull(IDS).tobytes() == before[users].tobytes()
            assert same.pull().tobytes() == before[bias].tobytes()
        assert again.pull(MISSING).tobytes() == fresh.tobytes()
    for refused in (
        lambda: users.push(IDS, np.ones((9, 3))),
        lambda: bias.push(np.ones(5)),
        lambda: users.write(IDS, np.ones((9, 3))),
        lambda: bias.write(np.ones(5)),
    ):
        with pytest.raises(
            UsageError, match="opened without an optimizer, so it can be read and not"
        ):
            refused()
    trainer = fleet.dense_table("bias", np.ones(5), SGD(0.1))
    with pytest.raises(UsageError, match="table 'users' was opened without an optimizer"):
        fleet.push({trainer: np.ones(5), users: (IDS, np.ones((9, 3)))})
    after = fleet.pull({users: IDS, bias: None})
    assert all(after[table].tobytes() == before[table].tobytes() for table in before)
    assert rows(fleet) == count


@pytest.mark.parametrize("servers", [0, 2])
def test_what_cannot_be_opened(servers: int) -> None:
    """A table that is not there, or has another kind or shape."""
    with LocalFleet(max(servers, 1), 1, in_process=True) as local:
        runtime = local.connect(0, "sync") if servers else EmbeddedRuntime()
        with Client(runtime) as ps:
            trained(ps)
            with pytest.raises(UnknownTable, match=r"no table 'items', .* are: users, bias$"):
                ps.sparse_table("items", 2)
            with pytest.raises(
                TableConflict, match=r"sparse of shape \(3,\), .* as sparse of shape \(2,"
            ):
                ps.sparse_table("users", 2)
            with pytest.raises(TableConflict, match="and the script opens it as dense"):
                ps.dense_table("users")


def change(what: str) -> Callable[[Client, Any, Path], object]:
    """Something that would change a checkpoint's table."""
    ids, grads = IDS, np.ones((9, 3))
    return {
        "pushed to": lambda ps, users, path: users.push(ids, grads),
        "written to": lambda ps, users, path: users.write(ids, grads),
        "loaded into": lambda ps, users, path: ps.load(path),
        "saved": lambda ps, users, path: ps.save(path.parent / "other"),
        "shrunk": lambda ps, users, path: ps.runtime.shrink(),
    }[what]


@pytest.mark.parametrize("what", ["pushed to", "written to", "loaded into", "saved", "shrunk"])
def test_a_checkpoint_is_only_read(what: str, checkpoint: Path) -> None:
    """Also by a table with an optimizer: all that would change it is one sentence."""
    with psfleet.connect(checkpoint=checkpoint) as ps:
        users = ps.sparse_table("users", 3, Adam(0.1))
        with pytest.raises(UsageError, match=f"can be read only, and cannot be {what}"):
            change(what)(ps, users, checkpoint)


def test_a_checkpoint_goes_with_no_setting_of_a_fleet(checkpoint: Path) -> None:
    """And a table that it lacks, or has with another width, is refused."""
    with pytest.raises(ConfigError, match="and settings of a fleet"):
        psfleet.connect(checkpoint=checkpoint, mode="sync")
    with psfleet.connect(checkpoint=checkpoint) as ps:
        with pytest.raises(UnknownTable, match="the tables are: users, bias"):
            ps.sparse_table("items", 2, SGD(0.1))
        with pytest.raises(TableConflict, match=r"declares it sparse of shape \(4,\)"):
            ps.sparse_table("users", 4, SGD(0.1))


def test_features_of_a_checkpoint(checkpoint: Path) -> None:
    """A feature set whose tables have no optimizer is looked up in a checkpoint."""
    features = FeatureSet([Feature("user", Table("users", 3), pooling="mean")])
    with psfleet.connect(checkpoint=checkpoint) as ps:
        batch = ps.features(features).batch({"user": [[1, 2], [], [77]]})
        actual = batch.pool(ps.pull(batch.ids))["user"]
        table = ps.sparse_table("users")
        expected = np.stack([table.pull([1, 2]).mean(0), np.zeros(3), table.pull([77])[0]])
    np.testing.assert_array_equal(actual, expected.astype(np.float32))


def test_an_evaluation_that_fails(tmp_path: Path) -> None:
    """What the model or the data raise comes with the result; bad batches and models are one sentence. The
    snapshot that was asked for stays, and training goes on."""

    def broken(tables: Client, inputs: Any) -> Any:
        raise ZeroDivisionError("as it happens")

    with Client(EmbeddedRuntime()) as ps:
        trained(ps)
        good = [(IDS, np.ones(9))]
        with pytest.raises(ZeroDivisionError, match="as it happens"):
            ps.evaluate(broken, good, [metrics.LogLoss()], folder=tmp_path / "cut").result(60)
        for batches, sentence in (
            ([IDS], r"must be a tuple \(inputs, labels\)"),
            ([(IDS, {"click": np.ones(9)})], "labels of the task 'click', and no predictions"),
        ):
            evaluation = ps.evaluate(lambda tables, ids: ids * 0.0, batches, [metrics.LogLoss()])
            with pytest.raises(UsageError, match=sentence):
                evaluation.result(60)
            assert evaluation.is_done
        with pytest.raises(UsageError, match="the model is 3; it must be a variable"):
            psfleet.fleet.evaluate(3, good, [metrics.LogLoss()])
        assert ps.sparse_table("users").pull(IDS).shape == (9, 3)
    with psfleet.connect(checkpoint=tmp_path / "cut") as cut:
        assert cut.dense_table("bias").pull().shape == (5,)
