"""Weights of tables that are set from a script: rows by id, dense tables whole, tables of a snapshot."""

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import IdError, ShapeError
from psfleet.kernels.dedup import first_repeat
from psfleet.parameters.parameter_client import ParameterClient, slots_of
from psfleet.runtime.interface import Runtime, TableState
from psfleet.schema.table import TableSpec

__all__ = ["step_of", "write_weights"]

Ids = NDArray[np.int64]


def step_of(runtime: Runtime, name: str) -> int:
    """How many updates a table has had, without reading it; 0: there is none of that name."""
    tables = (table for server in runtime.stats() for table in server["tables"])
    return max((table["step"] for table in tables if table["name"] == name), default=0)


def write_weights(
    runtime: Runtime, spec: TableSpec, weights: NDArray[np.float32], ids: Ids | None = None
) -> None:
    """Set a dense table, whose optimizer state stays, or rows, whose state begins anew.

    Args:
        runtime: Where the table is.
        spec: Of the table.
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
