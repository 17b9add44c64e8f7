"""A small job whose place in its data, random state and learning rate go with its snapshots.

Arguments: batches of each of two epochs, seconds to rest after each step until there is a file `hurry`, a
folder for the model, and "dataset" if the fleet deals the samples, which are then shuffled.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import psfleet as ps
from psfleet import fleet, layers, optimizer


def parts(batches: int, dealt: bool) -> Iterator[Any]:
    """The samples of each step of this worker."""
    if dealt:
        yield from fleet.dataset(20 * batches, batch_size=20, epochs=2, shuffle_seed=3)
        return
    for _ in range(2):
        yield from (slice(20 * k, 20 * k + 20) for k in fleet.shard(range(batches)))


def main(batches: int, rest: float, folder: str, dealt: bool) -> None:
    """Train in sync mode and save."""
    fleet.init()
    dice = np.random.default_rng(1)
    ids = dice.integers(0, 100, (batches * 20, 3))
    inputs, expected = (dice.standard_normal((len(ids), width), np.float32) for width in (4, 1))
    a, x, y = (
        layers.data("a", [None, 3], "int64"),
        layers.data("x", [None, 4]),
        layers.data("y", [None, 1]),
    )
    rows = layers.embedding(a, size=[None, 4], is_distributed=True, name="rows")
    out = layers.fc(layers.concat([layers.reshape(rows, [-1, 12]), x], axis=1), 1)
    loss = layers.mean(layers.square(out - y))
    rate = fleet.remember("rate", optimizer.lr.StepDecay(0.05, step_size=7))
    noise = fleet.remember("noise", np.random.default_rng(fleet.worker_index()))
    strategy = fleet.DistributedStrategy(a_sync=False)
    fleet.distributed_optimizer(optimizer.Adam(rate), strategy).minimize(loss)
    executor = ps.Executor()
    steps = 0
    for part in parts(batches, dealt):
        noisy = inputs[part] + noise.standard_normal((20, 4), np.float32) / 10
        executor.run(feed={"a": ids[part], "x": noisy, "y": expected[part]}, fetch_list=[loss])
        rate.step()
        steps += 1
        time.sleep(0 if Path("hurry").exists() else rest)
    fleet.save_persistables(folder)
    print(f"steps {steps}")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], "dataset" in sys.argv)
