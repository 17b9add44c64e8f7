"""Transforms of lists: Match, Overlap, Truncate, Pad, FillMissing and WeightedValues.

They change the number of values of a sample. Each handles all samples of a batch at once with array
operations.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.core.base.validation.annotations import PositiveInt
from psfleet.core.engine.kernels.hashing import hash_ids
from psfleet.data.feature_sets.jagged import Jagged, joined
from psfleet.data.feature_sets.transforms.maps import Plain, parted
from psfleet.data.feature_sets.transforms.transform import Transform, numbers_of
from psfleet.data.feature_sets.value_types import Dtype, as_typed, hashed


def _common(left: Jagged, right: Jagged) -> NDArray[np.bool_]:
    """Return a mask of the left values that also occur in the right list of the same sample."""
    keys = [
        hash_ids(hashed(bags.values) ^ hash_ids(bags.rows).view(np.int64)) for bags in (left, right)
    ]
    return np.isin(keys[0], keys[1])


@dataclass
class Match(Transform):
    """Keeps the values of the first input that are also in the second input of the same sample.

        Feature("shared_tags", tags, hashed=True, inputs=["user_tags", "item_tags"], transform=Match())

    Values are compared by their 64-bit hashes.
    """

    arity = (2, 2)

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        return inputs[0].kept(_common(*inputs))


@dataclass
class Overlap(Transform):
    """Counts the values of the first input that are also in the second input of the same sample.

        Number("shared_tags", inputs=["user_tags", "item_tags"], transform=Overlap())
        Number("title_in_query", inputs=["title", "query"], transform=Overlap("ratio"))

    Attributes:
        measure: "count" for the number of values, or "ratio" for their share of the first input. The ratio
            is 0 if that input is empty.
    """

    arity = (2, 2)
    measure: Literal["count", "ratio"] = "count"

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        counts = inputs[0].kept(_common(*inputs)).lengths.astype(np.float64)
        if self.measure == "ratio":
            counts /= np.maximum(inputs[0].lengths, 1)
        return Jagged(counts, np.ones(len(counts), np.int64))


@dataclass
class Truncate(Transform):
    """Limits the number of values of each sample.

        Feature("seen", items, transform=Truncate(50))

    Attributes:
        length: Maximum number of values.
        keep: "last" or "first": the end of a longer sample that is kept.
    """

    length: PositiveInt
    keep: Literal["last", "first"] = "last"

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        if self.keep == "last":
            return inputs[0].last(self.length)
        return inputs[0].kept(inputs[0].ranks < self.length)


@dataclass
class Pad(Transform):
    """Gives every sample the same number of values. Longer samples are cut, and shorter samples are filled
    up.

        Number("last_prices", dim=5, transform=[Log1p(), Pad(5)])  # [1, 2] -> [1, 2, 0, 0, 0]

    Sequences of rows do not need it: `Feature(..., pooling="none", last=50)` fills up with rows of zeros.

    Attributes:
        length: Number of values that each sample gets.
        value: Value that fills shorter samples up. Its weight is 0.
        side: "after" or "before": the end of a shorter sample that is filled up.
        keep: "last" or "first": the end of a longer sample that is kept.
    """

    length: PositiveInt
    value: Plain = 0
    side: Literal["after", "before"] = "after"
    keep: Literal["last", "first"] = "last"

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        bags = Truncate(self.length, self.keep)(inputs[0])
        shift = (
            self.length - bags.lengths if self.side == "before" else np.zeros(len(bags), np.int64)
        )
        positions = bags.rows * self.length + shift[bags.rows] + bags.ranks
        size = len(bags) * self.length
        values = np.repeat(_like(self, bags.values), size)
        values[positions] = bags.values
        weights = None
        if bags.weights is not None:
            weights = np.zeros(size, np.float32)
            weights[positions] = bags.weights
        return Jagged(values, np.full(len(bags), self.length), weights=weights)


def _like(owner: Any, values: NDArray[Any]) -> NDArray[Any]:
    """Return the `value` of a transform as an array [1] of the same type as `values`.

    Raises:
        UsageError: The value is a text and `values` are numbers, or the reverse.
    """
    value = owner.value
    if not len(values):
        values = np.array([value], object if isinstance(value, str) else None)
    if isinstance(value, str) != (values.dtype.kind in "OU"):
        kinds = "numbers" if isinstance(value, str) else "texts"
        raise UsageError(
            f"{type(owner).__name__}: the value is {value!r} among {kinds}; give one of their type"
        )
    kind = values.dtype
    if kind.kind in "iu" and not float(value).is_integer():
        kind = np.dtype(np.float64)
    return np.array([value], object if kind.kind == "U" else kind)


@dataclass
class FillMissing(Transform):
    """Gives samples that have no values a default value.

        Feature("city", cities, hashed=True, transform=FillMissing("unknown"))

    Attributes:
        value: The default value. Its weight is 1.
    """

    value: Plain

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        [bags] = inputs
        empty = bags.lengths == 0
        if not empty.any():
            return bags
        fill = np.repeat(_like(self, bags.values), int(empty.sum()))
        fill_weights = None if bags.weights is None else np.ones(len(fill), np.float32)
        bags_and_fill = joined(
            [bags, Jagged(fill, np.ones(len(fill), np.int64), weights=fill_weights)]
        )
        rows = np.arange(len(bags))
        rows[empty] = len(bags) + np.arange(len(fill))
        return bags_and_fill[rows]


@dataclass
class WeightedValues(Transform):
    """Gives values their weights, which are in the same text or in a second input.

        Feature("genres", t, hashed=True, weighted=True, transform=WeightedValues())  # ["war:0.7"]
        Feature("liked", t, hashed=True, weighted=True, inputs=["ids", "scores"], transform=WeightedValues())

    With one input, each text has a value and its weight. With two inputs, the first has the values and the
    second the weights.

    Attributes:
        separator: Text between value and weight. Only for one input.
        dtype: Type of the values in the texts, only for one input: "text", or "int" for a feature that is
            not hashed.
    """

    arity = (1, 2)
    separator: str = ":"
    dtype: Dtype = "text"

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        if len(inputs) == 2:
            return _weighted(inputs[0], inputs[1], numbers_of(inputs[1], self))
        owner = "WeightedValues"
        texts = as_typed(owner, inputs[0], "text")
        names, weights = parted(owner, texts, self.separator)
        numbers = as_typed(owner, texts.with_values(weights), "float").values
        if len(numbers) < len(names):
            raise UsageError(f"{owner} has a weight that is NaN; give a number")
        values = as_typed(owner, texts.with_values(np.array(names, object)), self.dtype).values
        return Jagged(values, texts.lengths, weights=numbers)


def _weighted(bags: Jagged, second: Jagged, weights: NDArray[Any]) -> Jagged:
    differ = np.flatnonzero(bags.lengths != second.lengths)
    if len(differ):
        row = differ[0]
        raise ShapeError(
            f"WeightedValues: sample {row} has {bags.lengths[row]} values and {second.lengths[row]} weights; "
            "give each value a weight"
        )
    return Jagged(bags.values, bags.lengths, weights=weights)
