"""Two tables under SGD that count pushes: each must have counted every push of every worker once."""

import numpy as np

from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Runtime, TableState
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec

_IDS = 50


class CountingWorkload:
    """Workers push -1 with rate 1, to rows that the worker's number decides and to a whole array.

    Args:
        pushes: Of each worker.
    """

    counts = TableSpec(
        "counts", "sparse", (3,), make_rule("sgd", {}), initializer=InitializerSpec("constant", 0.0)
    )
    total = TableSpec("total", "dense", (9000,), make_rule("sgd", {}))

    def __init__(self, pushes: int) -> None:
        self.pushes = pushes
        self._states: list[TableState] = []

    def run(self, runtime: Runtime) -> None:
        """One worker's part, to its last collective with the others."""
        runtime.create(self.counts)
        runtime.create(self.total, np.zeros(9000, np.float32))
        for ids in self._batches(runtime.worker_index):
            runtime.push(
                [
                    Gradient(self.counts.key, np.full((20, 3), -1, np.float32), ids, 1.0),
                    Gradient(self.total.key, np.full(9000, -1, np.float32), None, 1.0),
                ]
            )
        runtime.barrier()
        if runtime.worker_index == 0:
            self._states = [runtime.read_table(spec.key) for spec in (self.counts, self.total)]
        runtime.barrier()

    def check(self, workers: int) -> None:
        """Raise AssertionError unless both tables have counted every push once."""
        counts, total = self._states
        ids = np.concatenate([np.concatenate(self._batches(w)) for w in range(workers)])
        expected = np.bincount(ids, minlength=_IDS)
        np.testing.assert_array_equal(counts.values[0][:, 0], expected)
        np.testing.assert_array_equal(total.values[0], np.full(9000, workers * self.pushes))

    def _batches(self, worker: int) -> list[np.ndarray]:
        dice = np.random.default_rng(worker)
        return [dice.integers(0, _IDS, 20) for _ in range(self.pushes)]
