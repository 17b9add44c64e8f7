"""Scripts write rows, and start some tables from another checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from psfleet.checkpoint import read_rows
from psfleet.core.base.errors import CheckpointError, IdError, ShapeError
from psfleet.core.client import Client
from psfleet.core.engine.runtime_interface import TableState
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer import SGD, Adam

IDS = np.arange(12) * 2**41 - 9
ROWS = np.random.default_rng(5).normal(size=(12, 3)).astype(np.float32)


@pytest.fixture(params=["embedded", "sync"])
def ps(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client, embedded or on 3 servers."""
    if request.param == "embedded":
        with Client(EmbeddedRuntime()) as client:
            yield client
        return
    with (
        LocalFleet(3, 1, in_process=True) as servers,
        Client(servers.connect(0, request.param)) as client,
    ):
        yield client


def state(client: Client, name: str) -> TableState:
    """All of a table."""
    return client.runtime.read_table(client.runtime.open(name).key)


def test_rows_that_are_written(ps: Client) -> None:
    """They are pulled as they were written, with new state and the table's step; others keep their bits."""
    table = ps.sparse_table("t", 3, Adam(0.1))
    for _ in range(2):
        table.push(IDS[:8], np.ones((8, 3))).wait(60)
        table.pull(IDS)
    before = state(ps, "t")
    table.write(IDS[6:].reshape(2, 3), ROWS[6:].reshape(2, 3, 3))
    after = state(ps, "t")
    assert after.step == before.step == 2
    assert after.ids is not None
    assert after.ids.tolist() == np.sort(IDS).tolist()
    assert table.pull(IDS[6:]).tobytes() == ROWS[6:].tobytes()
    for now, then in zip(after.values, before.values, strict=True):
        assert now[:6].tobytes() == then[:6].tobytes()
    assert all((slot[6:] == 0).all() for slot in after.values[1:])


def test_a_dense_table_that_is_written(ps: Client) -> None:
    """Its state stays."""
    bias = ps.dense_table("b", np.zeros((2, 7)), Adam(0.1))
    bias.push(np.ones((2, 7))).wait(60)
    bias.pull()
    before = state(ps, "b")
    bias.write(np.arange(14).reshape(2, 7))
    after = state(ps, "b")
    assert bias.pull().tolist() == np.arange(14).reshape(2, 7).tolist()
    assert after.step == before.step == 1
    assert all(
        a.tobytes() == b.tobytes() for a, b in zip(after.values[1:], before.values[1:], strict=True)
    )


def test_what_cannot_be_written() -> None:
    """Nothing is written."""
    with Client(EmbeddedRuntime()) as ps:
        table, bias = ps.sparse_table("t", 3, SGD(0.1)), ps.dense_table("b", [1.0], SGD(0.1))
        with pytest.raises(IdError, match=f"id {IDS[1]} comes twice"):
            table.write(IDS[[0, 1, 1]], ROWS[:3])
        with pytest.raises(ShapeError, match=r"are \(2, 3\); they must be \(3, 3\)"):
            table.write(IDS[:3], ROWS[:2])
        with pytest.raises(ShapeError, match="table 't' is not finite"):
            table.write(IDS[:1], [[0, np.inf, 0]])
        with pytest.raises(ShapeError, match=r"is \(2,\); it must be \(1,\)"):
            bias.write([1, 2])
        assert len(state(ps, "t").values[0]) == 0
        assert bias.pull().tolist() == [1.0]


def test_rows_of_a_file(tmp_path: Path) -> None:
    """What `read_rows` brings from another program's file is written to a table."""
    (tmp_path / "words.vec").write_text("red 1 2 3\nblue 4 5 6\n")
    actual = read_rows(str(tmp_path / "words.vec"))
    with Client(EmbeddedRuntime()) as ps:
        table = ps.sparse_table("words", 3, Adam(0.1))
        table.write(actual.ids, actual.value)
        assert table.pull(actual.ids).tolist() == [[1, 2, 3], [4, 5, 6]]


def saved(folder: Path) -> dict[str, TableState]:
    """A checkpoint of three tables, and what they hold."""
    with Client(EmbeddedRuntime()) as ps:
        tables = [ps.sparse_table(name, 3, Adam(0.1)) for name in ("users", "items")]
        bias = ps.dense_table("bias", np.zeros(5), Adam(0.1))
        for _ in range(3):
            ps.push({**dict.fromkeys(tables, (IDS[:7], ROWS[:7])), bias: np.arange(5)})
        ps.save(folder)
        return {name: state(ps, name) for name in ("users", "items", "bias")}


def test_some_tables_start_from_a_checkpoint(ps: Client, tmp_path: Path) -> None:
    """Those that are named get its weights, and its state where the rule is the same; the others, and rows
    that it lacks, stay."""
    held = saved(tmp_path / "model")
    users = ps.sparse_table("users", 3, Adam(0.1))
    goods = ps.sparse_table("goods", 3, SGD(0.1))
    bias = ps.dense_table("bias", np.ones(5), Adam(0.1))
    goods.push(IDS[7:], ROWS[7:]).wait(60)
    kept, before = goods.pull(IDS[7:]), bias.pull()
    ps.load(tmp_path / "model", tables={"users": "users", "goods": "items"})
    now = state(ps, "users")
    assert now.step == held["users"].step == 3
    for ours, theirs in zip(now.values, held["users"].values, strict=True):
        assert ours.tobytes() == theirs.tobytes()
    order = held["items"].ids
    assert order is not None
    assert goods.pull(order).tobytes() == held["items"].values[0].tobytes()
    assert goods.pull(IDS[7:]).tobytes() == kept.tobytes()
    assert bias.pull().tobytes() == before.tobytes()
    assert users.pull(order).tobytes() == held["users"].values[0].tobytes()
    ps.load(tmp_path / "model", tables=["bias"])
    assert bias.pull().tobytes() == held["bias"].values[0].tobytes()


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    """A table that is not there, or of another shape; no other table gets a value either."""
    saved(tmp_path / "model")
    with Client(EmbeddedRuntime()) as ps:
        users, narrow = ps.sparse_table("users", 3, SGD(0.1)), ps.sparse_table("items", 2, SGD(0.1))
        for tables, sentence in (
            (["users", "goods"], "table 'goods': the script has not made it"),
            ({"users": "goods"}, "has no table 'goods'; it has"),
            (["users", "items"], r"of shape \(3,\) and cannot be loaded into table 'items'"),
        ):
            with pytest.raises(CheckpointError, match=sentence):
                ps.load(tmp_path / "model", tables=tables)
        assert len(state(ps, "users").values[0]) == len(state(ps, "items").values[0]) == 0
        assert users.pull(IDS).shape == (12, 3)
        assert narrow.pull(IDS).shape == (12, 2)
