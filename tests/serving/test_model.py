"""Models in this process: their predictions, and their rows in few bytes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet import serving
from psfleet.core.base.errors import CheckpointError, ConfigError, IdError, UsageError
from psfleet.core.base.settings.kinds import RowForm
from psfleet.core.engine.kernels.hashing import hash_ids
from psfleet.core.engine.kernels.initial_values import initial_rows
from psfleet.core.engine.rules.momentum import SGD
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec
from psfleet.serving.row_source import rows_of_export
from psfleet.serving.served_table import ServedTable
from tests.serving import models

SPEC = TableSpec("rows", "sparse", (16,), SGD(), initializer=InitializerSpec(low=-1, high=1))
ERRORS: dict[RowForm, float] = {"float32": 0, "bfloat16": 2**-8, "int8": 1 / 254, "int4": 1 / 14}


@pytest.mark.parametrize("form", ERRORS)
def test_rows(form: RowForm) -> None:
    """A table has the last row of each id, to half a step of its form; other ids have first values."""
    generator = np.random.default_rng(7)
    table = ServedTable(SPEC, form)
    expected: dict[int, Any] = {}
    every = np.append(np.arange(600), 2**40 - np.arange(600))
    for number in range(30):
        ids = generator.permutation(every[: 600 if number < 15 else None])
        ids = ids[: generator.integers(1, 300)]
        rows = generator.normal(size=(len(ids), 16)).astype(np.float32)
        table.put(ids, rows)
        expected |= dict(zip(ids.tolist(), rows, strict=True))
        gone = generator.choice(every, 60)
        table.remove(gone)
        for each in gone.tolist():
            expected.pop(each, None)
    actual, first = table.look_up(every), initial_rows(every, 16, SPEC.initializer, 0, "rows")
    known = np.array([id_ in expected for id_ in every.tolist()])
    assert len(table) == len(expected) == known.sum()
    assert (table.has(every) == known).all()
    assert (actual[~known] == first[~known]).all()
    wanted = np.stack([expected[id_] for id_ in every[known].tolist()])
    largest = np.abs(wanted).max(axis=1, keepdims=True)
    assert (np.abs(actual[known] - wanted) <= largest * (ERRORS[form] + 1e-6)).all()


def test_int8_takes_few_bytes() -> None:
    """A row of 16 in int8 takes at most 40 bytes with its index, whatever number of rows."""
    table, count = ServedTable(SPEC, "int8"), 0
    for _ in range(40):
        ids = np.arange(count, count + 5000)
        table.put(ids, np.ones((5000, 16), np.float32))
        count += 5000
        assert table.bytes <= 40 * count


def test_a_page_of_a_server_lies_all_over_the_index() -> None:
    """Servers and snapshots give rows by the high bits of their hashes; no long run of the index is full
    then, in which each search would go from end to end."""
    ids = np.arange(200_000) - 100_000
    page = ids[hash_ids(ids) >> np.uint64(56) < 32]
    table = ServedTable(SPEC)
    table.put(page, np.zeros((len(page), SPEC.dim), np.float32))
    free = np.flatnonzero(table._slots == 0)
    assert np.diff(free).max() < 1000


def test_predictions(trained: tuple[Path, Any]) -> None:
    """A model predicts the bits of training from its folder and from a snapshot; compact rows come near."""
    folder, expected = trained
    (folder / "features.toml").touch()  # not the model's
    plain = serving.load(folder / "model", models.FEATURES)
    assert (plain(models.BATCH) == expected).all()
    taken = serving.load("tests.serving.models:chance", models.FEATURES, folder / "snapshot")
    assert (taken(models.BATCH) == expected).all()
    compact = serving.load(folder / "model", models.FEATURES, folder / "snapshot", "int8")
    assert np.abs(compact(models.BATCH) - expected).max() < 1e-3
    numbers = {**models.BATCH, "user": ["anna", 7, "bert", "7"]}
    assert (plain(numbers) == expected).all()


def test_mistakes(trained: tuple[Path, Any]) -> None:
    """What a model cannot use is refused in a sentence, and the model goes on."""
    model = serving.load(trained[0] / "model", models.FEATURES)
    with pytest.raises(UsageError, match="the batch has the feature 'colour'"):
        model({"colour": [1]})
    with pytest.raises(IdError, match="items"):
        model({**models.BATCH, "items": [["red"], [1], [2], [3]]})
    with pytest.raises(CheckpointError, match="missing"):
        serving.load(trained[0] / "model", checkpoint="missing")
    assert (model(models.BATCH) == trained[1]).all()


@pytest.mark.parametrize(
    ("kind", "form"), [("npz", "int8"), ("safetensors", "int4"), ("torch", "bfloat16")]
)
def test_exports(kind: Any, form: RowForm, trained: tuple[Path, Any], tmp_path: Path) -> None:
    """An export predicts the bits of its rows' form, of a model's folder and of a snapshot."""
    if kind == "torch":
        pytest.importorskip("torch", reason="torch is not installed")
    folder = trained[0]
    expected = serving.load(folder / "model", models.FEATURES, rows=form)(models.BATCH)
    serving.export(str(folder / "model"), tmp_path / "out", kind, form)
    actual = serving.load(tmp_path / "out", models.FEATURES)
    assert (actual(models.BATCH) == expected).all()
    assert {table.form for table in rows_of_export(str(tmp_path / "out")).sparse.values()} == {form}
    serving.export("any:name", tmp_path / "rows", kind, form, checkpoint=folder / "snapshot")
    taken = serving.load("tests.serving.models:chance", models.FEATURES, tmp_path / "rows")
    assert (taken(models.BATCH) == expected).all()
    with pytest.raises(ConfigError, match="there already"):
        serving.export(str(folder / "model"), tmp_path / "out")
    [file] = (tmp_path / "out").glob("rows.*")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="damaged"):
        serving.load(tmp_path / "out", models.FEATURES)


def test_min_count(trained: tuple[Path, Any], tmp_path: Path) -> None:
    """Rows that were shown less often are left out; a table that does not count them is refused."""
    with psfleet.connect() as ps:
        entry = psfleet.core.engine.schema.entry.ShowClickEntry("show", "click")
        table = ps.sparse_table("seen", 4, psfleet.optimizer.SGD(0.1), entry=entry)
        for ids in ([1, 2, 3], [2, 3], [3]):
            table.push(
                ids, np.ones((len(ids), 4)), shows=[1] * len(ids), clicks=[0] * len(ids)
            ).wait()
        ps.save(str(tmp_path / "snapshot"))
    serving.export("any:name", tmp_path / "out", min_count=2, checkpoint=tmp_path / "snapshot")
    rows = rows_of_export(str(tmp_path / "out"))
    assert rows.sparse["seen"].has(np.arange(5)).tolist() == [False, False, True, True, False]
    with pytest.raises(ConfigError, match="does not count"):
        serving.export("any:name", tmp_path / "no", min_count=2, checkpoint=trained[0] / "snapshot")
    assert not (tmp_path / "no").exists()
