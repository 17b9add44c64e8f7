"""Rows of files become rows of a snapshot's table, as a warm start."""

import numpy as np
from numpy.typing import NDArray

from psfleet.checkpoint.imported_rows import RowFile, sparse_table
from psfleet.checkpoint.loading import Snapshot
from psfleet.checkpoint.manifest import Manifest
from psfleet.checkpoint.resharding import rewrite
from psfleet.errors import CheckpointError
from psfleet.schema.table import TableSpec
from psfleet.shard.events import RestorePart
from psfleet.shard.server_group import owned_rows
from psfleet.shard.shard import Shard
from psfleet.tables.row_data import RowData
from psfleet.tables.snapshot_columns import row_columns
from psfleet.tables.sparse import SparseTable

__all__ = ["import_rows"]


def import_rows(path: str, target: str, table: str, rows: RowFile) -> Manifest:
    """Write a snapshot anew with rows of a table set, whole by itself; its manifest.

    Rows that are set count as pushed by the table's last update, and as never shown. Their state is that of
    `rows` if these have all state slots of the table, else its first values. Other rows and tables stay as
    they are.

    Args:
        path: The snapshot.
        target: Where it is written.
        table: The name of the table.
        rows: What is set; ids that have a row already get these values.

    Raises:
        CheckpointError: There is no such table, or the rows do not fit it.
        UsageError: The table has no room for them.
    """
    snapshot = Snapshot(path)
    spec = sparse_table(path, snapshot.specs(), table)
    if rows.value.shape[1] != spec.dim:
        raise CheckpointError(
            f"the rows are {rows.value.shape[1]} wide and table {table!r} of {path!r} is {spec.dim} wide; "
            "they must be as wide"
        )
    values = _with_state(spec, rows)

    def load(shard: Shard) -> None:
        snapshot.load(shard)
        found = shard.tables[spec.key]
        assert isinstance(found, SparseTable)
        mine = owned_rows(spec, rows.ids, shard.index, shard.servers)
        ids = rows.ids[mine]
        never_shown = np.zeros((len(ids), spec.scores), np.float32)
        touched = np.full(len(ids), found.clock.step)
        data = RowData(ids, np.ascontiguousarray(values[mine]), touched, never_shown)
        shard.fill(RestorePart(spec.key, found.clock, row_columns(data)))

    return rewrite(snapshot, target, len(snapshot.manifest.files), load)


def _with_state(spec: TableSpec, rows: RowFile) -> NDArray[np.float32]:
    """Weights and state, float32 [n, dim * (1 + slots)]."""
    slots = spec.rule.slots
    if all(slot.name in rows.state for slot in slots):
        state = [rows.state[slot.name] for slot in slots]
    else:
        state = [np.full_like(rows.value, slot.initial) for slot in slots]
    return np.concatenate([rows.value, *state], axis=1)
