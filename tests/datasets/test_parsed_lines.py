"""Cells and lines of CSV, TSV and libsvm files: what each of them is, and that none changes another."""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")

from psfleet.core.base.errors import UsageError
from psfleet.data.text_files import TextFiles  # after the check for pyarrow
from psfleet.features import Feature, FeatureSet, Number, Table

pytestmark = pytest.mark.quick

TABLE = Table("t", 2)
FEATURES = FeatureSet(
    [
        Feature("ids", TABLE),
        Feature("word", TABLE, hashed=True),
        Feature("heavy", TABLE, weighted=True),
        Number("age", default=-1.0),
        Number("pair", dim=2),
    ]
)
NAMES = ["ids", "word", "heavy", "heavy.weights", "age", "pair", "click"]
GOOD = dict(zip(NAMES, ("3|4", "a b", "5|6", "1|0.5", "1.5", "1|2", "1"), strict=True))


def group(path: Path, **options: Any) -> Any:
    """The rows of a file of one row group."""
    return TextFiles(path, FEATURES, ["click"], **options).group(0)


def values(rows: Any, name: str, place: int) -> list[Any]:
    """The values of a row's cell."""
    if name in ("age", "pair"):
        return rows.features[name][place].tolist()  # type: ignore[no-any-return]
    if name == "heavy.weights":
        return rows.features["heavy"][[place]].weights.tolist()  # type: ignore[no-any-return]
    if name in ("ids", "word", "heavy"):
        return rows.features[name][[place]].values.tolist()  # type: ignore[no-any-return]
    return [float(rows.labels["click"][place])]


BAD = None
CELLS: dict[str, dict[str, Any]] = {
    "ids": {
        "": [],
        r"\N": [],
        "7": [7],
        "-3": [-3],
        "+3": [3],
        " 3": [3],
        "007": [7],
        "3||4": [3, 4],
        str(2**63 - 1): [2**63 - 1],
        str(2**63): BAD,
        **dict.fromkeys(("3.0", "12_34", "0x1F", "1e3", "x", "9007199254740993.0"), BAD),
        **dict.fromkeys(("٣", "１２"), BAD),  # noqa: RUF001
    },
    "word": {
        **{each: [each] for each in ("0x", "é", " ", 'a"b', "x" * 400_000, str(2**64 - 1))},
        "": [],
        "a|b": ["a", "b"],
        '"a, ""b"""': ['a, "b"'],
        **dict.fromkeys(('"a"b', '"a', "a\rb"), BAD),
    },
    "heavy": {"5": BAD, "5|6|7": BAD, "5|": [5]},
    "heavy.weights": {"": BAD, "1": BAD, "nan|1": BAD, "1|1e39": BAD, "2|.5": [2, 0.5]},
    "age": {
        "": [-1],
        "nan": [-1],
        "NaN": [-1],
        "-0.0": [0],
        ".5": [0.5],
        "1.": [1],
        "1e-3": [pytest.approx(0.001)],
        **dict.fromkeys(("inf", "1e39", "1e400", "1|2", "0x1p3", "1_0", "nan(1)"), BAD),
    },
    "pair": {"": [0, 0], "1": BAD, "1|2|3": BAD, "1|": [1, 0]},
    "click": {"0": [0], "1_0": BAD, "": BAD, "2|3": BAD, "nan": BAD, "x": BAD},
}


@pytest.mark.parametrize("column", CELLS)
def test_cells(column: str, tmp_path: Path) -> None:
    """A cell is its value or makes a bad row, and the rows beside it stay as they are.

    A quoted cell in one of them changes nothing."""
    path = tmp_path / "a.csv"
    quoted = ",".join({**GOOD, "word": '"a, b"'}.values())
    for cell, expected in CELLS[column].items():
        line = ",".join({**GOOD, column: cell}.values())
        for other in (",".join(GOOD.values()), quoted):
            lines = [",".join(NAMES), other, line, other]
            path.write_bytes("\n".join(lines).encode())
            rows = group(path, bad_rows="skip")
            assert rows.numbers.tolist() == ([0, 2] if expected is BAD else [0, 1, 2]), cell[:20]
            if expected is not BAD:
                assert values(rows, column, 1) == expected, cell[:20]
            assert [values(rows, name, 0) for name in NAMES] == [
                values(rows, name, -1) for name in NAMES
            ]
        if expected is BAD:
            with pytest.raises(UsageError, match=r"a\.csv line 3: "):
                group(path)


@pytest.mark.parametrize("ending", ["", "\n", "\r\n", "\n\n", "\n\r"])
def test_ends_of_lines(ending: str, tmp_path: Path) -> None:
    """Whatever the last line ends with, it is a row, and an empty line is none."""
    path = tmp_path / "a.csv"
    lines = "\n".join(",".join(each) for each in (NAMES, GOOD.values(), GOOD.values()))
    path.write_text(lines + ending, newline="")
    assert group(path).numbers.tolist() == [0, 1]


def test_bad_lines_among_many(tmp_path: Path) -> None:
    """Of lines in any order each bad one is skipped alone, with its own number and reason."""
    reasons = {
        "1,2": "it has 2 cells for 3 columns",
        "1,2,3,4": "it has 4 cells for 3 columns",
        '1,"2,3': "has no cells",
        '1,"2"3,4': "has no cells",
        "1\r2,3,4": "has no cells",
        "a,2,3": "x is 'a'",
        "1,\udce9,3": r"y is b'\xe9', which is not UTF-8",
    }
    good = ["1,2,3", '"1","2, 3",4', "7,x y,8"]
    features = FeatureSet([Feature("x", TABLE), Feature("y", TABLE, hashed=True)])
    dice = random.Random(3)
    for _ in range(20):
        lines = [dice.choice([*reasons, *good, *good]) for _ in range(30)]
        data = "\n".join(["x,y,z", *lines]).encode(errors="surrogateescape")
        (tmp_path / "a.csv").write_bytes(data)
        found = TextFiles(tmp_path / "a.csv", features, bad_rows="skip", interleave=1)
        (rows,) = found._decoded(found.groups[0], 99)
        for number, line in enumerate(lines):
            if line in reasons:
                assert rows.bad[number].startswith(f"line {number + 2}: ")
                assert reasons[line] in rows.bad[number]
        assert found.group(0).numbers.tolist() == [
            n for n, line in enumerate(lines) if line in good
        ]


def test_dialects(tmp_path: Path) -> None:
    """Quotes, words for missing values and the encoding are arguments."""
    features = FeatureSet([Feature("title", TABLE, hashed=True), Number("age", default=-1)])
    path = tmp_path / "a.tsv"
    lines = ["title\tage", '"Heroes" live\tNA', "Orl\xe9ans\t5", "NA\t\\N"]
    path.write_bytes("\n".join(lines).encode("latin-1"))
    options: Any = {"quote": None, "null_values": ["NA"], "encoding": "latin-1"}
    rows = TextFiles(path, features, **options).group(0)
    assert rows.features["title"].values.tolist() == ['"Heroes" live', "Orl\xe9ans"]
    assert rows.features["title"].lengths.tolist() == [1, 1, 0]
    assert rows.features["age"].tolist() == [[-1], [5], [-1]]
    skipping = TextFiles(path, features, bad_rows="skip", **options | {"encoding": "utf-8"})
    assert skipping.group(0).numbers.tolist() == [0, 2]
    with pytest.raises(UsageError, match=r"a\.tsv line 2: .*pass quote=None if quotes are part"):
        TextFiles(path, features, encoding="latin-1").group(0)
    with pytest.raises(UsageError, match=r"line 3: title is b'Orl\\xe9ans', which is not UTF-8"):
        TextFiles(path, features, quote=None, null_values=["NA"]).group(0)
    with pytest.raises(
        UsageError, match=r"encoding is 'utf-16'; it must be one that extends ASCII"
    ):
        TextFiles(path, features, encoding="utf-16")
    with pytest.raises(UsageError, match=r"quote is '<<'"):
        TextFiles(path, features, quote="<<")
    path.write_bytes(b"title\tage\tcaf\xe9\nhat\t1\t\xe9\n")
    only = TextFiles(path, features).group(0)  # other bytes in columns that nobody asks for
    assert only.features["title"].values.tolist() == ["hat"]


LIBSVM = ["1 3:0.5 7:2", "-1", "+1 9:1e-3", "0.5 1:2  2:-1\t3:.5 # 4:1"]
PAIRS: dict[str, Any] = {
    "1 -3:+1": [[-3], [1]],
    **{line: [[3], [1]] for line in ("+.5 3:1", " 1 3:1", "1 +3:1", "1 3:1 # 4:x")},
    **{line: [[3], [1]] for line in ("1 3:1#\xe9", "1 3:1\r")},
    **dict.fromkeys(("++1 3:1", "x 3:1", "nan 3:1", "1_0 3:1", "3:1"), BAD),  # labels
    **dict.fromkeys(("1 3", "1 3:", "1 :3", "1 3:4:5", "1 3|4:1", "1 3:1|2", "1 3 :1"), BAD),
    **dict.fromkeys(("1 x:1", "1 0x1F:1", "1 1_0:1", f"1 {2**63}:1", "1 ٣:1"), BAD),
    **dict.fromkeys(("1 3:x", "1 3:nan", "1 3:1e39", "1 3:0x1p3", "1 3:1_0"), BAD),
    **dict.fromkeys(("1 3:1\x1c4:1", "1 3:1\u00a04:1", "1 3:1\u20284:1"), BAD),  # blanks
}


def test_lines_of_libsvm(tmp_path: Path) -> None:
    """A line is its sample or a bad row, and those around it stay as they are."""
    path = tmp_path / "a.libsvm"
    pairs = Feature("x", TABLE, weighted=True, column="index", weights_column="value")
    for line, expected in PAIRS.items():
        path.write_bytes("\n".join([*LIBSVM, line, *LIBSVM]).encode())
        files = TextFiles(path, FeatureSet([pairs]), ["label"], bad_rows="skip")
        rows = files.group(0)
        bags = rows.features["x"]
        around = [0, 1, 2, 3, -4, -3, -2, -1]
        assert bags[around].lengths.tolist() == [2, 0, 1, 3] * 2, line
        assert bags[around].values.tolist() == [3, 7, 9, 1, 2, 3] * 2, line
        assert rows.labels["label"][around].tolist() == [1, -1, 1, 0.5] * 2, line
        assert files.skipped == (expected is BAD), line
        if expected is not BAD:
            assert [bags[[4]].values.tolist(), bags[[4]].weights.tolist()] == expected, line
