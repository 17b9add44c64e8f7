"""Client of the tables that hold parameters: pulls, pushes, read-ahead and writes of whole tables.

`ParameterClient` adds to a Runtime the things that every trainer needs: one pull for all parameters of a
step, a pull ahead for the next step, and writes that all workers agree on. Programs (`binding.py`) and the
optimizers of psfleet.torch are built on it. Use it in the thread that trains.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import IdError, ShapeError
from psfleet.core.engine.interface import (
    Asked,
    Gradient,
    PendingPull,
    PooledIds,
    Read,
    Runtime,
    TableState,
    as_asked,
    read_of,
)
from psfleet.core.engine.kernels.dedup import first_repeat
from psfleet.core.engine.schema.table import TableSpec

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
T = TypeVar("T")


class ParameterClient:
    """Pulls values of parameters, several in one call or ahead of time, and changes whole tables.

    Args:
        runtime: Runtime that has the tables.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._ahead: tuple[list[Read], PendingPull] | None = None

    def pull(
        self, dense: Sequence[int], rows: Sequence[tuple[int, Asked]]
    ) -> tuple[list[Floats], list[Floats]]:
        """Pull values of dense tables, and rows or pooled rows of sparse ones, in one call.

        If `begin_pull` has started a pull of the same values, its result is returned.

        Args:
            dense: Keys of dense tables.
            rows: Keys of sparse tables, each with ids of any shape or with bags of ids to pool.

        Returns:
            Values of the dense tables; and for each look-up its rows, float32 [*ids.shape, dim], or its
            pooled rows, float32 [bags, dim].
        """
        reads = self._reads(dense, rows)
        arrays = self._arrived(reads) or self.runtime.pull(reads)
        first = len(dense)
        triples = zip(rows, reads[first:], arrays[first:], strict=True)
        return arrays[:first], [
            as_asked(lookup, read, array) for (_, lookup), read, array in triples
        ]

    def begin_pull(self, dense: Sequence[int], rows: Sequence[tuple[int, Asked]]) -> None:
        """Start to read what the next `pull` will ask for.

        The values will lack a push that is made between this call and that `pull`. The caller must not change
        the arrays of ids until then.
        """
        reads = self._reads(dense, rows)
        self._ahead = reads, self.runtime.pull_ahead(reads)

    def _reads(self, dense: Sequence[int], rows: Sequence[tuple[int, Asked]]) -> list[Read]:
        pools = self.runtime.pools
        reads = [*map(Read, dense)]
        for key, lookup in rows:
            reads.append(read_of(key, lookup, pools))
        return reads

    def send(self, gradients: Sequence[Gradient], samples: int, loss: float | None) -> None:
        """Push the gradients of a step.

        Args:
            gradients: Gradients, at most one for each table. Pooled ones are spread to their rows here if the
                runtime cannot do it.
            samples, loss: Number of samples of the step, and its loss or None, for the progress display.
        """
        if not self.runtime.pools:
            gradients = [gradient.spread() for gradient in gradients]
        self.runtime.push(gradients, samples=samples, loss=loss)

    def _arrived(self, reads: Sequence[Read]) -> list[Floats] | None:
        """Return the values of these reads if exactly these were read ahead, else None."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or not _are_alike(ahead[0], reads):
            return None
        return ahead[1].wait()

    def exclusively(self, write: Callable[[], None]) -> None:
        """Let worker 0 write while all workers wait. Every worker must call it."""
        self.runtime.flush()
        if self.runtime.worker_num > 1:
            self.runtime.barrier()
        if self.runtime.worker_index == 0:
            write()
        if self.runtime.worker_num > 1:
            self.runtime.barrier()

    def create(self, make: Callable[["ParameterClient"], T], joins_late: bool) -> T:
        """Make tables on worker 0 first, so that they start with its values; the other workers wait for it.

        Args:
            make: Function that makes the tables.
            joins_late: True for a worker that joins a running job. Its tables exist, and no other worker
                would meet it at a barrier.
        """
        runtime = self.runtime
        meets = runtime.worker_num > 1 and not joins_late
        if meets and runtime.worker_index > 0:
            runtime.barrier()
        tables = make(self)
        if meets and runtime.worker_index == 0:
            runtime.barrier()
        return tables

    def begin_rows(self, spec: TableSpec, ids: Ids, rows: Floats) -> None:
        """Write rows with a fresh optimizer state, as if no push had changed them. Call it in
        `exclusively`."""
        self.runtime.write_table(spec.key, TableState(0, [rows, *slots_of(spec, ids)], ids))

    def set_weights(
        self,
        spec: TableSpec,
        weights: Floats,
        ids: Ids | None = None,
        state: TableState | None = None,
    ) -> None:
        """Set the weights of a table and keep its optimizer state. Call it in `exclusively`.

        Args:
            spec: Definition of the table.
            weights: Weights, float32, in the shape of a dense table or [n, dim] for a sparse one.
            ids: Ids of a sparse table, int64 [n]. Every id that has a row must be among them.
            state: Present state of the table, or None to read it.
        """
        state = state or self.runtime.read_table(spec.key)
        slots = state.values[1:] if ids is None else slots_of(spec, ids, state)
        self.runtime.write_table(spec.key, TableState(state.step, [weights, *slots], ids))

    def drop_pulled(self) -> None:
        """Drop values that were read ahead, because every table may have changed."""
        self._ahead = None


def slots_of(spec: TableSpec, ids: Ids, state: TableState | None = None) -> list[Floats]:
    """Return the optimizer state of rows, float32 [n, dim] for each slot.

    Args:
        spec: Definition of the table.
        ids: Ids of the rows, int64 [n]. Every id of `state` must be among them.
        state: State of some of the rows, or None. Other rows get the first values of the slots.
    """
    slots = [np.full((len(ids), spec.dim), slot.initial, np.float32) for slot in spec.rule.slots]
    if state is not None and state.ids is not None:
        positions = places_of(ids, state.ids)
        for into, values in zip(slots, state.values[1:], strict=True):
            into[positions] = values
    return slots


def places_of(ids: Ids, targets: Ids) -> Ids:
    """Return the position in `ids` of each target. Every target must be in `ids`, which needs no order."""
    order = np.argsort(ids)
    positions: Ids = order[np.searchsorted(ids, targets, sorter=order)]
    return positions


def are_equal(lookup: Asked, other: Asked) -> bool:
    """Return whether two look-ups read the same rows, and pool them alike."""
    if isinstance(lookup, PooledIds):
        return isinstance(other, PooledIds) and lookup.matches(other)
    if isinstance(other, PooledIds):
        return False
    return lookup.shape == other.shape and np.array_equal(lookup, other)


def _are_alike(first: Sequence[Read], second: Sequence[Read]) -> bool:
    """Return whether two lists of reads ask for the same values in the same order."""
    return len(first) == len(second) and all(
        first_read.table == second_read.table and _is_alike(_asked(first_read), _asked(second_read))
        for first_read, second_read in zip(first, second, strict=True)
    )


def _is_alike(first: Asked | None, second: Asked | None) -> bool:
    if first is None or second is None:
        return first is second
    return are_equal(first, second)


def _asked(read: Read) -> Asked | None:
    if read.ids is None or read.bags is None:
        return read.ids
    return PooledIds(read.ids, tuple(read.bags))


def step_of(runtime: Runtime, name: str) -> int:
    """Return the number of a table's updates without reading the table, or 0 if no table has this name."""
    tables = (table for server in runtime.stats() for table in server["tables"])
    return max((table["step"] for table in tables if table["name"] == name), default=0)


def write_weights(
    runtime: Runtime, spec: TableSpec, weights: NDArray[np.float32], ids: Ids | None = None
) -> None:
    """Set the weights of a dense table, which keeps its optimizer state, or rows, which get a fresh one.

    Args:
        runtime: Runtime that has the table.
        spec: Definition of the table.
        weights: Weights in the shape of a dense table, or [n, dim] for rows.
        ids: Ids of the rows, int64 [n], or None for a dense table.

    Raises:
        IdError: An id comes twice. Nothing was written.
        ShapeError: A weight is not finite. Nothing was written.
    """
    weights = np.ascontiguousarray(weights, np.float32)
    if ids is not None and (repeated_at := first_repeat(ids)) is not None:
        raise IdError(
            f"table {spec.name!r}: id {ids[repeated_at]} comes twice; give each id one row"
        )
    if not np.isfinite(weights).all():
        raise ShapeError(
            f"a weight that is to be written to table {spec.name!r} is not finite; correct it"
        )
    runtime.flush()
    if ids is None:
        ParameterClient(runtime).set_weights(spec, weights)
        return
    state = [weights, *slots_of(spec, ids)]
    runtime.write_table(spec.key, TableState(step_of(runtime, spec.name), state, ids))
