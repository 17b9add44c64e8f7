"""A runtime that hands every call to another runtime; its subclasses override what they change."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.runtime.completed import CompletedPull
from psfleet.runtime.evicted_ids import EvictedIds
from psfleet.runtime.interface import Gradient, PendingPull, PendingPush, Read, Runtime, TableState
from psfleet.schema.table import TableSpec

__all__ = ["ForwardingRuntime"]

Floats = NDArray[np.float32]


class ForwardingRuntime:
    """Implements psfleet.runtime.interface.Runtime; see there what each method does.

    Only `pull_ahead` is not handed on, but a plain pull: else a subclass that changes `pull` alone would
    return other values when it reads ahead. Nor does it take bags, which its subclasses would have to know.

    Args:
        fleet: The runtime that gets the calls. What only it has can be asked of this runtime too.
    """

    def __init__(self, fleet: Runtime) -> None:
        self._fleet = fleet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    @contextmanager
    def _settled(self) -> Iterator[Runtime]:
        """The runtime below, once it has everything that was pushed: for calls on whole tables."""
        yield self._fleet

    @property
    def worker_index(self) -> int:
        return self._fleet.worker_index

    @property
    def worker_num(self) -> int:
        return self._fleet.worker_num

    @property
    def server_num(self) -> int:
        return self._fleet.server_num

    @property
    def pools(self) -> bool:
        return False

    def create(self, spec: TableSpec, value: Floats | None = None) -> int:
        return self._fleet.create(spec, value)

    def open(self, name: str) -> TableSpec:
        return self._fleet.open(name)

    def pull(self, reads: Sequence[Read]) -> list[Floats]:
        return self._fleet.pull(reads)

    @property
    def reads_ahead(self) -> bool:
        return False

    def pull_ahead(self, reads: Sequence[Read]) -> PendingPull:
        return CompletedPull(self.pull(reads))

    def push(
        self, gradients: Sequence[Gradient], *, samples: int = 0, loss: float | None = None
    ) -> PendingPush:
        return self._fleet.push(gradients, samples=samples, loss=loss)

    def flush(self, timeout: float | None = None) -> None:
        self._fleet.flush(timeout)

    def barrier(self, timeout: float | None = None) -> None:
        self._fleet.barrier(timeout)

    def all_reduce(self, value: NDArray[Any], mode: str = "sum") -> NDArray[Any]:
        with self._settled() as fleet:
            return fleet.all_reduce(value, mode)

    def read_table(self, table: int) -> TableState:
        with self._settled() as fleet:
            return fleet.read_table(table)

    def write_table(self, table: int, state: TableState) -> None:
        with self._settled() as fleet:
            fleet.write_table(table, state)

    def shrink(
        self, table: int = 0, threshold: float | None = None, unseen: int | None = None
    ) -> int:
        with self._settled() as fleet:
            return fleet.shrink(table, threshold, unseen)

    def evictions(self, table: int, position: Sequence[int], limit: int) -> list[EvictedIds]:
        return self._fleet.evictions(table, position, limit)

    def save(self, path: str, *, delta: bool = False, base: bool = False) -> str:
        with self._settled() as fleet:
            return fleet.save(path, delta=delta, base=base)

    def load(self, path: str) -> None:
        with self._settled() as fleet:
            fleet.load(path)

    def specs(self) -> dict[int, TableSpec]:
        return self._fleet.specs()

    def stats(self) -> list[dict[str, Any]]:
        return self._fleet.stats()

    def close(self) -> None:
        self._fleet.close()
