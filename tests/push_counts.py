"""Two tables under SGD that count pushes: each must have counted every push of every worker once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, TableState
from psfleet.core.engine.schema.table import TableSpec
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.trainings import PATIENCE, in_threads, one_more, zero_rows

_IDS, _PUSHES = 50, 60  # of each worker
_COUNTS = zero_rows("counts", 3)
TOTAL = TableSpec("total", "dense", (9000,), make_rule("sgd", {}))
COUNT = Gradient(TOTAL.key, np.full(9000, -1, np.float32), None, 1.0)
"""Adds 1 to every value of `TOTAL`, which begins with 0."""


def count_pushes(fleet: LocalFleet, faults: Callable[[int], Any] = lambda worker: None) -> None:
    """Let all workers count their pushes in async mode, in rows that follow from their number and in `TOTAL`.

    Raises:
        AssertionError: A table has not counted every push once.
    """
    states: list[TableState] = []

    def batches(worker: int) -> list[np.ndarray]:
        dice = np.random.default_rng(worker)
        return [dice.integers(0, _IDS, 20) for _ in range(_PUSHES)]

    def work(worker: int) -> None:
        how = {"patience": PATIENCE, "inject_faults": faults(worker)}
        runtime = ClusterRuntime(fleet.environment(worker), "async", **how)
        runtime.create(_COUNTS)
        runtime.create(TOTAL, np.zeros(9000, np.float32))
        for ids in batches(worker):
            runtime.push([one_more(_COUNTS, ids), COUNT])
        runtime.barrier()
        if worker == 0:
            states.extend(runtime.read_table(spec.key) for spec in (_COUNTS, TOTAL))
        runtime.barrier()
        runtime.close()

    in_threads([partial(work, worker) for worker in range(fleet.workers)])
    counts, total = (state.values[0] for state in states)
    ids = np.concatenate([np.concatenate(batches(w)) for w in range(fleet.workers)])
    np.testing.assert_array_equal(counts[:, 0], np.bincount(ids, minlength=_IDS))
    np.testing.assert_array_equal(total, np.full(9000, fleet.workers * _PUSHES))
