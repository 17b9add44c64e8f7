"""How a worker deals ids: each batch is looked through once."""

import numpy as np
import pytest

from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.schema.table import TableSpec
from psfleet_worker.tensors.splitting import RoutingPlans

ONE, OTHER = (TableSpec(name, "sparse", (2,), make_rule("sgd", {})) for name in ("one", "other"))


@pytest.mark.parametrize("count", [5000, 300])
def test_equal_ids_are_dealt_once(count: int) -> None:
    """A push after its pull, and tables that are looked up with the same ids, share one plan."""
    plans, ids = RoutingPlans(2), np.arange(count) % 700
    first = plans.of(ONE, ids)
    assert plans.of(ONE, ids.copy()) is first
    assert plans.of(OTHER, ids) is first
    other = ids.copy()
    other[7] += 1
    second = plans.of(OTHER, other)
    assert second is not first
    assert plans.of(OTHER, ids) is first
    assert plans.of(ONE, other) is second


def test_the_caller_may_change_its_ids() -> None:
    """A plan is of the ids as they were."""
    plans, ids = RoutingPlans(2), np.arange(100)
    first = plans.of(ONE, ids)
    ids[0] = 50
    second = plans.of(OTHER, ids)
    assert second is not first
    assert plans.of(ONE, np.arange(100)) is first
