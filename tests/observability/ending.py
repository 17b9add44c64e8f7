"""Trains until the job has two servers, then 40 steps more; the last loss of each worker is known."""

import numpy as np

import psfleet
from psfleet import fleet, metrics
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.runtime.process_runtime import active

AFTERWARDS = 40  # steps


def main() -> None:
    """Train a sparse table, and count in a metric of the library."""
    fleet.init()
    with psfleet.connect(mode="async") as ps:
        auc = fleet.metrics([metrics.Auc()])
        rows = ps.sparse_table("rows", dim=4, optimizer=psfleet.optimizer.SGD(0.01))
        steps = left = 0
        while left < AFTERWARDS:
            left += fleet.server_num() == 2
            steps += 1
            auc.update(np.array([0.25, 0.75]), np.array([0, 1]))
            gradients = np.ones((8, 4), np.float32)
            loss = 1.0 / left if left else 9.0
            active().push([Gradient(rows.spec.key, gradients, np.arange(8), 0.01)], loss=loss)
            fleet.log("left", left)
            fleet.barrier_worker()
        if fleet.is_first_worker():
            print(f"{steps} steps of each worker", flush=True)


if __name__ == "__main__":
    main()
