"""Workers of a fleet in some mode, for the tests of all modes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read, Runtime
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.modes.switch import ModeSwitchRuntime
from psfleet.core.runtime.strategy import ConsistencySettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.trainings import in_threads, zero_rows

Ids = NDArray[np.int64]

DENSE = TableSpec("w", "dense", (50, 3), make_rule("sgd", {}))
ROWS = zero_rows("rows", 2)


def ready(
    fleet: LocalFleet, worker: int, consistency: ConsistencySettings, **more: Any
) -> ModeSwitchRuntime:
    """A worker that knows the tables; `more` is for its ClusterRuntime."""
    cluster = ClusterRuntime(fleet.environment(worker), consistency.declared, **more)
    runtime = ModeSwitchRuntime(cluster, consistency)
    runtime.create(DENSE, np.zeros(DENSE.shape, np.float32))
    runtime.create(ROWS)
    return runtime


def together(
    fleet: LocalFleet,
    consistency: ConsistencySettings,
    work: Callable[[ModeSwitchRuntime], None],
    faults: Callable[[int], Any] = lambda worker: None,
) -> None:
    """Every worker of the fleet does the work, then leaves; `faults` makes those of a worker's calls."""

    def train(worker: int) -> None:
        runtime = ready(fleet, worker, consistency, inject_faults=faults(worker))
        work(runtime)
        runtime.close()

    in_threads([partial(train, worker) for worker in range(fleet.workers)])


def step(runtime: Runtime, ids: Ids) -> None:
    """Read everything, then `give`."""
    runtime.pull([Read(DENSE.key), Read(ROWS.key, ids)])
    give(runtime, ids)


def give(runtime: Runtime, ids: Ids, rate: float = 1.0) -> None:
    """Take 1, or the rate, from every weight of the dense table and from those of the ids."""
    dense = Gradient(DENSE.key, np.ones(DENSE.shape, np.float32), None, rate)
    rows = Gradient(ROWS.key, np.ones((len(ids), 2), np.float32), ids, rate)
    runtime.push([dense, rows], samples=len(ids), loss=0.5)


def taken(runtime: Runtime, ids: Ids) -> tuple[float, list[float]]:
    """What has been taken from the dense weights, and from those of each id."""
    dense, rows = runtime.pull([Read(DENSE.key), Read(ROWS.key, ids)])
    np.testing.assert_array_equal(dense, np.full_like(dense, dense[0, 0]))
    return -float(dense[0, 0]), [-float(row[0]) for row in rows]


def change_modes(
    runtime: ModeSwitchRuntime, modes: Sequence[ConsistencySettings], steps: int
) -> None:
    """Make steps in one mode after the other; after each the tables of two workers hold every step once."""
    ids, expected = np.arange(8), 0.0
    for consistency in modes:
        runtime.set_mode(consistency)
        assert {server["mode"] for server in runtime.stats()} == {consistency.mode}
        for _ in range(steps):
            step(runtime, ids)
        expected += steps * (1 if consistency.mode == "sync" else 2)
        runtime.barrier()
        dense, rows = taken(runtime, ids)
        assert [dense, *rows] == pytest.approx([expected] * 9, rel=1e-5)
        runtime.barrier()
