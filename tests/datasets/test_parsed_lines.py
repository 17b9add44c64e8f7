"""CSV and libsvm files that Arrow parses give what they give line by line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")

from psfleet.core.base.errors import UsageError
from psfleet.data.text_files import TextFiles  # after the check for pyarrow
from psfleet.features import Feature, FeatureSet, Number, Table

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
NAMES = ["ids", "word", "heavy", "heavy.weights", "age", "pair", "click", "at"]
GOOD = ["3|4", "a b", "5|6", "1|0.5", "1.5", "1|2", "1", "17"]


class OneByOne(TextFiles):
    """Without Arrow."""

    def _good_rows(self, *arguments: Any) -> None:
        return None


def found(kind: type[TextFiles], path: Path) -> Any:
    """What is read, or the error."""
    files = kind(path, FEATURES, ["click"], time="at")
    try:
        rows = files.group(0)
    except UsageError as error:
        return str(error)
    bags = [rows.features[name] for name in ("ids", "word", "heavy")]
    lists = [[bag.values.tolist(), bag.lengths.tolist()] for bag in bags]
    return [
        *lists,
        bags[2].weights.tolist(),
        rows.features["age"].tolist(),
        rows.features["pair"].tolist(),
        rows.labels["click"].tolist(),
        rows.times.tolist() if rows.times is not None else None,
    ]


CELLS = {
    "ids": ["", "7", "-3", "+3", " 3", "1_0", "0x1F", "3.0", "3||4", "|", "x", str(2**63), "٣"],
    "word": ["", "a|b", "a||b", '"q"', "0x", "é", "nan", " "],
    "heavy": ["", "5", "5|6|7"],
    "heavy.weights": ["", "1", "nan|1", "1|1e39"],
    "age": ["", "nan", "inf", "1e39", "1e-3", "-0.0", "1|2", ".5", "1.", "0x1p3", "1e400"],
    "pair": ["", "1", "1|2|3", "|"],
    "click": ["", "0", "2|3", "nan", "x"],
    "at": ["", "1.0", "1|2", "-9"],
}


@pytest.mark.parametrize("column", CELLS)
def test_cells(column: str, tmp_path: Path) -> None:
    """Any cell has the same value, or the same error, by both ways."""
    path = tmp_path / "a.csv"
    for cell in CELLS[column]:
        line = [cell if name == column else good for name, good in zip(NAMES, GOOD, strict=True)]
        path.write_text("\n".join(",".join(each) for each in (NAMES, GOOD, line, GOOD)))
        assert found(TextFiles, path) == found(OneByOne, path), cell


@pytest.mark.parametrize(
    "ending",
    ["", "\n", "\r\n", "\n\n", "\n,\n", "\n1,2\n", "\n\r", "\n \n", "\n\ufeff" + ",".join(GOOD)],
)
def test_lines(ending: str, tmp_path: Path) -> None:
    """Likewise for the ends of lines and lines that lack cells."""
    path = tmp_path / "a.csv"
    lines = "\n".join(",".join(each) for each in (NAMES, GOOD, GOOD))
    path.write_text(lines + ending, newline="")
    assert found(TextFiles, path) == found(OneByOne, path)


def test_arrow_takes_good_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Good lines with empty cells and lists are not parsed one by one."""
    dice = np.random.default_rng(0)
    rows = [
        [good if dice.random() < 0.7 else "" for good in GOOD[:6]] + GOOD[6:] for _ in range(99)
    ]
    for row in rows:
        row[3] = row[3] if row[2] else ""
        row[2] = row[2] if row[3] else ""
    path = tmp_path / "a.csv"
    path.write_text("\n".join(",".join(each) for each in (NAMES, *rows)))
    expected = found(OneByOne, path)
    monkeypatch.setattr(TextFiles, "_one_by_one", None)
    assert found(TextFiles, path) == expected


def test_a_column_of_numbers_and_of_words(tmp_path: Path) -> None:
    """Both ways refuse it with the same words, which Arrow would read as one of the two."""
    path = tmp_path / "a.csv"
    path.write_text("age,click\n1.5,1\n")
    features = FeatureSet([Number("age"), Feature("bucket", TABLE, hashed=True, column="age")])
    messages = []
    for kind in (TextFiles, OneByOne):
        with pytest.raises(UsageError) as error:
            kind(path, features, ["click"]).group(0)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


LIBSVM = ["1 3:0.5 7:2", "-1", "+1 9:1e-3", "0.5 1:2  2:-1\t3:.5 "]
PAIRS = [
    *("+1 3:1", "++1 3:1", "+.5 3:1", " 1 3:1", "x 3:1", "nan 3:1", "1 3", "1 3:", "1 :3"),
    *("1 3:4:5", "1 3|4:1", "1 3:1|2", "1 +3:1", "1 -3:+1", "1 3.0:1", "1 x:1", "1 3:x"),
    *("1 3:nan", "1 3:1e39"),
    *("1 0x1F:1", "1 3:0x1p3", "1 1_0:1_0", f"1 {2**63}:1", "1 ٣:1", "1 é:1", "1 3:1\x1c4:1"),
    *("1 3:1 # 4:1", "1 3:1\r", "1 3:1\v4:1", "1 3:1\u00a04:1", "1 3:1\r2 4:1", "3:1", "1 3 :1"),
]


@pytest.mark.parametrize("hashed", [False, True])
def test_lines_of_libsvm(hashed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any line has the same sample, or the same error, by both ways; good ones are parsed by Arrow."""
    path = tmp_path / "a.libsvm"
    pairs = Feature(
        "x", TABLE, weighted=True, hashed=hashed, column="index", weights_column="value"
    )
    features = FeatureSet([pairs])

    def samples(kind: type[TextFiles], lines: list[str]) -> Any:
        path.write_text("\n".join(lines), newline="")
        try:
            rows = kind(path, features, ["label"]).group(0)
        except UsageError as error:
            return str(error)
        bags = rows.features["x"]
        parts = bags.values, bags.lengths, bags.weights, rows.labels["label"]
        return [part.tolist() for part in parts]

    for line in PAIRS:
        lines = [*LIBSVM, line, *LIBSVM]
        assert samples(TextFiles, lines) == samples(OneByOne, lines), line
    expected = samples(OneByOne, LIBSVM)
    monkeypatch.setattr(TextFiles, "_one_by_one", None)
    assert samples(TextFiles, LIBSVM) == expected
