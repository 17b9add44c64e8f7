"""Async mode: an acknowledged push takes effect once."""

from functools import partial

import numpy as np
import pytest

from psfleet.rules import make_rule
from psfleet.runtime import Gradient, TableState
from psfleet.tables.spec import Initializer, TableSpec
from psfleet.testing.faults import Faults
from psfleet.testing.local_fleet import LocalFleet
from psfleet.testing.training import in_threads
from psfleet_worker.runtime import ClusterRuntime

# Under SGD with rate 1, a gradient of -1 makes a table count its pushes.
COUNTS = TableSpec(
    "counts", "sparse", (3,), make_rule("sgd", {}), initializer=Initializer("constant", 0.0)
)
TOTAL = TableSpec("total", "dense", (9000,), make_rule("sgd", {}))
PUSHES = 60


@pytest.mark.parametrize(("drop", "duplicate"), [(0.0, 0.3), (0.2, 0.2)])
def test_every_push_is_counted_once(drop: float, duplicate: float) -> None:
    """Two workers push under repeats and lost answers; both tables count each push once."""
    states: list[TableState] = []
    faults = [Faults(worker, drop, duplicate) for worker in range(2)]

    def work(worker: int) -> None:
        runtime = ClusterRuntime(fleet.environment(worker), "async", meddle=faults[worker])
        runtime.create(COUNTS)
        runtime.create(TOTAL, np.zeros(9000, np.float32))
        dice = np.random.default_rng(worker)
        for _ in range(PUSHES):
            ids = dice.integers(0, 50, 20)
            runtime.push(
                [
                    Gradient(COUNTS.key, np.full((20, 3), -1, np.float32), ids, 1.0),
                    Gradient(TOTAL.key, np.full(9000, -1, np.float32), None, 1.0),
                ]
            )
        runtime.barrier()
        if worker == 0:
            states.extend(runtime.read_table(spec.key) for spec in (COUNTS, TOTAL))
        runtime.barrier()
        runtime.close()

    with LocalFleet(2, 2) as fleet:
        in_threads([partial(work, worker) for worker in range(2)])
        assert fleet.wait() == [0, 0]
    wanted = sum(
        np.bincount(np.concatenate([dice.integers(0, 50, 20) for _ in range(PUSHES)]), minlength=50)
        for dice in map(np.random.default_rng, range(2))
    )
    np.testing.assert_array_equal(states[0].values[0][:, 0], wanted)
    np.testing.assert_array_equal(states[1].values[0], np.full(9000, 2 * PUSHES))
    assert all(fault.duplicated > 5 for fault in faults)
