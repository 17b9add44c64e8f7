"""Trains until EarlyStopping ends it; worker 1 is killed once, behind its step DIES. Says where it stopped.

python stopping.py MARK FOLDER DIES
"""

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import psfleet
from psfleet import fleet
from psfleet.fleet.callbacks import Callback, EarlyStopping, KeepBest

SCORES = [0.5, 0.6, 0.7, 0.65, 0.64, 0.9, 0.9]


class Steps(Callback):
    """Counts the steps, also those of an earlier incarnation."""

    def __init__(self) -> None:
        self.count = 0

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """Count."""
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        """The count."""
        return {"count": self.count}

    def set_state_dict(self, state: dict[str, int]) -> None:
        """The opposite."""
        self.count = state["count"]


def main(mark: Path, folder: str, dies: int) -> None:
    """One worker."""
    fleet.init()
    me, workers = fleet.worker_index(), fleet.worker_num()
    stopping, steps = EarlyStopping("auc", patience=2), Steps()
    with psfleet.connect() as ps:
        table = ps.sparse_table("rows", 1, psfleet.optimizer.SGD(1.0))
        fleet.add_callbacks(stopping, KeepBest("auc", folder), steps)
        for batch in fleet.shard(range(14 * workers)):
            step = batch // workers + 1
            table.push(np.arange(2), np.ones((2, 1), np.float32)).wait()
            if step % 2 == 0:
                auc = SCORES[step // 2 - 1] if me == 0 else float("nan")
                fleet.report_evaluation({"auc": auc})
            if me == 1 and step == dies and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        fleet.barrier_worker()
        for worker in range(workers):
            fleet.util.print_on_rank("", worker)
            if me == worker:
                print(
                    f"worker {me}: {step} {steps.count} {stopping.best} {stopping.worse}",
                    flush=True,
                )
    assert fleet.shard([]) is not None


main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
