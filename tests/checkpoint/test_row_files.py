"""Rows leave a snapshot for files of other programs, and come from them: `psfleet ckpt export`, `import`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import psfleet
from psfleet import optimizer
from psfleet.core.base.settings.environment import Environment
from psfleet.core.engine.runtime_interface import TableState
from psfleet.features import hashed
from psfleet_launch.commands.psfleet_cli import main

pytestmark = pytest.mark.quick

VALUE: NDArray[np.float32] = np.linspace(0, 1, 6, dtype=np.float32).reshape(3, 2)
MORE = (VALUE + 1).astype(np.float32)
IDS = np.array([5, -3, 2**60])


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A snapshot `model` with the tables users [5 rows, 2], tags and bias; its folder is the present one."""
    monkeypatch.chdir(tmp_path)
    trained("model", 1.0)
    return tmp_path


def trained(path: str, gradient: float) -> None:
    """A snapshot whose rows of users have had one push."""
    with psfleet.connect(Environment(None, 0, (), 1)) as ps:
        users = ps.sparse_table("users", 2, optimizer.Adagrad(0.1))
        tags = ps.sparse_table("tags", 3, optimizer.SGD(0.1))
        bias = ps.dense_table("bias", np.ones((2, 3)), optimizer.Adam(0.1))
        ps.push({users: (np.arange(5), np.full((5, 2), gradient)), tags: ([9], np.ones((1, 3)))})
        ps.push({bias: np.ones((2, 3))})
        ps.save(path)


def users(path: str) -> TableState:
    """The table of a snapshot, as a client loads it."""
    with psfleet.connect(Environment(None, 0, (), 1)) as ps:
        table = ps.sparse_table("users", 2, optimizer.Adagrad(0.1))
        ps.load(path)
        return ps.runtime.read_table(table.spec.key)


def imported(source: str, *more: str) -> TableState:
    """Users of the model with the rows of a file."""
    assert main(["ckpt", "import", "model", source, "--table", "users", "--to", "new", *more]) == 0
    return users("new")


def check(after: TableState, before: TableState, ids: Any, value: NDArray[np.float32]) -> None:
    """These rows are as the file says, with fresh state; the others are as before; pushes count alike."""
    assert after.ids is not None
    assert before.ids is not None
    places = np.searchsorted(after.ids, ids)
    assert np.array_equal(after.ids[places], ids)
    assert after.values[0][places].tobytes() == value.tobytes()
    assert not np.any(after.values[1][places])
    others = ~np.isin(before.ids, ids)
    rest = np.searchsorted(after.ids, before.ids[others])
    for one, other in zip(after.values, before.values, strict=True):
        assert one[rest].tobytes() == other[others].tobytes()
    assert len(after.ids) == len(before.ids[others]) + len(ids)
    assert after.step == before.step


def test_export_to_parquet(model: Path) -> None:
    """A column for weights and each slot, with a list for each row; dense tables likewise."""
    pq = pytest.importorskip("pyarrow.parquet")
    assert main(["ckpt", "export", "model", "out", "--format", "parquet"]) == 0
    table, before = pq.read_table("out/users.parquet"), users("model")
    assert before.ids is not None
    assert table.column("ids").to_pylist() == before.ids.tolist()
    assert np.array_equal(np.array(table.column("value").to_pylist(), np.float32), before.values[0])
    assert np.array_equal(
        np.array(table.column("moment").to_pylist(), np.float32), before.values[1]
    )
    assert np.array(pq.read_table("out/bias.parquet").column("value").to_pylist()).shape == (2, 3)
    assert b"psfleet" in table.schema.metadata


def test_export_some_tables_and_rows(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By name and by id; ids without a row are left out."""
    Path("wanted").write_text("3\n77\n1\n")
    command = ["ckpt", "export", "model", "out"]
    assert main([*command, "--table", "users", "--rows", "wanted"]) == 0
    assert [file.name for file in Path("out").iterdir()] == ["users.safetensors"]
    assert load_file("out/users.safetensors")["ids"].tolist() == [1, 3]
    assert main([*command, "--table", "none"]) == 2
    assert "has no table 'none'; it has users, tags, bias" in capsys.readouterr().err
    for line in ("x", "1_0", "\u0663", str(2**63)):
        Path("wanted").write_text(f"3\n{line}\n", encoding="utf-8")
        assert main([*command, "--rows", "wanted"]) == 2
        assert f"whole number of 64 bits a line, not {line!r}" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["npz", "safetensors", "parquet"])
def test_an_export_is_a_warm_start(model: Path, kind: str) -> None:
    """Rows and state of an export, or of another snapshot, come into a table with their bits."""
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    trained("other", -3.0)
    assert main(["ckpt", "export", "other", "out", "--format", kind]) == 0
    actual, expected = imported(f"out/users.{kind}"), users("other")
    copied = imported("other")
    for one, two, other in zip(actual.values, copied.values, expected.values, strict=True):
        assert one.tobytes() == two.tobytes() == other.tobytes()
    assert main(["ckpt", "diff", "new", "other"]) == 0


def test_arrays(model: Path) -> None:
    """npy, npz and safetensors: with ids and without; the weights are named where several may be meant."""
    before = users("model")
    np.save("a.npy", VALUE)
    check(imported("a.npy"), before, np.arange(3), VALUE)
    np.savez("a.npz", ids=IDS, emb=VALUE.astype(np.float64), count=np.ones(3))
    order = np.argsort(IDS)
    check(imported("a.npz"), before, IDS[order], VALUE[order])
    save_file({"one": VALUE, "two": MORE}, "a.safetensors")
    check(imported("a.safetensors", "--name", "two"), before, np.arange(3), MORE)


def test_words(model: Path) -> None:
    """word2vec's text format, with and without its first line: ids are the hashes of the words."""
    before, words = users("model"), np.array(["the", "naïve", "3"], object)
    ids = hashed(words, 1 << 40, "word")
    order = np.argsort(ids)
    lines = [f"{word} {a!r} {b!r}" for word, (a, b) in zip(words, VALUE.tolist(), strict=True)]
    for first in ([], ["3 2"]):
        Path("w.vec").write_text("\n".join([*first, *lines]) + " \n")
        actual = imported("w.vec", "--buckets", str(1 << 40), "--salt", "word")
        check(actual, before, ids[order], VALUE[order])


def test_rows_that_do_not_fit(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another width, a dense table, an unknown one: nothing is written."""
    np.save("a.npy", np.ones((3, 4)))
    for table, message in [
        ("users", "the rows are 4 wide and table 'users' of 'model' is 2 wide"),
        ("bias", "table 'bias' of 'model' is dense"),
        ("none", "'model' has no table 'none'; it has users, tags, bias"),
    ]:
        assert main(["ckpt", "import", "model", "a.npy", "--table", table, "--to", "new"]) == 2
        assert message in capsys.readouterr().err
    assert not Path("new").exists()
