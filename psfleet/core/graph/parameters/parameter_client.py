"""Client of the tables that hold parameters: pulls, pushes, read-ahead and writes of whole tables.

`ParameterClient` adds to a Runtime the calls that every trainer needs: one pull for all parameters of a step,
a pull ahead for the next step, and writes that happen once for all workers. Programs (`binding.py`) and the
optimizers of psfleet.torch are built on it. Use it only in the thread that trains.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import IdError, ShapeError
from psfleet.core.engine.kernels.dedup import first_repeat
from psfleet.core.engine.runtime_interface import (
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
from psfleet.core.engine.schema.table import TableSpec

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
T = TypeVar("T")


class ParameterClient:
    """Pulls values of parameters, several in one call or ahead of time, and changes whole tables."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._ahead: tuple[list[Read], PendingPull] | None = None

    def pull(
        self, dense: Sequence[int], rows: Sequence[tuple[int, Asked]]
    ) -> tuple[list[Floats], list[Floats]]:
        """Pull values of dense tables, and rows or pooled rows of sparse tables, in one call.

        If `begin_pull` has started a pull of the same values, this returns the result of that pull.

        Args:
            rows: Look-ups, each a pair of a sparse table's key and either ids of any shape, or bags of ids.
                The rows of a bag are pooled to one row.

        Returns:
            Values of the dense tables. Then for each look-up its rows, float32 [*ids.shape, dim], or its
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
        """Start to pull the values of the next `pull`, which must be called with equal arguments.

        The values will lack a push that is made between this call and that `pull`. Until then, the caller
        must not change the arrays of ids.
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
            gradients: At most one gradient for each table. If the runtime has no pooling, gradients of
                pooled rows are converted to gradients of single rows here.
            samples, loss: Number of samples of the step, and its loss or None, for the progress display.
        """
        if not self.runtime.pools:
            gradients = [gradient.spread() for gradient in gradients]
        self.runtime.push(gradients, samples=samples, loss=loss)

    def _arrived(self, reads: Sequence[Read]) -> list[Floats] | None:
        """Return the values of these reads if `begin_pull` has read exactly the same, else None."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or not _are_alike(ahead[0], reads):
            return None
        return ahead[1].wait()

    def exclusively(self, write: Callable[[], None]) -> None:
        """Call `write` on worker 0, while all other workers wait until it is done.

        Every worker must call this.
        """
        self.runtime.flush()
        if self.runtime.worker_num > 1:
            self.runtime.barrier()
        if self.runtime.worker_index == 0:
            write()
        if self.runtime.worker_num > 1:
            self.runtime.barrier()

    def create(self, make: Callable[["ParameterClient"], T], joins_late: bool) -> T:
        """Make tables on worker 0 first, so that they start with its values, then on all other workers.

        Every worker must call this, except those that join late.

        Args:
            make: Makes the tables, and returns the value that this method returns.
            joins_late: True for a worker that joins a running job. Its tables exist already, and the other
                workers do not wait for it.
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
        """Write rows with a fresh optimizer state, as if no push had changed them.

        Call it within `exclusively`.
        """
        self.runtime.write_table(spec.key, TableState(0, [rows, *slots_of(spec, ids)], ids))

    def set_weights(
        self,
        spec: TableSpec,
        weights: Floats,
        ids: Ids | None = None,
        state: TableState | None = None,
    ) -> None:
        """Set the weights of a table, and keep its optimizer state. Call it within `exclusively`.

        Args:
            weights: Weights, float32, in the shape of a dense table, or [n, dim] for a sparse table.
            ids: Ids of a sparse table, int64 [n]. They must include every id that has a row. None for a
                dense table.
            state: Present state of the table, or None to read it from the runtime.
        """
        state = state or self.runtime.read_table(spec.key)
        slots = state.values[1:] if ids is None else slots_of(spec, ids, state)
        self.runtime.write_table(spec.key, TableState(state.step, [weights, *slots], ids))

    def drop_pulled(self) -> None:
        """Drop values that were read ahead. Call it when tables may have changed."""
        self._ahead = None


def slots_of(spec: TableSpec, ids: Ids, state: TableState | None = None) -> list[Floats]:
    """Return the optimizer state for rows, float32 [n, dim] for each slot (state value) of the table's rule.

    Args:
        ids: Ids of the rows, int64 [n]. Every id in `state` must be among them.
        state: State of some of the rows, or None. The slots of all other rows get their initial values.
    """
    slots = [np.full((len(ids), spec.dim), slot.initial, np.float32) for slot in spec.rule.slots]
    if state is not None and state.ids is not None:
        positions = places_of(ids, state.ids)
        for into, values in zip(slots, state.values[1:], strict=True):
            into[positions] = values
    return slots


def places_of(ids: Ids, targets: Ids) -> Ids:
    """Return the position in `ids` of each target.

    Every target must be in `ids`, which may be in any order.
    """
    order = np.argsort(ids)
    positions: Ids = order[np.searchsorted(ids, targets, sorter=order)]
    return positions


def are_equal(lookup: Asked, other: Asked) -> bool:
    """Return whether two look-ups read the same rows, and pool them in the same way."""
    if isinstance(lookup, PooledIds):
        return isinstance(other, PooledIds) and lookup.matches(other)
    if isinstance(other, PooledIds):
        return False
    return lookup.shape == other.shape and np.array_equal(lookup, other)


def _are_alike(first: Sequence[Read], second: Sequence[Read]) -> bool:
    """Return whether two lists of reads are for the same values in the same order."""
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
    """Return how many updates a table has had, without reading its rows. 0 if no table has this name."""
    tables = (table for server in runtime.stats() for table in server["tables"])
    return max((table["step"] for table in tables if table["name"] == name), default=0)


def write_weights(
    runtime: Runtime, spec: TableSpec, weights: NDArray[np.float32], ids: Ids | None = None
) -> None:
    """Set weights of a table: a whole dense table, or some rows of a sparse table.

    A dense table keeps its optimizer state. Rows get a fresh optimizer state.

    Args:
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
