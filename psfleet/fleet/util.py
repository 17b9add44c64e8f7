"""Small helpers across workers."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psfleet.errors import UsageError
from psfleet.runtime import interface as runtimes

__all__ = ["Util"]


class _FleetView(Protocol):
    """What a helper must know of the fleet."""

    def worker_index(self) -> int:
        """This worker's index, from 0."""

    def worker_num(self) -> int:
        """How many workers train."""

    def is_later_stage(self) -> bool:
        """Whether this process is a stage of a pipeline and not the worker's first."""

    def barrier_worker(self) -> None:
        """Flush, then wait until every worker is here."""


class Util:
    """Small helpers across workers, as `fleet.util`."""

    def __init__(self, fleet: _FleetView) -> None:
        self._fleet = fleet

    def all_reduce(
        self, input: ArrayLike, mode: str = "sum", comm_world: str = "worker"
    ) -> NDArray[Any]:
        """Equal-shaped arrays of all workers combined, in worker order: sum, max or min."""
        if comm_world != "worker":
            raise UsageError(f"comm_world is {comm_world!r}; only 'worker' has values to reduce")
        brought = np.asarray(input)
        if mode == "sum" and self._fleet.is_later_stage():  # all stages of a worker bring the same
            brought = np.zeros_like(brought)
        return runtimes.active().all_reduce(brought, mode)

    def barrier(self, comm_world: str = "worker") -> None:
        """Wait until every worker is here."""
        self._fleet.barrier_worker()

    def get_file_shard(self, files: Sequence[str]) -> list[str]:
        """This worker's part of a list of files: contiguous, and of equal length but for one."""
        if isinstance(files, str):
            raise UsageError(f"files is the string {files!r}; it must be a list of file names")
        index, workers = self._fleet.worker_index(), self._fleet.worker_num()
        length, longer = divmod(len(files), workers)
        start = index * length + min(index, longer)
        return list(files[start : start + length + (index < longer)])

    def print_on_rank(self, message: str, rank_id: int) -> None:
        """Print on one worker only."""
        if self._fleet.worker_index() == rank_id and not self._fleet.is_later_stage():
            print(message, flush=True)
