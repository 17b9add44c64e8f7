"""Forms of batches: features by their columns, data frames, ragged lists, tensors and bytes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet.features import (
    Bucketize,
    Feature,
    FeatureSet,
    Input,
    Jagged,
    Number,
    Table,
    Vocabulary,
    feed,
    hashed,
    load_features,
)
from psfleet.serving.http_app import _plain

TABLE = Table("t", 2)


def ids_of(features: FeatureSet, batch: Any) -> dict[str, list[list[int]]]:
    """The ids of each sample, by feature."""
    fed = feed(features, batch)
    ids = {}
    for name in [each.name for each in features.looked_up]:
        ends = np.cumsum(fed[f"{name}.lengths"])[:-1]
        ids[name] = [part.tolist() for part in np.split(fed[f"{name}.ids"], ends)]
    return ids


def test_columns() -> None:
    """A batch names features as files do: a column has the values of all features that have it."""
    groups = Feature("age_group", TABLE, column="age", transform=Bucketize([18, 30]))
    own = Feature("shown", TABLE, column="impression", weighted=True)
    features = FeatureSet([Number("age"), groups, own, Input("clicks", "int")])
    fed = feed(
        features,
        {"age": [17, 40], "impression": [[3], [5, 6]], "impression.weights": [[1], [2, 3]]},
    )
    assert fed["age"].tolist() == [[17], [40]]
    assert fed["age_group.ids"].tolist() == [0, 2]
    assert fed["shown.ids"].tolist() == [3, 5, 6]
    assert fed["shown.weights"].tolist() == [1, 2, 3]
    by_name = feed(features, {"age": [17, 40], "age_group": [20, 20], "shown": [1, 2]})
    assert by_name["age_group.ids"].tolist() == [1, 1]
    assert by_name["shown.weights"].tolist() == [1, 1]
    missing = feed(features, {"age": [17, 40], "age_group": None})
    assert missing["age_group.lengths"].tolist() == [0, 0]


LARGE = 2**53 + 1


def test_forms() -> None:
    """Ragged arrays, tensors and columns of data frames have the ids that they show, null or masked none."""
    pd, pl, pa = map(pytest.importorskip, ("pandas", "polars", "pyarrow"))
    torch = pytest.importorskip("torch")
    features = FeatureSet([Feature("f", TABLE)])
    ragged = [[LARGE, 8], [], [9]]
    tensors = [torch.tensor(row, dtype=torch.int64) for row in ragged]
    for form in (
        [np.array(row, np.int64) for row in ragged],
        tensors,
        torch.nested.nested_tensor(tensors, layout=torch.jagged),
        [(LARGE, 8), None, 9],
        [np.array([LARGE, 8]), [], range(9, 10)],
        pd.Series(ragged),
        pl.Series(ragged),
        pa.array(ragged),
        pa.chunked_array([ragged[:1], ragged[1:]]),
    ):
        assert ids_of(features, {"f": form})["f"] == ragged
    for single in (
        np.ma.masked_array([LARGE, 8, 9], [False, True, False]),
        pd.Series([LARGE, None, 9], dtype="Int64"),
        pl.Series([LARGE, None, 9]),
        pa.array([LARGE, None, 9]),
        [np.int64(LARGE), None, np.int32(9)],
        [torch.tensor(LARGE), None, np.array(9)],
    ):
        assert ids_of(features, {"f": single})["f"] == [[LARGE], [], [9]]
    columns = {"f": [LARGE, 8], "n": [0.5, None]}
    both = FeatureSet([Feature("f", TABLE), Number("n", default=-1)])
    for frame in (pd.DataFrame(columns), pl.DataFrame(columns), pa.table(columns)):
        fed = feed(both, frame)
        assert (fed["f.ids"].tolist(), fed["n"].tolist()) == ([LARGE, 8], [[0.5], [-1]])
    numbers = FeatureSet([Number("n", 2, default=-1)])
    for batch in (
        [[1, 2], None],
        [[1, 2], []],
        [(1, 2), [None, "nan"]],
        [np.ones(2) * [1, 2], [None] * 2],
    ):
        assert feed(numbers, {"n": batch})["n"].tolist() == [[1, 2], [-1, -1]]


def test_vocabulary_files(tmp_path: Path) -> None:
    """A byte-order mark is no part of a file, and only a line end ends a value. Bytes are texts."""
    file = tmp_path / "cities.txt"
    file.write_bytes("\ufeffOslo\r\nBad\u2028Ems\n\nRome".encode())
    assert Vocabulary(file=file).values == ["Oslo", "Bad\u2028Ems", "Rome"]
    assert Vocabulary([b"Oslo", np.str_("Rome"), np.int64(7)]).values == ["Oslo", "Rome", 7]
    features = tmp_path / "features.toml"
    features.write_bytes("\ufefffeatures.age.default = 1.0".encode())
    assert load_features(features).features["age"] == Number("age", default=1.0)


def test_bytes_are_one_value() -> None:
    """A text of bytes is one value, whatever comes beside it."""
    features = FeatureSet([Feature("f", TABLE, hashed=True)])
    expected = hashed(["red", "hat"]).tolist()
    for batch in ([b"red", b"hat"], np.array([b"red", b"hat"]), [b"red", "hat"]):
        assert ids_of(features, {"f": batch})["f"] == [[expected[0]], [expected[1]]]
    assert ids_of(features, {"f": [[b"red", b"hat"]]})["f"] == [expected]
    assert ids_of(features, {"f": Jagged([b"red"], [1])})["f"] == [[expected[0]]]


def test_replies_are_json() -> None:
    """What JSON lacks is null in a reply."""
    assert _plain(np.array([[0.5], [np.nan], [np.inf]], np.float32)) == [0.5, None, None]
    assert _plain(np.array([[0.5, np.nan]], np.float32)) == [[0.5, None]]
