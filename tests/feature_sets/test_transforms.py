"""Transforms of features, row for row beside scikit-learn's where it has one, else beside plain Python."""

import inspect
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet.core.base.errors import IdError
from psfleet.data.feature_sets.applying_transforms import transformed
from psfleet.data.feature_sets.feature_values import by_feature
from psfleet.data.feature_sets.transforms.number_transforms import QuantileSketch
from psfleet.features import (
    Bucketize,
    Clip,
    Cross,
    Feature,
    FeatureLookup,
    FeatureSet,
    FillMissing,
    Input,
    Jagged,
    Log1p,
    Lookup,
    Lowercase,
    MapLookup,
    Match,
    MinMax,
    NGrams,
    Normalize,
    Number,
    Overlap,
    Pad,
    Quantiles,
    Split,
    Table,
    Truncate,
    Vocabulary,
    WeightedValues,
    hashed,
)

TABLE = Table("t", 2)
PRICES = np.random.default_rng(7).lognormal(2, 1.5, 5000).astype(np.float32)


def values_of(feature: Any, *inputs: Any, **batch: Any) -> Jagged:
    """The values of one feature behind its transforms."""
    features = FeatureSet([*inputs, feature])
    given, samples = by_feature(features, batch)
    bag = transformed(features, given, samples)[feature.name]
    assert isinstance(bag, Jagged)
    return bag


def rows(bag: Jagged) -> list[list[Any]]:
    """The values by sample."""
    parts: list[list[Any]] = [part.tolist() for part in np.split(bag.values, bag.offsets[1:-1])]
    return parts


def fitted(transform: Any, values: Any, **options: Any) -> Jagged:
    """The values of a feature whose transforms have been fitted to them in batches of 700."""
    feature = Feature("f", TABLE, transform=transform, **options)
    features = FeatureSet([feature])
    features.fit([{"f": values[start : start + 700]} for start in range(0, len(values), 700)])
    return values_of(feature, f=values)


def test_quantiles_are_those_of_scikit_learn() -> None:
    """Rows get the buckets of KBinsDiscretizer with quantiles, also where quantiles are equal."""
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    counts = np.random.default_rng(3).poisson(1.5, 5000).astype(np.float32)
    for values in (PRICES, counts):
        options: dict[str, Any] = {"subsample": None, "encode": "ordinal", "strategy": "quantile"}
        if "quantile_method" in inspect.signature(preprocessing.KBinsDiscretizer).parameters:
            options["quantile_method"] = "linear"
        theirs = preprocessing.KBinsDiscretizer(10, **options)
        column = values.astype(np.float64)[:, None]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of equal quantiles
            expected = theirs.fit_transform(column)[:, 0]
        np.testing.assert_array_equal(fitted(Quantiles(10), values).values, expected)


def test_scales_are_those_of_scikit_learn() -> None:
    """Normalize and MinMax give StandardScaler's and MinMaxScaler's values, fitted batch by batch."""
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    column = PRICES.astype(np.float64)[:, None]
    for own, theirs in (
        (Normalize(), preprocessing.StandardScaler()),
        (MinMax(), preprocessing.MinMaxScaler()),
    ):
        expected = theirs.fit_transform(column)[:, 0]
        np.testing.assert_allclose(fitted(own, PRICES).values, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(fitted(Normalize(), np.array([3.0, 3.0])).values, [0, 0])


def test_vocabularies_are_those_of_scikit_learn() -> None:
    """A vocabulary of OrdinalEncoder's categories gives its numbers, and -1 for what is out of vocabulary."""
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    cities = np.random.default_rng(1).choice(["Oslo", "Rome", "Bonn", "Lima"], 500).astype(object)
    theirs = preprocessing.OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    theirs.fit(cities[:, None])
    seen = np.append(cities, "Paris")
    own = values_of(
        Feature("f", TABLE, transform=Vocabulary(theirs.categories_[0].tolist())), f=seen
    )
    np.testing.assert_array_equal(own.values - 1, theirs.transform(seen[:, None])[:, 0])


@pytest.mark.parametrize(
    ("analyzer", "split", "separator"), [("word", Split(), " "), ("char", Split(""), "")]
)
def test_n_grams_are_those_of_scikit_learn(analyzer: str, split: Split, separator: str) -> None:
    """Each text has CountVectorizer's n-grams, as often."""
    text = pytest.importorskip("sklearn.feature_extraction.text")
    texts = ["Red summer hat", "", "a a a", "hat", "shoes of a red red hat"]
    theirs = text.CountVectorizer(ngram_range=(1, 3), analyzer=analyzer, token_pattern=r"\S+")
    analyze = theirs.build_analyzer()
    transform = [Lowercase(), split, NGrams(1, 3, separator)]
    own = values_of(Feature("f", TABLE, hashed=True, transform=transform), f=texts)
    assert [Counter(row) for row in rows(own)] == [Counter(analyze(each)) for each in texts]


def test_quantiles_of_many_values_are_within_the_stated_error() -> None:
    """Ranks differ by less than log2(n / 32768) / 65536 of the values, whatever their order."""
    count = 1 << 19
    sequences: list[NDArray[np.float64]] = [
        np.random.default_rng(5).permutation(count).astype(np.float64),
        np.arange(count, dtype=np.float64),
    ]
    shares = np.arange(1, 100) / 100
    for values in sequences:
        sketch = QuantileSketch()
        for start in range(0, count, 10_007):
            sketch.add(values[start : start + 10_007])
        error = np.abs(sketch.quantiles(shares) / (count - 1) - shares).max()
        assert error <= np.log2(count / 32768) / 65536


def test_numbers() -> None:
    """Log1p, Clip and boundaries are NumPy's; a boundary belongs to the bucket above it."""
    chain = [Clip(0, 100), Log1p()]
    own = values_of(Number("f", transform=chain), f=[-1.0, 3.0, 500.0, None])
    np.testing.assert_array_equal(own.values, np.log1p([0, 3, 100]))
    for transform in (Bucketize([0.1, 0.7, 5]), Quantiles(4, [0.1, 0.7, 5])):
        buckets = Feature("f", TABLE, transform=transform)
        assert rows(values_of(buckets, f=[0.7, 0.1, 0.05, "5", 9, float("nan")])) == [
            *[[2], [1], [0], [3], [3]],
            [],
        ]


def test_counted_vocabularies() -> None:
    """A first pass counts exactly: by count, then by text; rare values are out of vocabulary."""
    values = ["b", "a", "c", "a", "b", "d", "e", "e", "e"]
    vocabulary = Vocabulary(min_count=2, max_size=2)
    assert rows(fitted(vocabulary, values)) == [[0], [2], [0], [2], [0], [0], [1], [1], [1]]
    assert vocabulary.values == ["e", "a"]
    assert vocabulary.size == 3
    numbers = Vocabulary(oov=0)
    assert rows(fitted(numbers, [7, 7, 5], dtype="int")) == [[0], [0], [1]]
    unknown = values_of(Feature("f", TABLE, dtype="int", transform=numbers), f=[5, 6])
    assert rows(unknown) == [[1], []]
    several = Feature("f", TABLE, transform=Vocabulary(["x"], oov=4))
    assert values_of(several, f=["y", "z", "x"]).values.tolist() == [*hashed(["y", "z"], 4), 4]


def test_crosses() -> None:
    """Each combination of values has an id of its own, whatever type a value comes in; weights multiply."""
    inputs = [Input("a", "int"), Input("b")]
    cross = Feature("x", TABLE, inputs=["a", "b"], transform=Cross())
    actual = values_of(cross, *inputs, a=[[1, 2], [2], []], b=[["u", "v"], ["u"], ["u"]])
    one, two, three, four, again = actual.values.tolist()
    assert actual.lengths.tolist() == [4, 1, 0]
    assert again == three
    assert len({one, two, three, four}) == 4
    assert values_of(cross, *inputs, a=["2"], b=["u"]).values.tolist() == [again]
    bag = Jagged([1, 2], [2], weights=[0.5, 3.0])
    weights = values_of(cross, *inputs, a=bag, b=Jagged(["u"], [1], weights=[2.0])).weights
    assert weights is not None
    assert weights.tolist() == [1, 6]


def test_a_cross_of_buckets() -> None:
    """A feature with inputs has their values behind their transforms, here the numbers of buckets."""
    price = Feature("price", TABLE, transform=Bucketize([10]))
    cross = Feature("x", TABLE, inputs=["price", "city"], transform=Cross())
    bag = values_of(cross, price, Input("city"), price=[1.0, 9.0, 10.0], city=["u"] * 3)
    assert bag.values[0] == bag.values[1] != bag.values[2]


def test_maps() -> None:
    """A map gives its values or the default; a sample's own map is looked up by the keys of that sample."""
    price = Number("f", transform=Lookup({"hat": 9.5, 7: 60}, default=-1))
    assert rows(values_of(price, f=["hat", 7, "x"])) == [[9.5], [60], [-1]]
    country = Feature("f", TABLE, hashed=True, transform=Lookup({"Rome": "it"}, default="?"))
    assert rows(values_of(country, f=["Rome", "x"])) == [["it"], ["?"]]
    clicks = Number("f", inputs=["clicks", "key"], transform=MapLookup(default=0))
    given = {"clicks": [["a:3", "b:1.5"], ["b:2"], []], "key": ["a", "b", "a"]}
    assert rows(values_of(clicks, Input("clicks"), Input("key"), **given)) == [[3], [2], [0]]


def test_lists() -> None:
    """Match keeps values that both lists of a sample have, Overlap counts them."""
    inputs = [Input("a"), Input("b")]
    given = {"a": [["u", "v", "w"], ["u"], []], "b": [["w", "u"], ["v"], ["u"]]}
    match = Feature("f", TABLE, hashed=True, inputs=["a", "b"], transform=Match())
    assert rows(values_of(match, *inputs, **given)) == [["u", "w"], [], []]
    count = Number("f", inputs=["a", "b"], transform=Overlap())
    assert rows(values_of(count, *inputs, **given)) == [[2], [0], [0]]
    ratio = Number("f", inputs=["a", "b"], transform=Overlap("ratio"))
    np.testing.assert_allclose(values_of(ratio, *inputs, **given).values, [2 / 3, 0, 0])


def test_sequences() -> None:
    """Sequences get a maximum length from either end, and padding on either side, with weight 0."""
    given = [[1, 2, 3, 4], [], [5, 6]]

    def cut(transform: Any) -> Jagged:
        return values_of(Feature("f", TABLE, transform=transform, dtype="int"), f=given)

    assert rows(cut(Truncate(3))) == [[2, 3, 4], [], [5, 6]]
    assert rows(cut(Truncate(3, "first"))) == [[1, 2, 3], [], [5, 6]]
    assert rows(cut(Pad(3))) == [[2, 3, 4], [0, 0, 0], [5, 6, 0]]
    before = Pad(3, value=-1, side="before", keep="first")
    assert rows(cut(before)) == [[1, 2, 3], [-1, -1, -1], [-1, 5, 6]]
    assert rows(cut(FillMissing(9))) == [[1, 2, 3, 4], [9], [5, 6]]
    bag = Jagged([1], [1], weights=[0.5])
    padded = values_of(Feature("f", TABLE, transform=Pad(2), dtype="int"), f=bag)
    assert padded.weights is not None
    assert padded.weights.tolist() == [0.5, 0]


def test_weights() -> None:
    """Weights come in the text of each value, or as a list of their own."""
    text = Feature("f", TABLE, hashed=True, weighted=True, transform=WeightedValues())
    bag = values_of(text, f=[["war:0.5", "a:b:2"], []])
    assert rows(bag) == [["war", "a:b"], []]
    assert bag.weights is not None
    assert bag.weights.tolist() == [0.5, 2]
    inputs = [Input("ids", "int"), Input("scores", "float")]
    both = Feature("f", TABLE, weighted=True, inputs=["ids", "scores"], transform=WeightedValues())
    bag = values_of(both, *inputs, ids=[[1, 2], [3]], scores=[[0.5, 1], [2]])
    assert rows(bag) == [[1, 2], [3]]
    assert bag.weights is not None
    assert bag.weights.tolist() == [0.5, 1, 2]


def test_infinite_numbers_are_refused_behind_transforms_too() -> None:
    """A transform that overflows, in its own dtype or as float32, is refused with its value and sample."""
    for factor, product in ((1e300, "5e+299"), (np.inf, "inf")):
        number = Number("f", transform=lambda f, factor=factor: f.values.astype(float) * factor)
        with pytest.raises(IdError) as refused:
            FeatureLookup(FeatureSet([number]), {"f": [[], [0.5], [1.0]]}, {}).values({})
        assert f"'f' has the value {product}, which is no finite number" in str(refused.value)
        assert "sample 1" in str(refused.value)


def test_functions() -> None:
    """A user's function takes the values of each input, and gives as many or other bags."""
    root = Number("f", transform=lambda given: np.sqrt(given.values))
    assert rows(values_of(root, f=[4, 9.0])) == [[2], [3]]
    gaps = Number("f", default=7, transform=lambda f: np.where(f.values > 5, np.nan, f.values))
    assert FeatureLookup(FeatureSet([gaps]), {"f": [4, 9.0]}, {}).values({})["f"].tolist() == [
        [4],
        [7],
    ]
    total = Number(
        "f", inputs=["a", "b"], transform=lambda a, b: Jagged(a.lengths + b.lengths, [1] * len(a))
    )
    given = {"a": [["u"], []], "b": [["v", "w"], []]}
    assert rows(values_of(total, Input("a"), Input("b"), **given)) == [[3], [0]]
