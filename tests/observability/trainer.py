"""Trains until there is a file `stop`, with a NaN in one step of one worker; rests while there is `hold`."""

import time
from pathlib import Path

import numpy as np

import psfleet
from psfleet import fleet
from psfleet.core.base.observability.logged_values import LAGS
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.runtime.process_runtime import active

WORKER, STEP, ID = 1, 37, 4711


def main() -> None:
    """Train a sparse and a dense table."""
    fleet.init()
    worker = fleet.worker_index()
    LAGS["clicks/0"] = 0.0  # as KafkaTopic keeps it; there is no broker here
    numbers = np.random.default_rng(worker)
    with psfleet.connect(mode="async") as ps:
        rows = ps.sparse_table("users", dim=8, optimizer=psfleet.optimizer.SGD(0.01))
        bias = ps.dense_table("bias", np.zeros(16), optimizer=psfleet.optimizer.SGD(0.01))
        for step, batch in enumerate(fleet.dataset(10_000_000, batch_size=64), 1):
            while Path("hold").exists() and not Path("stop").exists():
                time.sleep(0.1)
            if Path("stop").exists():
                break
            ids = np.append(numbers.integers(0, 1000, 64), ID)
            gradients = np.asarray(rows.pull(ids)) - 0.5
            if (worker, step) == (WORKER, STEP):
                gradients[-1, 3] = np.nan
            parts = [
                Gradient(rows.spec.key, gradients, ids, 0.01),
                Gradient(bias.spec.key, bias.pull() - 0.5, None, 0.01),
            ]
            active().push(parts, samples=len(batch), loss=1.0 / step)
            fleet.log("steps made", step)
            time.sleep(0.01 if step < 3 * STEP else 0.2)  # the rest is only to be looked at


if __name__ == "__main__":
    main()
