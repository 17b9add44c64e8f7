"""What feature sets, their batches and their files refuse: the feature or table and the value are named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet.features
from psfleet.core.base.errors import ConfigError
from psfleet.core.graph.program.run import whole_numbers
from psfleet.features import Feature, FeatureLookup, FeatureSet, Number, Table, load_features
from tests.refusals import check_refusals

DEFINITIONS = """
Table("t", 0)  # ConfigError: ...table 't': dim is 0
Feature("f", Table("t", 1), pooling="max")  # ConfigError: ...feature 'f': pooling is 'max'
Feature("f", Table("t", 1), buckets=5)  # ConfigError: ...feature 'f' has buckets 5
FeatureSet([Number("f"), Number("f")])  # ConfigError: ...two features are named 'f'
FeatureSet([Feature("f", Table("t", 1)), Feature("g", Table("t", 2))])  # ConfigError: ...feature 'g' names another table 't'
FeatureSet(["f"])  # a feature is 'f'
look({"x": [1]})  # UsageError: ...the feature 'x'; the set has f, g, n
look({})  # UsageError: ...has no feature
look([1, 2])  # UsageError: ...[1, 2]; it must be a mapping
look({"f": [1], "g": [1, 2]})  # ShapeError: ...feature 'g' has 2 samples and feature 'f' has 1
look({"f": [0.5]})  # IdError: ...feature 'f'...0.5
look({"f": np.zeros((1, 1, 1), np.int64)})  # ShapeError: ...feature 'f': ...(1, 1, 1)
look({"f": {"values": [1], "lengths": [2]}})  # ShapeError: ...feature 'f': ... 1, ... sum to 2
look({"f": {"values": [1], "lengths": [2, -1]}})  # ShapeError: ...lengths is -1
look({"f": {"values": [1], "offsets": [1, 1]}})  # ShapeError: ...begin with [1]
look({"f": {"values": [1], "offsets": [0, 2, 1]}})  # ShapeError: ...offset 1 comes after 2
look({"f": {"values": [1]}})  # ShapeError: ...lengths or offsets
look({"f": {"ids": [1]}})  # ShapeError: ...the dict has 'ids'
look({"f": {"values": [1], "lengths": [0.5]}})  # ShapeError: ...lengths have the dtype float64
look({"f": [1], "n": [[1, 2]]})  # ShapeError: ...feature 'n' ...(1, 2)
look({"f": [1]}).gradients({"f": [1, 2]})  # ShapeError: ...feature 'f' has the shape (2,); it must be (1, 2)
look({"f": [1]}).gradients({"x": [1, 2]})  # UsageError: ...feature 'x'
"""
TRANSFORMS = """
Number("n", transform=5)  # ConfigError: feature 'n': transform has 5; it must be an object of psfleet.features
Number("n", transform=Log1p)  # ConfigError: feature 'n': transform has <class
Number("n", inputs=["a", "b"])  # ConfigError: feature 'n' has 2 inputs and no transform
Number("n", inputs=["a"], dtype="int")  # ConfigError: feature 'n' has inputs, so it has no dtype
Number("n", transform=Cross())  # ConfigError: feature 'n': Cross takes 2 to 1024 inputs, and has 1
FeatureSet([Number("n", inputs=["a"])])  # ConfigError: feature 'n' has the input 'a', which is not in the set
Bucketize([3, 1])  # ConfigError: Bucketize: the boundary 1...comes after 3...; sort them, each once
Bucketize([])  # ConfigError: Bucketize: boundaries are []; give at least one
Bucketize(["x"])  # Bucketize: boundaries is ['x']
Clip()  # ConfigError: Clip has neither low nor high
Clip(2, 1)  # ConfigError: Clip: low is 2...and high is 1...; exchange them
Vocabulary([])  # ConfigError: Vocabulary: the list of values is empty
Vocabulary(["a", "a"])  # ConfigError: Vocabulary: the value 'a' is there 2 times
Vocabulary(file="none.txt")  # ConfigError: the vocabulary 'none.txt' cannot be read: No such file
Lookup({})  # ConfigError: Lookup: the map is {}; give it at least one key
Lookup({"a": 1}, default="x")  # ConfigError: Lookup: the map has the value 'x'; ...all numbers or all texts
NGrams(3, 2)  # ConfigError: NGrams: least is 3 and most is 2; exchange them
values(Number("n", transform=Log1p()), n=["cheap"])  # IdError: feature 'n' has the value 'cheap', which is no finite number; correct it
values(Number("n", transform=Log1p()), n=[float("inf")])  # IdError: feature 'n' has the value inf, which is no finite number
values(Number("n", transform=Log1p()), n=[-2.0])  # UsageError: feature 'n': Log1p has the value -2.0
values(Number("n"), n=["cheap"])  # IdError: feature 'n' has the value 'cheap', which is no finite number; correct it in sample 0
values(Number("n", dtype="int"), n=[0.5])  # IdError: feature 'n' has the value 0.5, which is no whole number
values(Number("n", dtype="text"), n=[0.5])  # IdError: feature 'n' has the value 0.5, which is no text
values(Number("n", dtype="text"), n=["a"])  # ShapeError: feature 'n' has ['a'] after its transforms; they must make numbers
values(Number("n", transform=Split()), n=["a b"])  # ShapeError: feature 'n' has 2 values in a sample; it must have 1 or none, end its transforms with Pad(1)
values(Number("n", transform=Vocabulary()), n=["a"])  # UsageError: feature 'n': Vocabulary(values=None...has seen no data; call fit(batches)
values(Number("n", transform=Vocabulary([1, 2]), dtype="float"), n=[1.0])  # UsageError: feature 'n': Vocabulary has the value 1.0, and takes texts or whole numbers
values(Number("n", dtype="text"), n=[1, 1.0])  # IdError: feature 'n' has the value 1.0, which is no text
values(Number("n", dtype="int"), n=["a", 1, True])  # IdError: feature 'n' has the value 'a'
values(Number("n", dtype="int"), n=np.array([1, True], object))  # IdError: feature 'n' has the value True, which is no whole number
values(Number("n", transform=Lookup({"a": 1})), n=["b"])  # UsageError: feature 'n': Lookup: the map of 1 keys lacks 'b'; add it, or give a default
values(Number("n", transform=FillMissing("x"), dtype="int"), n=[[], [1]])  # UsageError: feature 'n': FillMissing: the value is 'x' among numbers
values(Number("n", transform=lambda n: n.values[:0]), n=[1])  # UsageError: feature 'n': ...gave values of shape (0,) for 1 values
values(Number("n", inputs=["a"]), Input("a"), n=[1])  # UsageError: the batch has the feature 'n', which is made of a; leave it out
values(Number("n", inputs=["a", "b"], transform=MapLookup()), Input("a"), Input("b"), a=["x:1"], b=["y"])  # UsageError: feature 'n': MapLookup: the map of a sample lacks the key 'y'
values(Number("n", inputs=["a", "b"], transform=MapLookup()), Input("a"), Input("b"), a=["x"], b=["y"])  # UsageError: feature 'n': MapLookup has the text 'x', which has no ':'
values(Number("n", inputs=["a", "b"], transform=WeightedValues()), Input("a"), Input("b"), a=["x"], b=[[1, 2]])  # ShapeError: feature 'n': WeightedValues: sample 0 has 1 values and 2 weights
FeatureSet([Number("n", transform=Vocabulary(min_count=2))]).fit([{"n": ["a"]}])  # UsageError: feature 'n': Vocabulary: no value comes 2 times in 1 values; lower min_count
FeatureSet([Number("n", transform=Normalize())]).fit([])  # UsageError: the batches have no batch to fit Normalize
FeatureSet([Number("n", transform=Normalize())]).fit([{"n": [None]}])  # UsageError: feature 'n': Normalize has seen no value
FeatureSet([Number("n", transform=Normalize())]).save("/none/x")  # UsageError: feature 'n': Normalize...has seen no data
"""
BATCHES = """
look({"a": [1], "x": [2]})  # UsageError: the batch has 'a' under its name and under its column 'x'; leave one out
look({"b": [1]})  # UsageError: the batch has 'b', which is the name of one feature and the column of 'c'
look({"w.weights": [1.0]})  # UsageError: the batch has the weights 'w.weights' and no 'w'; give both
look({"w": [[1, 2]], "w.weights": [[1.0]]})  # ShapeError: feature 'w' has [2] values and [1] weights
look({"w": [1], "w.weights": [None]})  # ShapeError: feature 'w' has a weight that is missing
look({"w": [1], "w.weights": ["1_0"]})  # IdError: the weights of feature 'w' has the value '1_0'
look({"w": Jagged([1, 2], [1, 1], weights=[1.0, float("nan")])})  # UsageError: feature 'w' has the weight nan in sample 1
look({"w": Jagged([1], [1], weights=["1_0"])})  # ShapeError: the weights are ['1_0']; they must be numbers
look({"n": 3})  # ShapeError: feature 'n': the array is 3; it must be [n] or [n, k], values for each sample
look({"a": "red"})  # ShapeError: feature 'a': the array is 'red'; it must be [n]
look({"a": {7, 8}})  # ShapeError: feature 'a': the array is {
look({"a": np.array(["2026-01-01"], "datetime64[ns]")})  # IdError: feature 'a' has the value 17...which is no whole number
look({"a": [[1], [[2]]]})  # IdError: feature 'a' has the value [2], which is no whole number...correct it in sample 1
look({"a": [np.zeros((2, 2)), [1]]})  # ShapeError: feature 'a': a sample's values have the shape (2, 2)
look({"i": np.array([2.0**24], np.float32)})  # IdError: feature 'i' has the value 16777216.0, which is a float that may have been another whole number...one value is missing; keep ids
look({"i": [np.float32(2**24), 7]})  # IdError: feature 'i' has the value 16777216.0, which is a float that may
look({"i": [2.0**53]})  # IdError: feature 'i' has the value 9007199254740992.0, which is a float that may
look({"a": [2.0**53]})  # IdError: feature 'a' has the value 9007199254740992.0, which is a float that may
look({"n": np.array([1.0, np.inf])})  # IdError: feature 'n' has the value inf, which is no finite number; correct it in sample 1
look(pandas.DataFrame([[1, 2]], columns=["a", "a"]))  # UsageError: the batch has several columns 'a'
whole_numbers("feed 'ids'", np.array([2.0**53]))  # IdError: feed 'ids' must be whole numbers...float64 is exact below 9007199254740992
hashed("red")  # IdError: 'red' cannot be hashed to ids; give a list of values
hashed(["red", float("nan")])  # IdError: nan cannot be hashed to an id
hashed(["shoes \\ud83d"])  # IdError: 'shoes \\ud83d' cannot be hashed to an id
Vocabulary(["red", float("nan")])  # ConfigError: Vocabulary: the list of values has nan, which is neither a text nor
Lookup({None: 1})  # ConfigError: Lookup: the map has None, which is neither a text nor
"""

FILES = r"""
load("tables.t.dim = 0")  # table 't': dim is 0
load("tables.t.dims = 1")  # table 't' has the unknown key 'dims'; is 'dim' meant?
load("tables.t = 1")  # tables has t = 1
load("tables = 1")  # tables has tables = 1
load("columns.a = 1")  # [columns] is unknown
load("features.f.table = 't'")  # feature 'f': table is 't'; the file has none
load("features.f.dims = 1")  # feature 'f' has the unknown key 'dims'; is 'dim' meant?
load("features.f.tabel = 't'")  # feature 'f' has the unknown key 'tabel'; is 'table' meant?
load("features.f.xyz = 1")  # feature 'f' has the unknown key 'xyz'; it may have dim, default
load("[tables.t]\ndim = 1\noptimizer = 'SGD'")  # optimizer of table 't' is 'SGD'
load("[tables.t]\ndim = 1\noptimizer.kind = 'lr'")  # must have the `kind` of a class
load("[tables.t]\ndim = 1\noptimizer = {kind = 'SGD', learning_rate = -1}")  # SGD: learning_rate is -1
load("[tables.t]\ndim = 1\nentry = {kind = 'TTLEntry'}")  # a TTLEntry needs steps or seconds
load("features.f.transform = 1")  # feature 'f' has the transform 1; its `kind` must be one of Bucketize, Clip
load("features.f.transform = {kind = 'Clip', top = 1}")  # feature 'f', transform Clip: ...'top'
load("inputs.f.type = 'int'")  # input 'f' has the unknown key 'type'
load("= 1")  # is no TOML
"""


def test_sets_and_batches() -> None:
    """What no feature set can be, what is no batch of it, and gradients that do not fit."""
    table = Table("t", 2)
    features = FeatureSet([Feature("f", table), Feature("g", table, pooling="mean"), Number("n")])

    def look(batch: Any) -> Any:
        return FeatureLookup(features, batch, {"t": "t"})

    kinds = {kind.__name__: kind for kind in (Feature, FeatureSet, Number, Table)}
    check_refusals(DEFINITIONS, {**kinds, "look": look, "np": np})


def test_batches() -> None:
    """What is no batch, and values whose type has lost what they were, have a sentence each."""
    table = Table("t", 2)
    members = [Feature("a", table, column="x"), Feature("b", table, column="y")]
    members += [Feature("c", table, column="b"), Feature("w", table, weighted=True)]
    features = FeatureSet([*members, Feature("i", table, dtype="int"), Number("n")])

    def look(batch: Any) -> Any:
        return FeatureLookup(features, batch, {"t": "t"})

    names = {**vars(psfleet.features), "pandas": pytest.importorskip("pandas"), "np": np}
    check_refusals(BATCHES, {**names, "look": look, "whole_numbers": whole_numbers})


def test_transforms() -> None:
    """Transforms that cannot be, values that they cannot take, and data that cannot fit them."""

    def values(*features: Any, **batch: Any) -> Any:
        return FeatureLookup(FeatureSet(features), batch, {}).values({})

    check_refusals(TRANSFORMS, {**vars(psfleet.features), "values": values, "np": np})


def test_files(tmp_path: Path) -> None:
    """What a file cannot say is refused in one sentence that names the file."""
    path = tmp_path / "features.toml"

    def load(text: str) -> None:
        path.write_text(text)
        load_features(path)

    check_refusals(FILES.replace("  # ", "  # features.toml..."), {"load": load})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_features(tmp_path / "none.toml")
