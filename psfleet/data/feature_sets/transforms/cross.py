"""Cross: makes an id of each combination of values of several inputs, as a hash."""

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from psfleet.core.engine.kernels.bags import chosen_bags
from psfleet.core.engine.kernels.hashing import GOLDEN, hash_ids
from psfleet.data.feature_sets.jagged import Jagged
from psfleet.data.feature_sets.transforms.transform import MANY, Transform
from psfleet.data.feature_sets.value_types import hashed


@dataclass
class Cross(Transform):
    """Replaces the values of several inputs by a hash for each combination of them, which is any int64.

        Feature("age_in_city", crosses, inputs=["age", "city"], transform=Cross())
        Feature("pair", crosses, inputs=["a", "b"], transform=Cross(), hashed=True, buckets=10_000)

    A sample with 2 values of one input and 3 of the other gets 6 ids. The value of the first input changes
    most slowly from id to id. If values have weights, the weights of a combination are multiplied.
    """

    arity = (2, MANY)

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        first, *other_inputs = inputs
        product = first.with_values(hashed(first.values))
        for next_input in other_inputs:
            product = _combined(product, next_input.with_values(hashed(next_input.values)))
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
