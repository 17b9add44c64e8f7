"""Feature work on real files: types, first passes, the same values in training, prediction and requests."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet as ps
from psfleet import fleet, layers, optimizer, serving
from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.data.batches import Batches
from psfleet.data.sample_batch import batch_of, sample_of
from psfleet.features import (
    Clip,
    Cross,
    Feature,
    FeatureLookup,
    FeatureSet,
    Input,
    Log1p,
    Lookup,
    NGrams,
    Normalize,
    Number,
    Overlap,
    Quantiles,
    Split,
    Table,
    Vocabulary,
    feed,
    load_features,
)
from psfleet.serving.batcher import samples_of

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

TABLE = Table("t", 2)


def looked_up(features: FeatureSet, batch: Any) -> dict[str, Any]:
    """The ids and numbers of a batch."""
    fed: dict[str, Any] = feed(features, batch)
    return fed


@pytest.mark.parametrize("hashed", [False, True])
def test_a_declared_type_decides(hashed: bool, tmp_path: Path) -> None:
    """Id 7 of a declared type has one id, from CSV text, Parquet of any type, messages and requests."""
    from psfleet.data.parquet import ParquetFiles
    from psfleet.data.text_files import TextFiles

    features = FeatureSet([Feature("user", TABLE, hashed=hashed, dtype="int")])
    (tmp_path / "a.csv").write_text("user,x\n7,\n007|8.0,\n,\n")
    columns = {
        "numbers": pa.array([[7], [7, 8], None], pa.list_(pa.int32())),
        "floats": pa.array([[7], [7, 8], [float("nan")]], pa.list_(pa.float64())),
        "texts": pa.array([["7"], ["007", "8.0"], []]),
    }
    sources: list[Any] = [TextFiles(tmp_path / "a.csv", features)]
    for name, column in columns.items():
        pq.write_table(pa.table({"user": column}), tmp_path / f"{name}.parquet")
        sources.append(ParquetFiles(tmp_path / f"{name}.parquet", features))
    batches = [next(iter(Batches(source, 3))).features for source in sources]
    messages = [{"user": 7}, {"user": ["007", 8.0]}, {}]
    batches.append(batch_of(features, [], [sample_of(features, [], m) for m in messages]).features)
    request = json.loads('{"user": [["7"], ["007", 8.0], [null]]}')
    batches.append(samples_of(features, request)[0])
    expected = looked_up(features, {"user": [[7], [7, 8], []]})
    assert expected["user.lengths"].tolist() == [1, 2, 0]
    for batch in batches:
        rows = looked_up(features, batch)
        for name, values in expected.items():
            np.testing.assert_array_equal(rows[name], values)


def test_bad_values_of_files(tmp_path: Path) -> None:
    """A value that is not of its type makes a bad row, which is skipped or named with its place."""
    from psfleet.data.parquet import ParquetFiles
    from psfleet.data.text_files import TextFiles

    features = FeatureSet([Feature("price", TABLE, transform=[Log1p(), Quantiles(2, [1.0])])])
    (tmp_path / "a.csv").write_text("price\n2\ncheap\n0\n")
    pq.write_table(pa.table({"price": ["2", "cheap", "0"]}), tmp_path / "a.parquet")
    for kind, file in ((TextFiles, "a.csv"), (ParquetFiles, "a.parquet")):
        with pytest.raises(UsageError, match=r"price is .*'cheap'.*correct it"):
            list(Batches(kind(tmp_path / file, features), 3))
        source = kind(tmp_path / file, features, bad_rows="skip")
        [batch] = Batches(source, 3)
        assert looked_up(features, batch.features)["price.ids"].tolist() == [1, 0]
        assert source.skipped == 1


def feature_set() -> FeatureSet:
    """A set with most transforms, not fitted."""
    return FeatureSet(
        [
            Feature("price", TABLE, transform=[Log1p(), Quantiles(3)]),
            Feature("city", TABLE, transform=Vocabulary(min_count=2)),
            Feature("pair", TABLE, inputs=["price", "city"], transform=Cross()),
            Feature("words", TABLE, hashed=True, pooling="mean", transform=[Split(), NGrams(1, 2)]),
            Number("age", column="years", transform=[Clip(0, 99), Normalize()]),
            Number("rank", column="city", transform=Lookup({"Oslo": 1, "Rome": 0.5}, default=-1)),
            Number("shared", inputs=["mine", "theirs"], transform=Overlap("ratio")),
            Input("mine", column="tags"),
            Input("theirs"),
        ]
    )


ROWS: list[dict[str, Any]] = [
    {"price": 3.5, "city": "Oslo", "words": "a red hat", "years": 30, "tags": ["x"], "theirs": []},
    {"price": 0.1, "city": "Rome", "words": "hat", "years": 120, "tags": [], "theirs": ["x"]},
    {"price": 20, "city": "Oslo", "words": "", "years": 7, "tags": ["x", "y"], "theirs": ["y"]},
    {"price": 7, "city": "Bonn", "words": "red", "years": 51, "tags": ["z"], "theirs": ["z"]},
]


def written(folder: Path) -> tuple[Path, Path]:
    """The rows as Parquet and as TSV, with an empty text as a missing one."""
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    lines = ["\t".join(ROWS[0])]
    for row in ROWS:
        cells = ["|".join(v) if isinstance(v, list) else str(v) for v in row.values()]
        lines.append("\t".join(cells))
    (folder / "rows.tsv").write_text("\n".join(lines) + "\n")
    return folder / "rows.parquet", folder / "rows.tsv"


def test_one_set_everywhere(tmp_path: Path) -> None:
    """A set fitted on files has the same values from each format, in the saved model and in JSON requests."""
    from psfleet.data.parquet import ParquetFiles
    from psfleet.data.text_files import TextFiles
    from psfleet_launch.prediction_job import PredictionJob

    parquet, tsv = written(tmp_path)
    features = feature_set()
    [batch] = Batches(ParquetFiles(parquet, features), 9)
    with pytest.raises(UsageError, match=r"feature 'price': Quantiles.*has seen no data; call fit"):
        looked_up(features, batch.features)
    features.fit(Batches(ParquetFiles(parquet, features), 2))
    expected = looked_up(features, batch.features)
    [other] = Batches(TextFiles(tsv, features), 9)
    fed = looked_up(features, other.features)
    for name, values in expected.items():
        np.testing.assert_array_equal(fed[name], values)

    ps.reset()
    fleet.init()
    values = layers.features(features)
    joined = layers.concat(list(values.values()), axis=1)
    chance = layers.sigmoid(layers.fc(joined, 1))
    fleet.distributed_optimizer(optimizer.SGD(0.5)).minimize(layers.mean(chance))
    (_,) = ps.Executor().run(feed=expected, fetch_list=[chance])
    model = tmp_path / "model"
    fleet.save_inference_model(str(model), list(expected), [chance], features=features)
    ps.reset()

    predict = serving.load(model)
    assert predict.features is not None
    names = {"age": "years", "rank": "city", "mine": "tags"}
    request = {
        name: [row[names.get(name, name)] for row in ROWS] for name in predict.features.given
    }
    request, samples = samples_of(predict.features, json.loads(json.dumps(request)))
    assert samples == len(ROWS)
    predictions = predict(request)
    np.testing.assert_array_equal(predictions, predict(batch.features))
    assert len(np.unique(predictions)) > 1
    # A set of a module, whose transforms are not fitted, takes the statistics of the model's folder.
    np.testing.assert_array_equal(serving.load(model, feature_set())(request), predictions)
    for file in (parquet, tsv):
        target = tmp_path / f"{file.suffix[1:]} predictions"
        PredictionJob(str(model), [str(file)], str(target), "", "", [], "fail", 8, 100).run()
        column = pq.read_table(target).column(0).to_numpy()
        np.testing.assert_allclose(column, predictions[:, 0], rtol=1e-6)


def test_saved_sets(tmp_path: Path) -> None:
    """JSON has a set with the statistics of its transforms, to the bit; another set cannot take them."""
    features = feature_set().fit(
        [{"price": [0.1, 2, 3], "city": ["a", "a", "b"], "age": [1, 2, 4]}]
    )
    path = tmp_path / "features.json"
    features.save(path)
    loaded = load_features(path)
    assert {each.name: each for each in loaded.members} == {
        each.name: each for each in features.members
    }
    assert list(loaded.features) == list(features.features)
    assert feature_set().load_statistics(path).members == features.members
    other = FeatureSet([Feature("price", TABLE, transform=[Log1p(), Quantiles(5)])])
    with pytest.raises(ConfigError, match=r"'price' has count 3, and the set has 5; fit it again"):
        other.load_statistics(path)
    own = FeatureSet([Number("age", transform=[Normalize(), lambda age: age.values * 2])])
    own.fit([{"age": [1, 3]}]).save(path)
    with pytest.raises(ConfigError, match=r"feature 'age' has the function .*no file holds"):
        load_features(path)
    again = FeatureSet([Number("age", transform=[Normalize(), lambda age: age.values * 2])])
    again.load_statistics(path)
    lookup: FeatureLookup[str] = FeatureLookup(again, {"age": [3]}, {})
    assert lookup.values({})["age"].tolist() == [[2.0]]


def test_a_pass_that_failed_is_forgotten() -> None:
    """A first pass that ended at a bad value leaves nothing behind: the next one counts its data alone."""
    transforms = Normalize(), Quantiles(2), Vocabulary()
    features = FeatureSet(
        [Feature(f"f{place}", TABLE, transform=each) for place, each in enumerate(transforms)]
    )
    good = {"f0": [1, 3], "f1": [1, 3], "f2": ["a", "b"]}
    with pytest.raises(UsageError, match="'cheap'"):
        features.fit([{"f0": [50], "f1": [50], "f2": ["c"]}, {"f0": ["cheap"]}])
    features.fit([good])
    assert [transforms[0].mean, transforms[1].boundaries, transforms[2].values] == [
        2,
        [2],
        ["a", "b"],
    ]


def test_a_pass_for_each_fitted_transform() -> None:
    """A transform behind one that is fitted needs another pass, which an iterator at its end cannot give."""
    batches = [{"price": [1.0, 2, 3, 4]}, {"price": [100.0, 200]}]
    two = [Normalize(), Quantiles(2)]
    features = FeatureSet([Feature("price", TABLE, transform=two)])
    with pytest.raises(UsageError, match=r"ended after pass 1.*Quantiles.*'price'.*begin again"):
        features.fit(iter(batches))
    features.fit(batches)
    ids = looked_up(features, {"price": [1.0, 2, 3, 4, 100, 200]})["price.ids"]
    assert ids.tolist() == [0, 0, 0, 1, 1, 1]
