"""Look-ups of a feature set: bags of every form, their pooling, and gradients of their rows."""

from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet import initializer
from psfleet.core.base.errors import IdError
from psfleet.features import Feature, FeatureLookup, FeatureSet, Jagged, Number, Table, hashed
from psfleet.optimizer import SGD

ROWS = np.arange(1, 41, dtype=np.float32).reshape(20, 2)  # row i is [2i + 1, 2i + 2]


def looked_up(batch: Any, **options: Any) -> Any:
    """The value of one feature of a table whose rows are ROWS."""
    features = FeatureSet([Feature("f", Table("t", 2), **options), Number("n")])
    lookup = FeatureLookup(features, {"f": batch, "n": None}, {"t": "t"})
    return lookup.pool({"t": ROWS[lookup.ids["t"]]})["f"]


BAGS = Jagged([3, 1, 3, 7, 5], lengths=[2, 0, 3])


def test_sum() -> None:
    """A bag's value is the sum of its rows; an empty bag gives zeros."""
    expected = [ROWS[3] + ROWS[1], [0, 0], ROWS[3] + ROWS[7] + ROWS[5]]
    np.testing.assert_array_equal(looked_up(BAGS), expected)


def test_mean() -> None:
    """The mean is over the ids of the bag; an empty bag gives zeros."""
    expected = [(ROWS[3] + ROWS[1]) / 2, [0, 0], (ROWS[3] + ROWS[7] + ROWS[5]) / 3]
    np.testing.assert_allclose(looked_up(BAGS, pooling="mean"), expected, rtol=1e-6)


def test_weights() -> None:
    """Weights multiply rows, and the mean is divided by their sum; a sum of 0 gives zeros."""
    weighted = Jagged([3, 1, 7, 5], offsets=[0, 2, 4], weights=[0.5, 2.0, 1.0, -1.0])
    first = 0.5 * ROWS[3] + 2 * ROWS[1]
    actual = looked_up(weighted, weighted=True)
    np.testing.assert_allclose(actual, [first, ROWS[7] - ROWS[5]], rtol=1e-6)
    actual = looked_up(weighted, weighted=True, pooling="mean")
    np.testing.assert_allclose(actual, [first / 2.5, [0, 0]], rtol=1e-6)


def test_no_pooling() -> None:
    """Rows come as they are, or padded to the last so many."""
    np.testing.assert_array_equal(looked_up(BAGS, pooling="none"), ROWS[[3, 1, 3, 7, 5]])
    actual = looked_up(BAGS, pooling="none", last=2)
    np.testing.assert_array_equal(actual, [ROWS[[3, 1]], np.zeros((2, 2)), ROWS[[7, 5]]])


def test_last() -> None:
    """Only the last ids of a sample count."""
    np.testing.assert_array_equal(looked_up(BAGS, last=1), [ROWS[1], [0, 0], ROWS[5]])


class JaggedTensor:
    """What a JaggedTensor of TorchRec answers."""

    def values(self) -> Any:
        return np.array([3, 1, 3, 7, 5])

    def lengths(self) -> Any:
        return np.array([2, 0, 3], np.int32)

    def weights_or_none(self) -> None:
        return None


@pytest.mark.parametrize(
    "batch",
    [
        {"values": [3, 1, 3, 7, 5], "lengths": [2, 0, 3]},
        {"values": np.array([3, 1, 3, 7, 5], np.uint32), "offsets": [0, 2, 2, 5]},
        [[3, 1], [], [3, 7, 5]],
        JaggedTensor(),
        np.array([[3, 1, -1], [-1, -1, -1], [3, 7, 5]]),
    ],
    ids=["lengths", "offsets", "lists", "JaggedTensor", "padded"],
)
def test_forms(batch: Any) -> None:
    """All forms of the same bags give the same bits."""
    np.testing.assert_array_equal(looked_up(batch, padding=-1), looked_up(BAGS))


def test_single_ids() -> None:
    """One id for each sample: the row itself."""
    np.testing.assert_array_equal(looked_up([4, 2, 4]), ROWS[[4, 2, 4]])


class Keyed:
    """What a KeyedJaggedTensor of TorchRec answers."""

    def to_dict(self) -> Any:
        return {"f": JaggedTensor()}


def test_missing_features() -> None:
    """A feature that the batch lacks has empty bags; a Number has its default, as for NaN."""
    table = Table("t", 2)
    features = FeatureSet([Feature("f", table), Feature("g", table), Number("n", 2, default=9.0)])
    for batch in ({"f": JaggedTensor(), "g": None}, Keyed()):
        lookup = FeatureLookup(features, batch, {"t": "t"})
        values = lookup.pool({"t": ROWS[lookup.ids["t"]]})
        assert list(values) == ["f", "g", "n"]
        np.testing.assert_array_equal(values["g"], np.zeros((3, 2)))
        np.testing.assert_array_equal(values["n"], np.full((3, 2), 9))
    numbers = {"n": [[1, np.nan]], "f": [[1]]}
    values = FeatureLookup(features, numbers, {"t": "t"}).pool({"t": ROWS})
    np.testing.assert_array_equal(values["n"], [[1, 9]])


def test_gradients() -> None:
    """Gradients of the values give those of the rows, ids of a shared table in the order of the set."""
    table = Table("t", 2)
    bags = Jagged([3, 1, 3], lengths=[2, 1], weights=[2.0, 3.0, 4.0])
    features = FeatureSet(
        [Feature("f", table, pooling="mean"), Feature("g", table, weighted=True), Number("n")]
    )
    lookup = FeatureLookup(features, {"f": [[3, 1], [3]], "g": bags, "n": [1, 2]}, {"t": "t"})
    one, two = np.array([[1, 2], [3, 4]]), np.array([[5, 6], [7, 8]])
    ids, rows = lookup.gradients({"g": two, "f": one, "n": one})["t"]
    np.testing.assert_array_equal(ids, [3, 1, 3, 3, 1, 3])
    expected = [one[0] / 2, one[0] / 2, one[1], 2 * two[0], 3 * two[0], 4 * two[1]]
    np.testing.assert_array_equal(rows, np.array(expected, np.float32))
    assert lookup.gradients({}) == {}


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
@pytest.mark.parametrize("last", [0, 2])
def test_gradients_are_those_of_the_values(pooling: str, last: int) -> None:
    """The value is linear in the rows, and the gradients are its transpose."""
    dice = np.random.default_rng(5)
    lengths = dice.integers(0, 5, 40)
    bags = Jagged(
        dice.integers(0, 20, lengths.sum()),
        lengths,
        weights=dice.uniform(0.5, 2, lengths.sum()).astype(np.float32),
    )
    options: Any = {"pooling": pooling, "last": last, "weighted": True}
    features = FeatureSet([Feature("f", Table("t", 2), **options)])
    lookup = FeatureLookup(features, {"f": bags}, {"t": "t"})
    rows = dice.normal(size=(len(lookup.ids["t"]), 2)).astype(np.float32)
    value = lookup.pool({"t": rows})["f"]
    gradient = dice.normal(size=value.shape).astype(np.float32)
    _, spread = lookup.gradients({"f": gradient})["t"]
    assert np.vdot(value, gradient) == pytest.approx(np.vdot(rows, spread), rel=1e-4, abs=1e-4)


def test_hashes() -> None:
    """Hashes are the same everywhere, differ by salt, and stay within buckets."""
    ids = hashed(np.array(["red", "green", "red"]))
    assert ids.tolist() == [989084479453130112, 5745113380770981747, 989084479453130112]
    assert hashed(np.array([b"red"], object))[0] == ids[0] == hashed(np.array(["red"], object))[0]
    assert hashed(np.array(["red"]), salt="b")[0] != ids[0]
    numbers = np.arange(-500, 500)
    assert len(set(hashed(numbers).tolist())) == 1000
    assert not set(hashed(numbers, salt="a").tolist()) & set(hashed(numbers).tolist())
    assert set(hashed(numbers, buckets=7).tolist()) == set(range(7))
    with pytest.raises(IdError, match=r"1\.5 cannot be hashed"):
        hashed(np.array([1.5], object))


def test_numbers_as_texts() -> None:
    """A whole number has one hash, whether it comes as a number, as its text or between texts."""
    numbers = [15, 0, -7, 2**63 - 1, -(2**63)]
    expected = hashed(np.array(numbers)).tolist()
    texts = [str(number) for number in numbers]
    for given in (np.array(texts), np.array(texts, object), np.array(texts, "S")):
        assert hashed(given).tolist() == expected
    assert hashed(np.array(numbers, object), salt="a")[0] == hashed(np.array([15]), salt="a")[0]
    mixed = hashed(np.array([15, "red", "15"], object))
    assert mixed.tolist() == [expected[0], hashed(np.array(["red"]))[0], expected[0]]
    large = 2**64 - 1
    assert hashed(np.array([large], np.uint64)) == hashed(np.array([str(large)]))
    others = ["015", "+15", " 15", "15.0", "1_5", "-0", str(2**64), "\u0661\u0665"]
    assert not set(hashed(np.array(others)).tolist()) & {*expected}
    assert len(set(hashed(np.array(others)).tolist())) == len(others)


@pytest.mark.parametrize("padding", [0, "0"])
@pytest.mark.parametrize(
    "values", [np.array([3, 0]), np.array(["3", "0"]), np.array(["3", 0], object)]
)
def test_padding_as_number_or_text(padding: Any, values: Any) -> None:
    """Padding counts for nothing, whichever of the two it and the values are."""
    features = FeatureSet([Feature("f", Table("t", 2), hashed=True, padding=padding)])
    lookup = FeatureLookup(features, {"f": values[None]}, {"t": "t"})
    assert lookup.ids["t"].tolist() == hashed(np.array([3])).tolist()


def test_texts() -> None:
    """A hashed feature takes texts, and padding may be one."""
    features = FeatureSet([Feature("f", Table("t", 2), hashed=True, padding="")])
    lookup = FeatureLookup(features, {"f": [["red", ""], [], ["green"]]}, {"t": "t"})
    assert lookup.ids["t"].tolist() == hashed(np.array(["red", "green"])).tolist()
    assert lookup.lengths["f"].tolist() == [1, 0, 1]


def feature_set() -> FeatureSet:
    """Two features of one table, and a number."""
    table = Table("t", 2, SGD(1.0), initializer.Constant(0.5))
    return FeatureSet([Feature("f", table), Feature("g", table, pooling="mean"), Number("n")])


def test_client() -> None:
    """One pull and one push of a client update the rows of all features."""
    with psfleet.connect() as ps:
        features = ps.features(feature_set())
        batch = features.batch({"f": [3, 3], "g": [[3, 4], []]})
        values = batch.pool(ps.pull(batch.ids))
        np.testing.assert_array_equal(values["f"], np.full((2, 2), 0.5))
        np.testing.assert_array_equal(values["g"], [[0.5, 0.5], [0, 0]])
        one = np.ones((2, 2), np.float32)
        ps.push(batch.gradients({"f": one, "g": one}))
        rows = features.tables["t"].pull([3, 4])
        np.testing.assert_array_equal(rows, [[-2, -2], [0, 0]])


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int16, np.uint64, np.float32, object])
def test_choosing_samples(dtype: Any) -> None:
    """Samples of a bag are chosen by their places, in any order, twice, by a mask or as a slice."""
    values, lengths = np.arange(10).astype(dtype), [2, 0, 5, 3]
    bags = Jagged(values, lengths, weights=np.arange(10) / 2)
    lists = [[0, 1], [], [2, 3, 4, 5, 6], [7, 8, 9]]
    for rows in (np.array([3, 0, 1, 3]), np.array([False, True, True, False]), np.array([], int)):
        chosen = bags[rows]
        expected = [lists[row] for row in np.arange(4)[rows]]
        flat = [value for bag in expected for value in bag]
        assert chosen.values.dtype == dtype
        assert chosen.values.tolist() == flat
        assert chosen.lengths.tolist() == list(map(len, expected))
        assert chosen.weights is not None
        assert chosen.weights.tolist() == [value / 2 for value in flat]
    assert bags[1:3].values.tolist() == [2, 3, 4, 5, 6]
