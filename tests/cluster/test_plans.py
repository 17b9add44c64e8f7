"""How a worker deals ids: each batch is looked through once."""

import numpy as np
import pytest

from psfleet_worker.sharding.pull_routing import RoutingPlans


@pytest.mark.parametrize("count", [5000, 300])
def test_equal_ids_are_dealt_once(count: int) -> None:
    """A push after its pull, and tables that are looked up with the same ids, share one plan."""
    plans, ids = RoutingPlans(2), np.arange(count) % 700
    first = plans.of(1, ids)
    assert plans.of(1, ids.copy()) is first
    assert plans.of(2, ids) is first
    other = ids.copy()
    other[7] += 1
    second = plans.of(2, other)
    assert second is not first
    assert plans.of(2, ids) is first
    assert plans.of(1, other) is second


def test_the_caller_may_change_its_ids() -> None:
    """A plan is of the ids as they were."""
    plans, ids = RoutingPlans(2), np.arange(100)
    first = plans.of(1, ids)
    ids[0] = 50
    second = plans.of(2, ids)
    assert second is not first
    assert plans.of(1, np.arange(100)) is first
