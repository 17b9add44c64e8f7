"""Tables of a snapshot as plain NumPy arrays, merged from the files of all servers.

`psfleet ckpt export` writes these arrays, an import from a snapshot reads them, and a warm start sets
weights from them. A whole table is read into memory.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.checkpoint.loading import Snapshot
from psfleet.core.base.errors import CheckpointError
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.dense import DenseTable


@dataclass(frozen=True)
class TableContent:
    """Rows or values of one table, without its candidates (ids that may get a row later) and evictions.

    Attributes:
        arrays: Arrays by name. For a sparse table these are `ids`, int64 [n] in ascending order, and
            `value` and each state slot, float32 [n, dim]. For a dense table they are `value` and each state
            slot, float32 in the table's shape.
        step: Number of updates of the table.
    """

    arrays: dict[str, NDArray[Any]]
    step: int


def content_of(snapshot: Snapshot, spec: TableSpec) -> TableContent:
    """Read one table of a snapshot, merged from the files of all servers and from the bases of a delta."""
    shard = Shard()
    shard.create(spec, np.zeros(spec.size if spec.kind == "dense" else 0, np.float32))
    for fill in snapshot.fills(spec, 0, 1):
        shard.fill(fill)
    table = shard.tables[spec.key]
    if isinstance(table, DenseTable):
        planes = [plane.reshape(spec.shape) for plane in table.state()]
        return TableContent(dict(zip(spec.slot_names, planes, strict=True)), table.step)
    rows = table.rows(table.ids())
    planes = np.split(rows.values, len(spec.slot_names), axis=1)
    slots = dict(zip(spec.slot_names, map(np.ascontiguousarray, planes), strict=True))
    return TableContent({"ids": rows.ids, **slots}, table.step)


def known_tables(path: str, specs: Sequence[TableSpec], names: Collection[str]) -> list[TableSpec]:
    """Return the definitions of the tables with these names, or of all tables if no name is given.

    Args:
        path: Path of the snapshot, for error messages.

    Raises:
        CheckpointError: The snapshot has no table of one of the names.
    """
    by_name = {spec.name: spec for spec in specs}
    for name in names:
        if name not in by_name:
            raise CheckpointError(f"{path!r} has no table {name!r}; it has {', '.join(by_name)}")
    return [by_name[name] for name in names] if names else list(specs)


def sparse_table(path: str, specs: Sequence[TableSpec], name: str) -> TableSpec:
    """Return the definition of a sparse table.

    Raises:
        CheckpointError: The snapshot has no table of this name, or that table is dense.
    """
    [spec] = known_tables(path, specs, [name])
    if spec.kind != "sparse":
        raise CheckpointError(f"table {name!r} of {path!r} is dense; only rows can be imported")
    return spec
