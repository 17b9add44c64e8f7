"""Trains on fleet.dataset; before some steps every worker waits until its disk is full. Says what came out.

python filled.py MODE FOLDER FILLS

At the K-th of these steps a worker makes FOLDER/at.<worker>.<K> and waits for FOLDER/full.<K>. Worker 1 is
killed at the first one. In sync mode worker 0 waits for FOLDER/taken after the last one.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from psfleet import fleet
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.process_runtime import current
from psfleet.core.runtime.strategy import DistributedStrategy
from tests.trainings import dependent, one_more, zero_rows

SAMPLES, EPOCHS = 160, 2
WEIGHTS = TableSpec("weights", "dense", (9000,), make_rule("adam", {}))
COUNTS = zero_rows("counts")


def await_file(path: Path) -> None:
    """Wait until the test has made it."""
    while not path.exists():
        time.sleep(0.01)


def meet(folder: Path, me: int, fill: int) -> None:
    """Wait for the disk to be full; worker 1 dies there once."""
    (folder / f"at.{me}.{fill}").touch()
    await_file(folder / f"full.{fill}")
    if me == 1 and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main(mode: str, folder: Path, fills: int) -> None:
    """One worker."""
    strategy = DistributedStrategy()
    strategy.a_sync = mode == "async"
    fleet.init(strategy=strategy)
    active, me = current().active(), fleet.worker_index()
    active.create(COUNTS)
    active.create(WEIGHTS, np.linspace(-1, 1, 9000, dtype=np.float32))
    for step, chosen in enumerate(fleet.dataset(SAMPLES, 5, EPOCHS, shuffle_seed=3)):
        if step and step % 3 == 0 and step // 3 <= fills:
            meet(folder, me, step // 3)
        if mode == "sync" and fills and me == 0 and step == 3 * fills + 1:
            await_file(folder / "taken")
        active.push([one_more(COUNTS, chosen), dependent(active, WEIGHTS, chosen)])
        active.flush()
    fleet.barrier_worker()
    if me == 0:
        used = active.pull([Read(COUNTS.key, np.arange(SAMPLES))])[0]
        print("used", used.reshape(-1).astype(int).tolist())
        if mode == "sync":
            print("weights", active.pull([Read(WEIGHTS.key)])[0].tobytes().hex())


main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
