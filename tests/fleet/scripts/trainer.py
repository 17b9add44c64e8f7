"""A small trainer script; run in every way a script can be run, and its weights compared.

Usage: trainer.py OUT [--rows N]: saves every table's content to OUT.npz on worker 0.
Each step takes the next 8 * N samples of a fixed stream, of which this worker takes its share.
"""

import argparse
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

import psfleet as ps
from psfleet import fleet, layers, optimizer
from psfleet.core.runtime.process_runtime import active

STEPS, BATCH = 12, 48


def network() -> ps.Variable:
    ids = layers.data("ids", [None, 4], dtype="int64")
    dense = layers.data("dense", [None, 3])
    label = layers.data("label", [None, 1])
    deep = layers.embedding(ids, size=[None, 8], is_distributed=True, name="deep")
    hidden = layers.fc(
        layers.concat([layers.reshape(deep, [-1, 32]), dense], axis=1), 300, act="relu"
    )
    hidden = layers.dropout(hidden, 0.0)
    logit = layers.fc(hidden, 1)
    return layers.mean(layers.sigmoid_cross_entropy_with_logits(logit, label))


def batches() -> list[dict[str, NDArray[Any]]]:
    rng = np.random.default_rng(11)
    instances: list[dict[str, NDArray[Any]]] = []
    for _ in range(STEPS):
        ids = rng.integers(-40, 40, (BATCH, 4))
        instances.append(
            {
                "ids": ids,
                "dense": rng.normal(size=(BATCH, 3)).astype(np.float32),
                "label": (ids[:, :1] > 0).astype(np.float32),
            }
        )
    return instances


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    out = parser.parse_args().out
    fleet.init()
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        sys.exit()
    loss = network()
    opt = fleet.distributed_optimizer(optimizer.Adam(0.01))
    opt.minimize(loss)
    fleet.init_worker()
    executor = ps.Executor()
    index, workers = fleet.worker_index(), fleet.worker_num()
    for batch in batches():
        # Every worker takes its contiguous share of the same batch.
        share = {name: np.array_split(value, workers)[index] for name, value in batch.items()}
        executor.run(feed=share, fetch_list=[loss])
    fleet.barrier_worker()
    if fleet.is_first_worker():
        np.savez(out, allow_pickle=False, **contents())
    fleet.stop_worker()


def contents() -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    for key, spec in active().specs().items():
        state = active().read_table(key)
        for slot, values in enumerate(state.values):
            arrays[f"{spec.name}.{slot}"] = values
        arrays[f"{spec.name}.step"] = np.array(state.step)
        if state.ids is not None:
            arrays[f"{spec.name}.ids"] = state.ids
    return arrays


if __name__ == "__main__":
    main()
