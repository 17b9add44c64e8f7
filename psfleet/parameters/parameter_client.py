"""The tables of parameters as a trainer uses them; programs and torch share it."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from psfleet.runtime.interface import PendingPull, Read, Runtime, TableState
from psfleet.schema.table import TableSpec

__all__ = ["ParameterClient", "are_equal", "places_of", "slots_of"]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
T = TypeVar("T")


class ParameterClient:
    """Pulls values of parameters, several at once or ahead, and changes whole tables.

    Args:
        runtime: Where the tables are.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._ahead: tuple[list[Read], PendingPull] | None = None

    # -- a step --------------------------------------------------------------------------------

    def pull(
        self, dense: Sequence[int], rows: Sequence[tuple[int, Ids]]
    ) -> tuple[list[Floats], list[Floats]]:
        """Values of dense tables, and rows by their ids, in one call. Uses what was read ahead.

        Args:
            dense: Keys of dense tables.
            rows: Keys of sparse tables, with ids of any shape.
        """
        reads = [Read(key) for key in dense] + [Read(key, ids) for key, ids in rows]
        arrays = self._arrived(reads) or self.runtime.pull(reads)
        return arrays[: len(dense)], arrays[len(dense) :]

    def begin_pull(self, dense: Sequence[int], rows: Sequence[tuple[int, Ids]]) -> None:
        """Begin the next `pull`; the push before it overtakes it. The ids must not change."""
        reads = [Read(key) for key in dense] + [Read(key, ids) for key, ids in rows]
        self._ahead = reads, self.runtime.pull_ahead(reads)

    def _arrived(self, reads: Sequence[Read]) -> list[Floats] | None:
        """The values of these reads, if they were read ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or not _are_alike(ahead[0], reads):
            return None
        return ahead[1].wait()

    # -- whole tables --------------------------------------------------------------------------

    def exclusively(self, write: Callable[[], None]) -> None:
        """Let worker 0 write while all wait. Every worker must come here."""
        self.runtime.flush()
        if self.runtime.worker_num > 1:
            self.runtime.barrier()
        if self.runtime.worker_index == 0:
            write()
        if self.runtime.worker_num > 1:
            self.runtime.barrier()

    def create(self, make: Callable[["ParameterClient"], T], joins_late: bool) -> T:
        """Make tables, on worker 0 first, whose values count; one that joins late meets nobody."""
        runtime = self.runtime
        meets = runtime.worker_num > 1 and not joins_late
        if meets and runtime.worker_index > 0:
            runtime.barrier()
        made = make(self)
        if meets and runtime.worker_index == 0:
            runtime.barrier()
        return made

    def begin_rows(self, spec: TableSpec, ids: Ids, rows: Floats) -> None:
        """Write rows as if no push had touched them. Call it within `exclusively`."""
        self.runtime.write_table(spec.key, TableState(0, [rows, *slots_of(spec, ids)], ids))

    def set_weights(
        self,
        spec: TableSpec,
        weights: Floats,
        ids: Ids | None = None,
        state: TableState | None = None,
    ) -> None:
        """Set the weights of a table; optimizer state stays. Call it within `exclusively`.

        Args:
            spec: Of the table.
            weights: float32; dense: of the table's shape, sparse: [n, dim].
            ids: Sparse: int64 [n], among them every id that has a row.
            state: What the table holds; None: it is read.
        """
        state = state or self.runtime.read_table(spec.key)
        slots = state.values[1:] if ids is None else slots_of(spec, ids, state)
        self.runtime.write_table(spec.key, TableState(state.step, [weights, *slots], ids))

    def forget(self) -> None:
        """Every table may have changed."""
        self._ahead = None


def slots_of(spec: TableSpec, ids: Ids, state: TableState | None = None) -> list[Floats]:
    """Optimizer state of rows, float32 [n, dim] for each slot.

    Args:
        spec: Of the table.
        ids: int64 [n], among them every id of `state`.
        state: What the table has; other rows have the slots' first values.
    """
    slots = [np.full((len(ids), spec.dim), slot.initial, np.float32) for slot in spec.rule.slots]
    if state is not None and state.ids is not None:
        places = places_of(ids, state.ids)
        for into, held in zip(slots, state.values[1:], strict=True):
            into[places] = held
    return slots


def places_of(ids: Ids, wanted: Ids) -> Ids:
    """Where in `ids` each of `wanted` is; all of them are there."""
    order = np.argsort(ids)
    places: Ids = order[np.searchsorted(ids, wanted, sorter=order)]
    return places


def are_equal(ids: Ids, others: Ids) -> bool:
    """Whether two lookups ask for the same."""
    return ids.shape == others.shape and np.array_equal(ids, others)


def _are_alike(some: Sequence[Read], others: Sequence[Read]) -> bool:
    """Whether they ask for the same."""
    return [read.table for read in some] == [read.table for read in others] and all(
        one.ids is other.ids is None
        or (one.ids is not None and other.ids is not None and np.array_equal(one.ids, other.ids))
        for one, other in zip(some, others, strict=True)
    )
