"""Training on a real fleet, with the workers as threads of a test."""

from collections.abc import Callable
from functools import partial

from psfleet.runtime.interface import Runtime, TableState
from psfleet.testing.training_run import TrainingWorkload, in_threads

__all__ = ["train_together"]


def train_together(
    workers: int, training: TrainingWorkload, connect: Callable[[int], Runtime]
) -> list[TableState]:
    """Let so many workers train at the same time; the tables that worker 0 then reads.

    Args:
        connect: Gives the runtime of a worker, in the thread that is to use it.
    """
    result: list[TableState] = []

    def work(worker: int) -> None:
        runtime = connect(worker)
        training.run(runtime)
        runtime.barrier()
        if worker == 0:
            result.extend(training.result(runtime))
        runtime.barrier()
        runtime.close()

    in_threads([partial(work, worker) for worker in range(workers)])
    return result
