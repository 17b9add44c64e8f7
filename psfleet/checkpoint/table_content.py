"""A whole table of a snapshot as plain arrays."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.checkpoint.loading import Snapshot
from psfleet.schema.table import TableSpec
from psfleet.shard.shard import Shard
from psfleet.tables.dense import DenseTable

__all__ = ["TableContent", "content_of"]


@dataclass(frozen=True)
class TableContent:
    """A whole table.

    Attributes:
        arrays: By name. Sparse: `ids` int64 [n], ascending, `value` float32 [n, dim] and each state slot
            likewise. Dense: `value` and each slot in the table's shape.
        step: How many updates it has had.
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
    named = dict(zip(spec.slot_names, map(np.ascontiguousarray, planes), strict=True))
    return TableContent({"ids": rows.ids, **named}, table.step)
