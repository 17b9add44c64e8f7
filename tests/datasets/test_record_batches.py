"""Arrow data of several libraries as samples of a feature set: the same rows, in order and shuffled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psfleet import fleet
from psfleet.core.base.errors import UsageError

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")

import pyarrow as pa  # after the check for it
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from psfleet.data import record_batches
from psfleet.data.batches import Batches
from psfleet.data.record_batches import RecordBatches
from tests.datasets.click_features import FEATURES, clicks

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups have 4 rows."""
    monkeypatch.setattr(record_batches, "_GROUP", 4)


def table(rows: int = 18) -> pa.Table:
    """A table whose labels are the numbers of its rows."""
    numbers = range(rows)
    return pa.table(
        {
            "user": pa.array([row * 10 for row in numbers], pa.int64()),
            "tags": [[row, row + 1] for row in numbers],
            "tags.weights": [[0.5, 2.0] for _ in numbers],
            "city": ["x" if row % 2 else None for row in numbers],
            "age": [[float(row), 1.0] for row in numbers],
            "click": [float(row) for row in numbers],
        }
    )


def parquet_dataset(rows: pa.Table, folder: Path) -> Any:
    """The rows in two files of three row groups."""
    pq.write_table(rows[:10], folder / "a.parquet", row_group_size=4)
    pq.write_table(rows[10:], folder / "b.parquet", row_group_size=40)
    return pads.dataset(folder)


SOURCES: dict[str, Callable[[pa.Table, Path], Any]] = {
    "table": lambda rows, _: rows,
    "list": lambda rows, _: rows.to_batches(max_chunksize=5),
    "files": parquet_dataset,
    "memory": lambda rows, _: pads.dataset(rows.to_batches(max_chunksize=7)),
    "iterable": lambda rows, _: lambda: iter(rows.to_batches(max_chunksize=5)),
    "filtered": lambda rows, _: pads.dataset(rows).filter(pads.field("click") < 100).to_batches,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_rows(tmp_path: Path, kind: str) -> None:
    """Each row is a sample, once an epoch, and again where positions are asked for again."""
    source = RecordBatches(SOURCES[kind](table(), tmp_path), FEATURES, ["click"], interleave=1)
    batches = list(fleet.dataset(source, 5, epochs=2))
    assert sorted(clicks(batches)) == sorted([*range(18)] * 2)
    sample = next(iter(Batches(source, 1)[3:]))
    row = int(sample.labels["click"][0])
    assert sample.features["user"].values.tolist() == [row * 10]
    assert sample.features["tags"].weights.tolist() == [0.5, 2]
    assert sample.features["age"].tolist() == [[row, 1]]
    for low, high in ((9, 12), (2, 4), (4, 18)):
        (part,) = (clicks([source.read([(low, high)], 5, None)]),)
        assert part == clicks(batches)[low:high]


def test_order(tmp_path: Path) -> None:
    """Rows come as they are, of batches larger than a row group or of an iterable; a seed shuffles others."""
    assert clicks(Batches(RecordBatches(table(), FEATURES, ["click"]), 5)) == [*range(18)]
    iterable = RecordBatches(SOURCES["iterable"](table(), tmp_path), FEATURES, ["click"])
    assert clicks(Batches(iterable, 4)) == [*range(18)]
    files = RecordBatches(parquet_dataset(table(), tmp_path), FEATURES, ["click"])
    shuffled = clicks(fleet.dataset(files, 5, shuffle_seed=1))
    assert shuffled != sorted(shuffled) == [*range(18)]
    with pytest.raises(UsageError, match=r"shuffle_seed is 3; the RecordBatches of an iterable"):
        next(iter(fleet.dataset(iterable, 4, shuffle_seed=3)))


def test_rows_of_an_iterable() -> None:
    """So many rows are used as `rows` says, without a pass that counts them; fewer are an error."""
    passes = []

    def begin() -> Any:
        passes.append(1)
        return iter(table().to_batches(max_chunksize=5))

    assert clicks(Batches(RecordBatches(begin, FEATURES, ["click"], rows=12), 5)) == [*range(12)]
    assert len(passes) == 1
    with pytest.raises(
        UsageError, match=r"the iterable .* cannot be read .*: it has 18 rows, not 20"
    ):
        list(Batches(RecordBatches(begin, FEATURES, ["click"], rows=20), 5))


def test_refused_data(tmp_path: Path) -> None:
    """What is no Arrow data, can be read once only, or lacks a column, is named."""
    with pytest.raises(UsageError, match=r"RecordBatches got 3, that is no Arrow data"):
        RecordBatches(3, FEATURES)
    with pytest.raises(UsageError, match=r"that is read once only; pass a table, or a function"):
        RecordBatches(iter(table().to_batches()), FEATURES)
    with pytest.raises(UsageError, match=r"got 'a' among its batches; it must be a pyarrow"):
        RecordBatches(lambda: iter("ab"), FEATURES)
    with pytest.raises(UsageError, match=r"\[\] has no row"):
        RecordBatches([], FEATURES)
    with pytest.raises(UsageError, match=r"the table has no column 'click'; it has user, tags"):
        RecordBatches(table().drop_columns("click"), FEATURES, ["click"])
    strings = table().set_column(0, "user", pa.array(["a"] * 18))
    with pytest.raises(UsageError, match=r"the iterable: column 'user' is of type string"):
        list(Batches(RecordBatches(lambda: [strings], FEATURES), 4))
    filtered = parquet_dataset(table(), tmp_path).filter(pads.field("click") < 3)
    with pytest.raises(UsageError, match=r"filtered .* or pass its to_batches"):
        RecordBatches(filtered, FEATURES, ["click"])


def test_bad_rows() -> None:
    """A row that cannot be used is named, or left out and counted."""
    rows = table(6).set_column(5, "click", pa.array([0, 1, None, 3, 4, 5], pa.float64()))
    with pytest.raises(UsageError, match=r"the table row group 0 row 2: click is None; correct it"):
        list(Batches(RecordBatches(rows, FEATURES, ["click"]), 6))
    source = RecordBatches(lambda: [rows], FEATURES, ["click"], bad_rows="skip")
    assert clicks(Batches(source, 6)) == [0, 1, 3, 4, 5]
    assert source.skipped == 1


def test_hugging_face() -> None:
    """A Dataset of Hugging Face is read by row numbers, one of chosen rows too."""
    datasets = pytest.importorskip(
        "datasets", reason="datasets is not installed: pip install datasets"
    )
    data = datasets.Dataset(table()).select(range(17, -1, -1))
    source = RecordBatches(data, FEATURES, ["click"])
    assert clicks(Batches(source, 5)) == [*range(17, -1, -1)]
    assert sorted(clicks(fleet.dataset(source, 5, shuffle_seed=1))) == [*range(18)]


def test_polars() -> None:
    """A data frame that exports Arrow is read as a table."""
    polars = pytest.importorskip("polars", reason="polars is not installed: pip install polars")
    source = RecordBatches(polars.from_arrow(table()), FEATURES, ["click"])
    assert clicks(Batches(source, 5)) == [*range(18)]
