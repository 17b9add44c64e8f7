"""CSV, TSV and libsvm files as samples of a feature set: columns, order, bad lines."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from psfleet import fleet
from psfleet.core.base.errors import UsageError
from psfleet.features import Feature, FeatureSet

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")

import pyarrow as pa  # after the check for it
import pyarrow.parquet as pq

from psfleet.data import text_files
from psfleet.data.feature_sets.feature_lookup import FeatureLookup
from psfleet.data.parquet import ParquetFiles
from psfleet.data.sample_batch import batch_of, sample_of
from psfleet.data.text_files import TextFiles
from tests.datasets.click_features import FEATURES, TABLE, clicks

pytestmark = pytest.mark.quick

COLUMNS = ["user", "city", "tags", "tags.weights", "age", "click", "note"]
SPARSE = FeatureSet([Feature("x", TABLE, weighted=True, column="index", weights_column="value")])


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups have 4 lines."""
    monkeypatch.setattr(text_files, "_GROUP", 4)


def written(
    path: Path, count: int = 10, first: int = 0, changed: Mapping[str, str] | None = None
) -> Path:
    """A file whose labels are the numbers of its rows; `changed`: cells of row 5."""
    delimiter = "\t" if path.suffix == ".tsv" else ","
    lines = [delimiter.join(COLUMNS)]
    for row in range(first, first + count):
        cells = {
            "user": str(row * 10),
            "city": '"a, b"' if row % 2 else "",
            "tags": f"{row}|{row + 1}" if row % 3 else "",
            "tags.weights": "0.5|2" if row % 3 else "",
            "age": f"{row}|{-row}" if row % 3 else "",
            "click": str(row),
            "note": f"n{row}",
        }
        cells |= changed if changed and row == 5 else {}
        lines.append(delimiter.join(cells[name] for name in COLUMNS))
    path.write_text("\ufeff" + "\r\n".join(lines) + "\r\n\r\n", encoding="utf-8", newline="")
    return path


@pytest.mark.parametrize("name", ["f.csv", "f.tsv"])
def test_columns(tmp_path: Path, name: str) -> None:
    """Each row has the features of its cells; an empty cell is a feature that is missing."""
    (batch,) = fleet.dataset(TextFiles(written(tmp_path / name, 4), FEATURES, ["click"]), 8)
    assert batch.labels["click"].tolist() == [0, 1, 2, 3]
    assert batch.features["user"].values.tolist() == [0, 10, 20, 30]
    assert batch.features["city"].values.tolist() == ["a, b", "a, b"]
    assert batch.features["city"].lengths.tolist() == [0, 1, 0, 1]
    assert batch.features["tags"].values.tolist() == [1, 2, 2, 3]
    assert batch.features["tags"].weights.tolist() == [0.5, 2, 0.5, 2]
    assert batch.features["age"].tolist() == [[-1, -1], [1, -1], [2, -2], [-1, -1]]


@pytest.mark.parametrize("seed", [None, 3])
def test_every_row_once_an_epoch(tmp_path: Path, seed: int | None) -> None:
    """All files of a folder, in an order that follows from the seed, whoever reads which positions."""
    for number, (first, count) in enumerate(((0, 10), (10, 7), (17, 1))):
        written(tmp_path / f"{number}.csv", count, first)
    files = TextFiles(tmp_path, FEATURES, ["click"])
    order = clicks(fleet.dataset(files, 3, epochs=2, shuffle_seed=seed))
    assert sorted(order[:18]) == sorted(order[18:]) == list(range(18))
    (tmp_path / "empty.csv").write_text("")  # a part without rows, as Spark writes it
    again = TextFiles(tmp_path, FEATURES, ["click"])
    assert clicks([again.read([(7, 12)], 3, seed)]) == order[7:12]
    assert (order[:18] == order[18:]) == (seed is None)


def test_libsvm(tmp_path: Path) -> None:
    """Lines of libsvm have a label and a weighted feature."""
    path = tmp_path / "f.libsvm"
    path.write_text("1 3:0.5 7:2 # seen\n\n# nothing\n-1\n0 9:1\n")
    files = TextFiles(path, SPARSE, ["label"])
    (batch,) = fleet.dataset(files, 8)
    assert batch.labels["label"].tolist() == [1, -1, 0]
    assert batch.features["x"].lengths.tolist() == [2, 0, 1]
    assert batch.features["x"].values.tolist() == [3, 7, 9]
    assert batch.features["x"].weights.tolist() == [0.5, 2, 1]
    path.write_text("1 3:0.5\n0 9\n")
    with pytest.raises(UsageError, match=r"f\.libsvm line 2: '9' is not index:value"):
        list(fleet.dataset(TextFiles(path, SPARSE, ["label"]), 8))


BAD = [
    ({"user": "u"}, "user is 'u'"),
    ({"user": "99999999999999999999"}, "user is "),
    ({"tags": "1|x"}, r"tags is \['1', 'x'\]"),
    ({"tags.weights": "1"}, r"tags.weights is \['1'\]"),
    ({"age": "1"}, r"age is \['1'\]"),
    ({"click": ""}, "click is None"),
    ({"click": "inf"}, "click is 'inf'"),
    ({"note": "a,b"}, "it has 8 cells for 7 columns"),
    ({"note": '"a'}, "has no cells: a quoted cell does not end"),
]


@pytest.mark.parametrize(("changed", "text"), BAD)
def test_bad_lines(tmp_path: Path, capsys: Any, changed: dict[str, str], text: str) -> None:
    """A bad line is refused, or skipped and counted, with file, number and value."""
    file = written(tmp_path / "f.csv", changed=changed)
    with pytest.raises(UsageError, match=rf"f\.csv line 7: .*{text}"):
        clicks(fleet.dataset(TextFiles(file, FEATURES, ["click"]), 2))
    files = TextFiles(file, FEATURES, ["click"], "skip", interleave=1)
    assert clicks(fleet.dataset(files, 2)) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert files.skipped == 1
    assert capsys.readouterr().err.count("the row is skipped") == 1


def test_refused_files(tmp_path: Path) -> None:
    """What is no such file, or lacks a column, is named."""
    with pytest.raises(UsageError, match=r"none\.csv cannot be read: No such file"):
        TextFiles(tmp_path / "none.csv", FEATURES)
    with pytest.raises(UsageError, match=r"names no \.csv or \.tsv or \.libsvm or "):
        TextFiles(tmp_path, FEATURES)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UsageError, match=r"a\.txt ends with none of \.csv, \.tsv, \.libsvm"):
        TextFiles(tmp_path / "a.txt", FEATURES)
    (tmp_path / "a.csv").write_text("user,city\n1,2\n")
    with pytest.raises(UsageError, match=r"a\.csv has no column 'tags'; it has user, city"):
        TextFiles(tmp_path / "a.csv", FEATURES)
    (tmp_path / "c.csv").write_text('user,"city\n1,2\n')
    with pytest.raises(
        UsageError, match=r"c\.csv line 1: .* has no cells: a quoted cell does not end"
    ):
        TextFiles(tmp_path / "c.csv", FEATURES)
    (tmp_path / "b.csv").write_text("")
    with pytest.raises(UsageError, match=r"b\.csv'\) has no row"):
        TextFiles(tmp_path / "b.csv", FEATURES)
    (tmp_path / "d.csv").write_text("user,city,user\n1,2,3\n")
    with pytest.raises(UsageError, match=r"d\.csv has 2 columns 'user'; give each a name"):
        TextFiles(tmp_path / "d.csv", FeatureSet([Feature("user", TABLE)]))
    assert len(TextFiles(tmp_path / "d.csv", FeatureSet([Feature("city", TABLE)]))) == 1


def test_an_id_from_every_kind_of_file(tmp_path: Path) -> None:
    """A hashed id is the same from CSV, from numbers and texts of Parquet, and from both in JSON."""
    features = FeatureSet(
        [Feature("user", TABLE, hashed=True), Feature("city", TABLE, hashed=True)]
    )
    users, cities = [15, 0, 2**63 - 1, -4], ["9", "x", "", "007"]
    rows = [f"{user},{city},1\n" for user, city in zip(users, cities, strict=True)]
    (tmp_path / "a.csv").write_text("user,city,click\n" + "".join(rows))
    for name, given in (("n", users), ("t", list(map(str, users)))):
        columns = {"user": given, "city": [[c] if c else [] for c in cities], "click": [1] * 4}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    rows_of_kinds = []
    for file in ("a.csv", "n.parquet", "t.parquet"):
        kind = TextFiles if file == "a.csv" else ParquetFiles
        (batch,) = fleet.dataset(kind(str(tmp_path / file), features, ["click"]), 4)
        rows_of_kinds.append(batch.features)
    for change in (int, str):
        objects = [
            sample_of(features, [], {"user": change(user), "city": [city] if city else []})
            for user, city in zip(users, cities, strict=True)
        ]
        rows_of_kinds.append(batch_of(features, [], objects).features)
    ids = [FeatureLookup(features, batch, {"t": 0}).ids[0].tolist() for batch in rows_of_kinds]
    assert ids == [ids[0]] * 5
