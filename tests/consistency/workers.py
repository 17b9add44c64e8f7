"""Workers of a fleet in some mode, for the tests of all modes."""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read, Runtime
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec
from psfleet.core.runtime.modes.switch import ModeSwitchRuntime, connect
from psfleet.core.runtime.strategy import ConsistencySettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.trainings import in_threads

Ids = NDArray[np.int64]

ZERO = InitializerSpec("constant", 0.0)
DENSE = TableSpec("w", "dense", (50, 3), make_rule("sgd", {}))
ROWS = TableSpec("rows", "sparse", (2,), make_rule("sgd", {}), initializer=ZERO)


def together(
    fleet: LocalFleet, consistency: ConsistencySettings, work: Callable[[ModeSwitchRuntime], None]
) -> None:
    """Every worker of the fleet does the work, then leaves."""

    def train(worker: int) -> None:
        runtime = connect(fleet.environment(worker), consistency)
        runtime.create(DENSE, np.zeros(DENSE.shape, np.float32))
        runtime.create(ROWS)
        work(runtime)
        runtime.close()

    in_threads([partial(train, worker) for worker in range(fleet.workers)])


def step(runtime: Runtime, ids: Ids) -> None:
    """Read everything, then `give`."""
    runtime.pull([Read(DENSE.key), Read(ROWS.key, ids)])
    give(runtime, ids)


def give(runtime: Runtime, ids: Ids) -> None:
    """Take 1 from every weight of the dense table and from those of the ids."""
    runtime.push(
        [
            Gradient(DENSE.key, np.ones(DENSE.shape, np.float32), None, 1.0),
            Gradient(ROWS.key, np.ones((len(ids), 2), np.float32), ids, 1.0),
        ],
        samples=len(ids),
        loss=0.5,
    )


def taken(runtime: Runtime, ids: Ids) -> tuple[float, list[float]]:
    """What has been taken from the dense weights, and from those of each id."""
    dense, rows = runtime.pull([Read(DENSE.key), Read(ROWS.key, ids)])
    np.testing.assert_array_equal(dense, np.full_like(dense, dense[0, 0]))
    return -float(dense[0, 0]), [-float(row[0]) for row in rows]
