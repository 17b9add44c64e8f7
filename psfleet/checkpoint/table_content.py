"""Whole tables of a snapshot as plain arrays, and the tables that a command names.

What `psfleet ckpt export` writes, imports take rows from, and a warm start begins with.
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
    """A whole table.

    Attributes:
        arrays: By name. Sparse: `ids` int64 [n], ascending, `value` float32 [n, dim] and each state slot
            likewise. Dense: `value` and each slot in the table's shape.
        step: Number of updates that it has had.
    """

    arrays: dict[str, NDArray[Any]]
    step: int


def content_of(snapshot: Snapshot, spec: TableSpec) -> TableContent:
    """All of a table of a snapshot."""
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
    """The tables of these names; all if there are none.

    Raises:
        CheckpointError: There is no such table.
    """
    by_name = {spec.name: spec for spec in specs}
    for name in names:
        if name not in by_name:
            raise CheckpointError(f"{path!r} has no table {name!r}; it has {', '.join(by_name)}")
    return [by_name[name] for name in names] if names else list(specs)


def sparse_table(path: str, specs: Sequence[TableSpec], name: str) -> TableSpec:
    """The sparse table of this name.

    Raises:
        CheckpointError: There is no such table, or it is dense.
    """
    [spec] = known_tables(path, specs, [name])
    if spec.kind != "sparse":
        raise CheckpointError(f"table {name!r} of {path!r} is dense; only rows can be imported")
    return spec
