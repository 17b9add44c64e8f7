"""Parquet files as samples of a feature set: columns, order, bad rows and files."""

from pathlib import Path
from typing import Any

import pytest

from psfleet import fleet
from psfleet.core.base.errors import UsageError
from psfleet.data.feature_sets.jagged import Jagged
from psfleet.features import Feature, FeatureLookup, FeatureSet, Number, Table

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")

import pyarrow as pa  # after the check for pyarrow
import pyarrow.parquet as pq

from psfleet.data.parquet import ParquetFiles, SampleBatch
from psfleet.data.row_order import RowSequence
from tests.datasets.click_features import clicks

pytestmark = pytest.mark.quick

TABLE = Table("t", 4)
FEATURES = FeatureSet(
    [
        Feature("user", TABLE),
        Feature("tags", TABLE, pooling="mean", weighted=True, column="tag_ids"),
        Feature("city", TABLE, hashed=True),
        Number("age", default=-1.0),
        Number("vector", 2),
    ]
)


def columns(first: int, count: int) -> dict[str, Any]:
    """Rows whose label is their number; every third one lacks most features."""
    rows = range(first, first + count)
    return {
        "user": [row * 10 for row in rows],
        "tag_ids": [None if row % 3 == 0 else [row, row + 1] for row in rows],
        "tag_ids.weights": [None if row % 3 == 0 else [0.5, 2.0] for row in rows],
        "city": pa.array(
            [None if row % 3 == 0 else f"c{row % 5}" for row in rows]
        ).dictionary_encode(),
        "age": [None if row % 3 == 0 else row / 2 for row in rows],
        "vector": [[row, -row] for row in rows],
        "click": rows,
        "other": ["x"] * count,
    }


def written(path: Path, first: int = 0, count: int = 10, group: int = 4, **changed: Any) -> Path:
    """A file with row groups of 4 rows."""
    pq.write_table(pa.table(columns(first, count) | changed), path, row_group_size=group)
    return path


def folder(path: Path) -> Path:
    """Three files of 10, 7 and 1 rows."""
    for number, (first, count) in enumerate(((0, 10), (10, 7), (17, 1))):
        written(path / f"{number}.parquet", first, count)
    return path


def test_columns(tmp_path: Path) -> None:
    """Each row has the features of its cells; a null is a feature that is missing."""
    files = ParquetFiles(folder(tmp_path), FEATURES, ["click"])
    seen = set()
    for batch in fleet.dataset(files, 4):
        tags, city = batch.features["tags"], batch.features["city"]
        for at, row in enumerate(batch.labels["click"].astype(int).tolist()):
            seen.add(row)
            there = row % 3 > 0
            one: Jagged = tags[at : at + 1]
            assert one.weights is not None
            assert one.values.tolist() == ([row, row + 1] if there else [])
            assert one.weights.tolist() == ([0.5, 2.0] if there else [])
            assert city[[at]].values.tolist() == ([f"c{row % 5}"] if there else [])
            assert batch.features["user"][[at]].values.tolist() == [row * 10]
            assert batch.features["age"][at].tolist() == [row / 2 if there else -1]
            assert batch.features["vector"][at].tolist() == [row, -row]
    assert seen == set(range(18))
    assert len(files) == 18


@pytest.mark.parametrize(("seed", "interleave"), [(None, 1), (3, 2), (None, 4), (3, 4)])
def test_every_row_once_an_epoch(tmp_path: Path, seed: int | None, interleave: int) -> None:
    """Each epoch has every row once, in an order that follows from the seed."""
    files = ParquetFiles(folder(tmp_path), FEATURES, ["click"], interleave=interleave)
    order = clicks(fleet.dataset(files, 3, epochs=2, shuffle_seed=seed))
    assert sorted(order[:18]) == sorted(order[18:]) == list(range(18))
    again = ParquetFiles(tmp_path, FEATURES, ["click"], interleave=interleave)
    assert clicks(fleet.dataset(again, 3, epochs=2, shuffle_seed=seed)) == order
    if seed is None:
        assert order[:18] == order[18:]
    else:
        assert order[:18] != order[18:]
        assert clicks(fleet.dataset(files, 3, shuffle_seed=seed + 1)) != order[:18]


def test_one_row_group_after_the_other(tmp_path: Path) -> None:
    """Without interleaving and shuffling whole blocks come as they are in the files, then the rest."""
    files = ParquetFiles(written(tmp_path / "f.parquet"), FEATURES, ["click"], interleave=1)
    assert clicks(fleet.dataset(files, 2)) == list(range(10))
    assert clicks(fleet.dataset(files, 3)) == [0, 1, 2, 4, 5, 6, 3, 7, 8, 9]


@pytest.mark.parametrize("seed", [None, 3])
def test_the_order_depends_on_no_worker(tmp_path: Path, seed: int | None) -> None:
    """Whoever reads which positions, in whatever pieces and order, gets the rows at those positions."""
    files = ParquetFiles(folder(tmp_path), FEATURES, ["click"])
    whole = clicks([files.read([(0, 18)], 3, seed), files.read([(18, 36)], 3, seed)])
    for low, high in ((7, 11), (30, 36), (0, 1), (17, 18), (18, 29)):
        again = ParquetFiles(tmp_path, FEATURES, ["click"])
        assert clicks([again.read([(low, high)], 3, seed)]) == whole[low:high]
    assert clicks([files.read([(3, 5), (20, 22)], 3, seed)]) == whole[3:5] + whole[20:22]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_read_row_groups_of_their_own(workers: int) -> None:
    """Of blocks taken in turn, as in sync mode, workers read different row groups."""
    order = RowSequence([40] * 8, 5, 4, seed=1, epoch=0)
    groups: list[set[int]] = [set() for _ in range(workers)]
    for block in range(64):
        (block_range,) = order.ranges(block * 5, block * 5 + 5)
        groups[block % workers].add(block_range.group)
    assert sum(map(len, groups)) == 8
    assert set.union(*groups) == set(range(8))


@pytest.mark.parametrize(("seed", "block"), [(None, 1), (1, 3), (1, 100), (None, 100)])
def test_sequences_have_every_row_once(seed: int | None, block: int) -> None:
    """Also of row groups that are empty, smaller than a block or no multiple of it."""
    sizes = [5, 0, 9, 1, 6, 100, 2]
    order = RowSequence(sizes, block, 3, seed, epoch=2)
    actual = [
        (part.group, row)
        for low in range(0, sum(sizes), 7)
        for part in order.ranges(low, min(low + 7, sum(sizes)))
        for row in range(part.low, part.high)
    ]
    assert sorted(actual) == [(g, row) for g, size in enumerate(sizes) for row in range(size)]
    for group, size in enumerate(sizes if seed is not None else []):
        assert sorted(order.rows_of(group).tolist()) == list(range(size))


BAD: list[tuple[str, list[Any], int, str]] = [
    ("click", [0, 1, 2, 3, 4, None, 6, 7, 8, 9], 1, "click is None"),
    ("age", [0, 1, 2, 3, 4, float("inf"), 6, 7, 8, 9], 1, "age is inf"),
    ("tag_ids.weights", [[1.0, 2.0]] * 10, 2, r"tag_ids.weights is \[1.0, 2.0\]"),
    ("vector", [[1, 2]] * 5 + [[1]] + [[1, 2]] * 4, 1, r"vector is \[1\]"),
]


@pytest.mark.parametrize(("column", "values", "row", "text"), BAD, ids=[bad[0] for bad in BAD])
def test_bad_rows(
    tmp_path: Path, capsys: Any, column: str, values: list[Any], row: int, text: str
) -> None:
    """A bad row is refused, or skipped and counted, with its file, row group, number, column and value."""
    changed: dict[str, Any] = {column: values}
    file = written(tmp_path / "f.parquet", **changed)
    group = 0 if column == "tag_ids.weights" else 1
    number = 0 if column == "tag_ids.weights" else row
    place = rf"f\.parquet row group {group} row {number}: {text}"
    with pytest.raises(UsageError, match=place):
        clicks(fleet.dataset(ParquetFiles(file, FEATURES, ["click"]), 2))
    files = ParquetFiles(file, FEATURES, ["click"], bad_rows="skip")
    good = clicks(fleet.dataset(files, 2))
    bad = [0, 3, 6, 9] if column == "tag_ids.weights" else [5]
    assert sorted(good) == sorted(set(range(10)) - set(bad))
    assert files.skipped == len(bad)
    assert capsys.readouterr().err.count("the row is skipped") == len(bad)


@pytest.mark.parametrize(("seed", "depth"), [(None, 1), (3, 3)])
def test_prefetching(tmp_path: Path, seed: int | None, depth: int) -> None:
    """With batches read ahead come the same batches, and bad rows count once."""
    written(tmp_path / "f.parquet", count=40, click=[None, *range(1, 38), None, 39])
    plain = ParquetFiles(tmp_path, FEATURES, ["click"], bad_rows="skip")
    ahead = ParquetFiles(tmp_path, FEATURES, ["click"], bad_rows="skip")
    expected = [batch.labels["click"].tolist() for batch in fleet.dataset(plain, 3, 2, seed)]
    batches = fleet.dataset(ahead, 3, 2, seed, prefetch=depth)
    assert [batch.labels["click"].tolist() for batch in batches] == expected
    assert ahead.skipped == plain.skipped == 4


def test_prefetching_bad_rows(tmp_path: Path) -> None:
    """A bad row that is read ahead is refused in the step that it belongs to."""
    file = written(tmp_path / "f.parquet", click=[*range(9), None])
    files = ParquetFiles(file, FEATURES, ["click"], interleave=1)
    batches = fleet.dataset(files, 2, prefetch=3)
    assert clicks(next(batches) for _ in range(4)) == list(range(8))
    with pytest.raises(UsageError, match="row group 2 row 1: click is None"):
        next(batches)


@pytest.mark.parametrize("seed", [None, 3])
def test_a_damaged_end(tmp_path: Path, seed: int | None, capsys: Any) -> None:
    """Of a row group that is damaged far behind its begin the rows before that are read."""
    path, count = tmp_path / "f.parquet", 20_000
    table = pa.table({"user": range(count), "click": [float(row) for row in range(count)]})
    pq.write_table(table, path, data_page_size=8192, use_dictionary=False, compression="none")
    metadata = pq.ParquetFile(path).metadata.row_group(0).column(0)
    damaged(path, metadata.data_page_offset + metadata.total_compressed_size * 9 // 10, 9000)
    files = ParquetFiles(path, FeatureSet([Feature("user", TABLE)]), ["click"], bad_rows="skip")
    read = clicks(fleet.dataset(files, 100, shuffle_seed=seed))
    assert len(read) + files.skipped == count
    assert sorted(read) == list(range(len(read)))
    assert 0 < files.skipped < count
    assert f"row group 0 cannot be read from row {len(read)} on: " in capsys.readouterr().err


def test_a_batch_without_rows(tmp_path: Path) -> None:
    """A batch of which every row is bad is empty, and fits the feature set."""
    file = written(tmp_path / "f.parquet", count=2, click=pa.array([None, None], pa.int64()))
    (batch,) = fleet.dataset(ParquetFiles(file, FEATURES, ["click"], bad_rows="skip"), 2)
    assert isinstance(batch, SampleBatch)
    assert len(batch) == 0
    assert batch.features["user"].values.shape == (0,)
    assert batch.features["vector"].shape == (0, 2)


def damaged(path: Path, at: int, size: int = 64) -> Path:
    """The file with zeros in place of some bytes."""
    content = bytearray(path.read_bytes())
    content[at : at + size] = bytes(size)
    path.write_bytes(content)
    return path


def test_damaged_row_groups(tmp_path: Path, capsys: Any) -> None:
    """A row group that cannot be read is refused, or skipped and counted whole."""
    file = damaged(written(tmp_path / "f.parquet"), 4)
    with pytest.raises(UsageError, match=r"f\.parquet row group 0 cannot be read: "):
        clicks(fleet.dataset(ParquetFiles(file, FEATURES, ["click"]), 2))
    files = ParquetFiles(file, FEATURES, ["click"], bad_rows="skip")
    batches = list(fleet.dataset(files, 2))
    assert sorted(clicks(batches)) == [4, 5, 6, 7, 8, 9]
    assert files.skipped == 4
    lookups = [FeatureLookup(FEATURES, batch.features, {"t": "t"}) for batch in batches]
    assert [lookup.samples for lookup in lookups] == list(map(len, batches))
    assert "row group 0 cannot be read" in capsys.readouterr().err


def test_what_is_no_parquet(tmp_path: Path, capsys: Any) -> None:
    """A file of something else is refused, or skipped."""
    folder(tmp_path)
    (tmp_path / "0.parquet").write_text("no Parquet")
    with pytest.raises(UsageError, match=r"0\.parquet cannot be read as Parquet"):
        ParquetFiles(tmp_path, FEATURES, ["click"])
    files = ParquetFiles(tmp_path, FEATURES, ["click"], bad_rows="skip")
    assert len(files) == 8
    assert "it is skipped" in capsys.readouterr().err
    with pytest.raises(UsageError, match="cannot be read"):
        ParquetFiles(tmp_path / "none.parquet", FEATURES)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"names no \.parquet file"):
        ParquetFiles(tmp_path / "empty", FEATURES)


@pytest.mark.parametrize(
    ("features", "labels", "text"),
    [
        ([Feature("nobody", TABLE)], [], "has no column 'nobody'; it has user, tag_ids"),
        (
            [Feature("age", TABLE)],
            [],
            "column 'age' is of type double; it must be of whole numbers",
        ),
        (
            [Feature("city", TABLE)],
            [],
            "column 'city' is of type dictionary.* whole numbers, or lists",
        ),
        ([Number("age")], ["other"], "column 'other' is of type string; it must be of numbers"),
        ([], ["vector"], "column 'vector' is of type list.* must be of numbers"),
    ],
)
def test_refused_columns(tmp_path: Path, features: Any, labels: Any, text: str) -> None:
    """A column that is missing, or of a type that the feature cannot have, is named with its file."""
    file = written(tmp_path / "f.parquet")
    with pytest.raises(UsageError, match=rf"f\.parquet.*{text}"):
        ParquetFiles(file, FeatureSet(features), labels)


def test_urls(tmp_path: Path) -> None:
    """Files and folders are read through fsspec."""
    fsspec: Any = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    file = written(tmp_path / "f.parquet")
    for name in ("b", "a"):
        memory.pipe(f"/clicks/{name}.parquet", file.read_bytes())
    try:
        for url, count in (("memory://clicks", 20), ("memory://clicks/a.parquet", 10)):
            files = ParquetFiles(url, FEATURES, ["click"])
            assert len(files) == count
            assert len(clicks(fleet.dataset(files, 4))) == count
    finally:
        memory.rm("/clicks", recursive=True)
