"""How a worker deals ids: each batch is looked through once."""

import numpy as np

from psfleet_worker.sharding.pull_routing import RoutingPlans


def test_equal_ids_are_dealt_once() -> None:
    """A push after its pull, and tables that are looked up with the same ids, share one plan."""
    plans, ids = RoutingPlans(2), np.arange(5000) % 700
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
