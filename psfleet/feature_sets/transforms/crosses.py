"""Crosses of features: an id for each combination of their values."""

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from psfleet.feature_sets.jagged import Jagged
from psfleet.feature_sets.transforms.transform import MANY, Transform
from psfleet.feature_sets.value_hashes import hashed
from psfleet.kernels.bags import chosen_bags
from psfleet.kernels.hashing import GOLDEN, hash_ids


@dataclass
class Cross(Transform):
    """An id for each combination of a value of each input, a hash: any int64.

        Feature("age_in_city", crosses, inputs=["age", "city"], transform=Cross())
        Feature("pair", crosses, inputs=["a", "b"], transform=Cross(), hashed=True, buckets=10_000)

    A sample with 2 values of one input and 3 of the other has 6 ids. Their order counts: the values of the
    first input change last. Weights are multiplied.
    """

    arity = (2, MANY)

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        first, *others = inputs
        product = first.with_values(hashed(first.values))
        for other in others:
            product = _combined(product, other.with_values(hashed(other.values)))
        return product


def _combined(left: Jagged, right: Jagged) -> Jagged:
    counts = right.lengths[left.rows]
    starts = right.offsets[:-1][left.rows]
    ids = np.repeat(left.values.view(np.uint64), counts) * np.uint64(GOLDEN | 1)
    ids = ids + chosen_bags(right.values, starts, counts).view(np.uint64)
    bags = left.expanded(hash_ids(ids.view(np.int64)).view(np.int64), counts)
    if right.weights is None:
        return bags
    weights = chosen_bags(right.weights, starts, counts)
    if bags.weights is not None:
        weights = weights * bags.weights
    return Jagged(bags.values, bags.lengths, weights=weights)
