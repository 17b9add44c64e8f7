"""Which files paths name: folders, partitions, patterns, URLs; and columns of any type of Arrow in them."""

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")

import pyarrow as pa  # after the check for it
import pyarrow.compute
import pyarrow.parquet as pq

from psfleet.core.base.errors import UsageError
from psfleet.data.data_files import files_of
from psfleet.data.parquet import ParquetFiles
from psfleet.data.record_batches import RecordBatches
from psfleet.data.text_files import TextFiles
from psfleet.features import Feature, FeatureSet, Log1p, Number, Table

pytestmark = pytest.mark.quick

TABLE = Table("t", 4)
USER = FeatureSet([Feature("user", TABLE)])
FILES = [
    *("b.parquet", "a.PARQUET", ".c.parquet", "_d.parquet", "e.csv", "old/f.parquet"),
    *("dt=2026-11-01/part-0.parquet", "dt=2026-11-02/country=no/part-0.parquet"),
    *(
        "dt=2026-11-01/_temporary/part-9.parquet",
        "_dt=1/x.parquet",
        "dt=2026-11-01/.part-1.parquet",
    ),
]
OF_FOLDER = ["a.PARQUET", "b.parquet", *FILES[6:8]]


@pytest.mark.parametrize("url", ["", "memory://"])
def test_files(url: str, tmp_path: Path) -> None:
    """Of a folder come its data files and those of its partitions, in any case; a pattern may name others."""
    root = f"{url}{tmp_path}"
    if url:
        fsspec: Any = pytest.importorskip("fsspec")
        for name in FILES:
            fsspec.filesystem("memory").pipe(f"{tmp_path}/{name}", b"x")
    else:
        for name in FILES:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("x")
    patterns = {
        "": OF_FOLDER,
        "/": OF_FOLDER,
        "/*.parquet": ["b.parquet"],
        "/dt=2026-11-0[1-9]": FILES[6:8],
        "/**/part-*.parquet": FILES[6:8],
        "/old": ["old/f.parquet"],
        "/_d.parquet": ["_d.parquet"],
    }
    for pattern, expected in patterns.items():
        found = files_of(root + pattern, [".parquet"])
        assert [name.removeprefix(f"{root}/") for name in found] == expected, pattern
    with pytest.raises(UsageError, match=r"names no \.parquet file"):
        files_of(f"{root}/*.orc", [".parquet"])


def test_a_name_with_the_signs_of_a_pattern(tmp_path: Path) -> None:
    """A file that is there is meant, whatever its name."""
    (tmp_path / "a[1].parquet").write_text("x")
    assert files_of(tmp_path / "a[1].parquet", []) == [str(tmp_path / "a[1].parquet")]


PARTITIONS = ["day=7/city=Oslo", "day=8/city=__HIVE_DEFAULT_PARTITION__", "day=x/city=a%20b"]


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_columns_of_partitions(kind: str, tmp_path: Path) -> None:
    """What the folders name are columns: as texts they are ids, numbers and labels, or make bad rows."""
    features = FeatureSet([*USER, Feature("city", TABLE, hashed=True), Number("day", default=-1)])
    for number, folder in enumerate(PARTITIONS):
        file = tmp_path / folder / f"part.{kind}"
        file.parent.mkdir(parents=True)
        if kind == "csv":
            file.write_text(f"user\n{number}\n")
        else:
            pq.write_table(pa.table({"user": [number]}), file)
    reader: Any = TextFiles if kind == "csv" else ParquetFiles
    files = reader(tmp_path, features, ["day"], bad_rows="skip")
    oslo, no_city, no_day = (files.group(number) for number in range(3))
    assert oslo.features["city"].values.tolist() == ["Oslo"]
    assert [oslo.features["day"].tolist(), oslo.labels["day"].tolist()] == [[[7]], [7]]
    assert no_city.features["city"].lengths.tolist() == [0]
    assert no_city.features["user"].values.tolist() == [1]
    assert len(no_day) == 0
    assert files.skipped == 1
    with pytest.raises(UsageError, match=r"part\.\w+ (row group 0 row 0|line 2): day is 'x'"):
        reader(tmp_path, features).group(2)
    assert files.names(files.groups[0]) == ["user", "day", "city"]
    columns = files.columns(0, ["city", "user"], np.array([0]))
    assert [column.to_pylist() for column in columns.values()] == [
        ["Oslo"],
        ["0" if kind == "csv" else 0],
    ]


WORDS = ["red", None, "15"]
COLUMNS: dict[str, tuple[Any, list[Any]]] = {
    "null": (pa.nulls(3), []),
    "nulls in lists": (pa.array([[], None, [None]], pa.list_(pa.null())), []),
    "string": (pa.array(WORDS), ["red", "15"]),
    "large_string": (pa.array(WORDS, pa.large_string()), ["red", "15"]),
    "binary": (pa.array([b"red", None, b"15"]), ["red", "15"]),
    "large_binary": (pa.array([b"red", None, b"15"], pa.large_binary()), ["red", "15"]),
    "fixed binary": (pa.array([b"red", None, b"15 "], pa.binary(3)), ["red", "15 "]),
    "dictionary": (pa.array(WORDS).dictionary_encode(), ["red", "15"]),
    "int8": (pa.array([7, None, -1], pa.int8()), [7, -1]),
    "uint64": (pa.array([7, None, 2**64 - 1], pa.uint64()), [7, 2**64 - 1]),
    "decimal": (pa.array([Decimal(7), None, Decimal(2**63)], pa.decimal128(20)), ["7", str(2**63)]),
    "list": (pa.array([["red"], None, ["15", None]]), ["red", "15"]),
    "large_list": (pa.array([[7], None, [8, 9]], pa.large_list(pa.int32())), [7, 8, 9]),
    "fixed list": (pa.array([[7, 8], None, [9, 7]], pa.list_(pa.int64(), 2)), [7, 8, 9, 7]),
    "list of dictionary": (
        pa.array([["red"], None, []], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
        ["red"],
    ),
}
COLUMNS["run ends"] = (pa.compute.run_end_encode(pa.array([7, 7, None])), [7, 7])
if hasattr(pa, "string_view"):  # pyarrow 16
    COLUMNS["string_view"] = (pa.array(WORDS, pa.string_view()), ["red", "15"])
    COLUMNS["binary_view"] = (pa.array([b"red", None, b"15"], pa.binary_view()), ["red", "15"])
    COLUMNS["list_view"] = (pa.array([[7], None, []], pa.list_view(pa.int64())), [7])
if hasattr(pa, "bool8"):  # pyarrow 18
    bits = pa.array([0, 1, None], pa.int8())
    COLUMNS["bool8"] = (pa.ExtensionArray.from_storage(pa.bool8(), bits), [0, 1])


@pytest.mark.parametrize("name", COLUMNS)
def test_types(name: str) -> None:
    """A column of any type whose values are whole numbers or texts is a hashed feature."""
    column, expected = COLUMNS[name]
    features = FeatureSet([Feature("x", TABLE, hashed=True)])
    rows = RecordBatches(pa.table({"x": column, "y": [0, 1, 2]}), features, ["y"]).group(0)
    assert rows.features["x"].values.tolist() == expected
    assert rows.numbers.tolist() == [0, 1, 2]
    plain = FeatureSet([Feature("x", TABLE)])
    if all(isinstance(value, int) for value in expected) and max([0, *expected]) < 2**63:
        rows = RecordBatches(pa.table({"x": column}), plain).group(0)
        assert rows.features["x"].values.tolist() == expected


NUMBERS = {
    "bool": (pa.array([True, None, False]), [1, -1, 0]),
    "float16": (pa.array(np.array([1.5, np.nan, 2], np.float16)), [1.5, -1, 2]),
    "decimal": (
        pa.array([Decimal("1.25"), None, Decimal("-3")], pa.decimal128(9, 2)),
        [1.25, -1, -3],
    ),
    "text": (pa.array(["1.25", "", "-3"]), [1.25, -1, -3]),
    "null": (pa.nulls(3), [-1, -1, -1]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str) -> None:
    """A column of any type whose values are numbers is a Number."""
    column, expected = NUMBERS[name]
    features = FeatureSet([Number("x", default=-1)])
    rows = RecordBatches(pa.table({"x": column}), features).group(0)
    assert rows.features["x"][:, 0].tolist() == expected


@pytest.mark.parametrize(
    "column",
    [
        pa.array([datetime.date(2026, 11, 1)]),
        pa.array([{"a": 1}]),
        pa.array([[[1]]]),
        pa.array([1.5]),
        pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
    ],
    ids=lambda column: str(column.type),
)
def test_refused_types(column: Any) -> None:
    """What is no whole number or text is refused at once, with its type."""
    features = FeatureSet([Feature("x", TABLE, hashed=True)])
    with pytest.raises(
        UsageError, match=r"the table: column 'x' is of type .*; it must be of whole"
    ):
        RecordBatches(pa.table({"x": column}), features)


def test_two_columns_of_one_name() -> None:
    """They are refused if a feature has the name; who has other names does not mind."""
    table = pa.table([[1], [2], [3]], ["user", "x", "x"])
    with pytest.raises(
        UsageError, match="the table has 2 columns 'x'; give each a name of its own"
    ):
        RecordBatches(table, FeatureSet([Feature("x", TABLE)]))
    assert RecordBatches(table, USER).group(0).features["user"].values.tolist() == [1]


def test_bad_values_cost_their_rows(tmp_path: Path) -> None:
    """Of a row group each row with a value that cannot be used is skipped, and no other: also what only a
    transform refuses, a number beyond 64 bits, and a text that is not UTF-8."""
    features = FeatureSet(
        [*USER, Feature("city", TABLE, hashed=True), Number("price", transform=[Log1p()])]
    )
    count = 20
    columns: dict[str, list[Any]] = {
        "user": [*range(count)],
        "city": [b"Oslo"] * count,
        "price": [1.0] * count,
        "click": [0.0] * count,
    }
    columns["user"][3] = 2**63
    columns["city"][5] = b"Orl\xe9ans"
    columns["price"][7] = columns["price"][8] = -3.0
    columns["click"][9] = float("nan")
    table = pa.table({**columns, "user": pa.array(columns["user"], pa.uint64())})
    schema = table.schema.set(1, pa.field("city", pa.string()))
    arrays = [
        array.cast(field.type, safe=False)
        for array, field in zip(table.columns, schema, strict=True)
    ]
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), tmp_path / "a.parquet")
    files = ParquetFiles(tmp_path, features, ["click"], bad_rows="skip")
    rows = files.group(0)
    assert rows.numbers.tolist() == [n for n in range(count) if n not in (3, 5, 7, 8, 9)]
    assert files.skipped == 5
    [part] = files._decoded(files.groups[0], count)
    assert [part.bad[row] for row in (3, 5, 9)] == [
        f"row group 0 row 3: user is {2**63}",
        r"row group 0 row 5: city is b'Orl\xe9ans', which is not UTF-8",
        "row group 0 row 9: click is nan",
    ]
    assert "row 7: feature 'price': Log1p has the value -3.0" in part.bad[7]
    with pytest.raises(
        UsageError, match=r"a\.parquet row group 0 row 3: user is 9223372036854775808"
    ):
        ParquetFiles(tmp_path, features, ["click"]).group(0)
