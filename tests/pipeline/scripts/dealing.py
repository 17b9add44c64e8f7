"""Trains on fleet.dataset in stages; every process writes which samples it was given.

Arguments: a folder for that; the mode, or "changing".
"""

import json
import sys
from pathlib import Path

import numpy as np

from psfleet import fleet, layers, optimizer
from psfleet.core.base.settings.environment import read_environment
from psfleet.core.engine.schema.entry import ShowClickEntry
from psfleet.core.engine.schema.table import key_of
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.runtime.process_runtime import active

SAMPLES, BATCH, EPOCHS = 24, 4, 2


def main(folder: Path, mode: str) -> None:
    """One process."""
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = mode == "async"
    fleet.init(strategy=strategy)
    ids = layers.data("ids", [None, 2], dtype="int64")
    layers.data("show", [None, 1])
    layers.data("click", [None, 1])
    entry = ShowClickEntry("show", "click")
    rows = layers.embedding(ids, [None, 4], is_distributed=True, name="rows", entry=entry)
    hidden = layers.fc(layers.reshape(rows, [-1, 8]), 16, act="tanh", name="hidden")
    loss = layers.mean(layers.fc(hidden, 1, name="out"))
    fleet.distributed_optimizer(optimizer.SGD(0.01)).minimize(loss)
    executor, seen = Executor(), []
    for chosen in fleet.dataset(SAMPLES, BATCH, EPOCHS, shuffle_seed=1):
        one = np.ones((len(chosen), 1), np.float32)
        feed = {"ids": np.stack([chosen, chosen], axis=1), "show": 3 * one, "click": one}
        executor.run(feed=feed)
        seen.append(chosen.tolist())
        if mode == "changing" and len(seen) <= 2:
            fleet.set_mode(["async", "sync"][len(seen) - 1])
    here = read_environment()
    (folder / f"{here.rank}.{here.stage}.json").write_text(json.dumps(seen))
    fleet.barrier_worker()
    if fleet.is_first_worker():
        state = active().read_table(key_of("rows.w_0"))
        assert state.ids is not None
        assert state.scores is not None
        scores = dict(zip(state.ids.tolist(), state.scores.tolist(), strict=True))
        (folder / "scores.json").write_text(json.dumps(scores))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
