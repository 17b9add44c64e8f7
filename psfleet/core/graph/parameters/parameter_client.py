"""The tables of parameters as a trainer uses them; programs and torch share it."""

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
    """Pulls values of parameters, several at once or ahead, and changes whole tables.

    Args:
        runtime: Runtime that has the tables.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._ahead: tuple[list[Read], PendingPull] | None = None

    def pull(
        self, dense: Sequence[int], rows: Sequence[tuple[int, Asked]]
    ) -> tuple[list[Floats], list[Floats]]:
        """Values of dense tables, and rows or what is pooled of them, in one call.

        Uses what was read ahead.

        Args:
            dense: Keys of dense tables.
            rows: Keys of sparse tables, with ids of any shape or with bags of them.
        """
        reads = self._reads(dense, rows)
        arrays = self._arrived(reads) or self.runtime.pull(reads)
        first = len(dense)
        triples = zip(rows, reads[first:], arrays[first:], strict=True)
        return arrays[:first], [
            as_asked(lookup, read, array) for (_, lookup), read, array in triples
        ]

    def begin_pull(self, dense: Sequence[int], rows: Sequence[tuple[int, Asked]]) -> None:
        """Begin the next `pull`; the push before it overtakes it. The ids must not change."""
        reads = self._reads(dense, rows)
        self._ahead = reads, self.runtime.pull_ahead(reads)

    def _reads(self, dense: Sequence[int], rows: Sequence[tuple[int, Asked]]) -> list[Read]:
        pools = self.runtime.pools
        reads = [*map(Read, dense)]
        for key, lookup in rows:
            reads.append(read_of(key, lookup, pools))
        return reads

    def send(self, gradients: Sequence[Gradient], samples: int, loss: float | None) -> None:
        """Push the gradients of a step, see Runtime.push, to a runtime that may not pool."""
        if not self.runtime.pools:
            gradients = [gradient.spread() for gradient in gradients]
        self.runtime.push(gradients, samples=samples, loss=loss)

    def _arrived(self, reads: Sequence[Read]) -> list[Floats] | None:
        """The values of these reads, if they were read ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or not _are_alike(ahead[0], reads):
            return None
        return ahead[1].wait()

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
        """Make tables, on worker 0 first, whose values count; one that joins late does not wait."""
        runtime = self.runtime
        meets = runtime.worker_num > 1 and not joins_late
        if meets and runtime.worker_index > 0:
            runtime.barrier()
        tables = make(self)
        if meets and runtime.worker_index == 0:
            runtime.barrier()
        return tables

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
            spec: Definition of the table.
            weights: float32; dense: of the table's shape, sparse: [n, dim].
            ids: Sparse: int64 [n], among them every id that has a row.
            state: State of the table; None: it is read.
        """
        state = state or self.runtime.read_table(spec.key)
        slots = state.values[1:] if ids is None else slots_of(spec, ids, state)
        self.runtime.write_table(spec.key, TableState(state.step, [weights, *slots], ids))

    def drop_pulled(self) -> None:
        """Every table may have changed."""
        self._ahead = None


def slots_of(spec: TableSpec, ids: Ids, state: TableState | None = None) -> list[Floats]:
    """Optimizer state of rows, float32 [n, dim] for each slot.

    Args:
        spec: Definition of the table.
        ids: int64 [n], among them every id of `state`.
        state: State of the table's rows; other rows have the slots' first values.
    """
    slots = [np.full((len(ids), spec.dim), slot.initial, np.float32) for slot in spec.rule.slots]
    if state is not None and state.ids is not None:
        places = places_of(ids, state.ids)
        for into, values in zip(slots, state.values[1:], strict=True):
            into[places] = values
    return slots


def places_of(ids: Ids, targets: Ids) -> Ids:
    """Return the positions in `ids` of each of `targets`; all of them are there."""
    order = np.argsort(ids)
    places: Ids = order[np.searchsorted(ids, targets, sorter=order)]
    return places


def are_equal(lookup: Asked, other: Asked) -> bool:
    """Return whether two lookups read the same."""
    if isinstance(lookup, PooledIds):
        return isinstance(other, PooledIds) and lookup.matches(other)
    if isinstance(other, PooledIds):
        return False
    return lookup.shape == other.shape and np.array_equal(lookup, other)


def _are_alike(some: Sequence[Read], others: Sequence[Read]) -> bool:
    """Return whether both read the same."""
    return len(some) == len(others) and all(
        one.table == other.table and _is_alike(_asked(one), _asked(other))
        for one, other in zip(some, others, strict=True)
    )


def _is_alike(one: Asked | None, other: Asked | None) -> bool:
    if one is None or other is None:
        return one is other
    return are_equal(one, other)


def _asked(read: Read) -> Asked | None:
    if read.ids is None or read.bags is None:
        return read.ids
    return PooledIds(read.ids, tuple(read.bags))


def step_of(runtime: Runtime, name: str) -> int:
    """Return the number of a table's updates, without reading it; 0: there is none of that name."""
    tables = (table for server in runtime.stats() for table in server["tables"])
    return max((table["step"] for table in tables if table["name"] == name), default=0)


def write_weights(
    runtime: Runtime, spec: TableSpec, weights: NDArray[np.float32], ids: Ids | None = None
) -> None:
    """Set a dense table, whose optimizer state stays, or rows, whose state begins anew.

    Args:
        runtime: Runtime that has the table.
        spec: Definition of the table.
        weights: In the table's shape; sparse: [n, dim].
        ids: Sparse: int64 [n].

    Raises:
        IdError: An id comes twice.
        ShapeError: A weight is not finite. Nothing was written.
    """
    weights = np.ascontiguousarray(weights, np.float32)
    if ids is not None and (place := first_repeat(ids)) is not None:
        raise IdError(f"table {spec.name!r}: id {ids[place]} comes twice; give each id one row")
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
