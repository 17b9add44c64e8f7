"""Trains until there is a file `stop`, with a NaN in one step of one worker; rests while there is `hold`."""

import time
from pathlib import Path

import numpy as np

import psfleet
from psfleet import fleet
from psfleet.runtime import interface as runtimes
from psfleet.runtime.interface import Gradient

WORKER, STEP, ID = 1, 37, 4711


def main() -> None:
    """Train a sparse and a dense table."""
    fleet.init()
    worker = fleet.worker_index()
    numbers = np.random.default_rng(worker)
    with psfleet.connect(mode="async") as ps:
        rows = ps.sparse_table("users", dim=8, optimizer=psfleet.optimizer.SGD(0.01))
        bias = ps.dense_table("bias", np.zeros(16), optimizer=psfleet.optimizer.SGD(0.01))
        step = 0
        while not Path("stop").exists():
            if Path("hold").exists():
                time.sleep(0.1)
                continue
            step += 1
            ids = np.append(numbers.integers(0, 1000, 64), ID)
            gradients = np.asarray(rows.pull(ids)) - 0.5
            if (worker, step) == (WORKER, STEP):
                gradients[-1, 3] = np.nan
            parts = [
                Gradient(rows.spec.key, gradients, ids, 0.01),
                Gradient(bias.spec.key, bias.pull() - 0.5, None, 0.01),
            ]
            runtimes.active().push(parts, samples=64, loss=1.0 / step)
            fleet.log("steps made", step)
            time.sleep(0.01 if step < 3 * STEP else 0.2)  # the rest is only to be looked at


if __name__ == "__main__":
    main()
