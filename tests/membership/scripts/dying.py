"""Trains on fleet.dataset; worker DIES is killed at step AT of its first incarnation. Says what came out.

python dying.py WORKERS DIES AT MARK
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np

from psfleet import fleet
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec
from psfleet.core.runtime.process_runtime import current
from psfleet.core.runtime.strategy import DistributedStrategy

SAMPLES, EPOCHS = 60, 2
WEIGHTS = TableSpec("weights", "dense", (300,), make_rule("adam", {}))


def counts(worker: int) -> TableSpec:
    """Only this worker names it: under SGD with rate 1 it counts the worker's uses of each sample."""
    zero = InitializerSpec("constant", 0.0)
    return TableSpec(f"counts {worker}", "sparse", (1,), make_rule("sgd", {}), initializer=zero)


def main(workers: int, dies: int, at: int, mark: Path) -> None:
    """One worker."""
    strategy = DistributedStrategy()
    strategy.a_sync = False
    fleet.init(strategy=strategy)
    active, me = current().active(), fleet.worker_index()
    for worker in range(workers):
        active.create(counts(worker))
    active.create(WEIGHTS, np.linspace(-1, 1, 300, dtype=np.float32))
    for step, chosen in enumerate(fleet.dataset(SAMPLES, 5, EPOCHS, shuffle_seed=3), 1):
        weights = active.pull([Read(WEIGHTS.key)])[0]
        if (me, step) == (dies, at) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        noise = np.random.default_rng(chosen).standard_normal(300, np.float32)
        ones = np.full((len(chosen), 1), -1, np.float32)
        active.push(
            [
                Gradient(counts(me).key, ones, chosen, 1.0),
                Gradient(WEIGHTS.key, weights * np.float32(0.1) + noise, None, 0.05),
            ]
        )
    fleet.barrier_worker()
    if me == 0:
        ids = np.arange(SAMPLES)
        used = sum(active.pull([Read(counts(worker).key, ids)])[0] for worker in range(workers))
        print("used", np.asarray(used).reshape(-1).astype(int).tolist())
        print("weights", active.pull([Read(WEIGHTS.key)])[0].tobytes().hex())


main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
