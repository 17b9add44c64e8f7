"""Snapshots on disk: a folder with one safetensors file for each server, and a manifest that lists the files.

    model/
      manifest.json                      table definitions, position in the training, base of a delta,
                                         length and SHA-256 of each file, and its own SHA-256
      shard-0-of-2.safetensors           server 0's part of every table, and its other state
      shard-1-of-2.safetensors           the same of server 1

docs/formats.md specifies both kinds of files. A server's state other than its tables is the tensor
`server`, uint8 [n], which psfleet/core/net/server_state.py encodes. No table can have a tensor of that name,
because tensors of tables are named `table/column`.

A snapshot is written into a folder with a temporary name. When all files are durable and the snapshot has
been opened once as a check, the folder is moved to its final path in one step.

To understand the code, begin with `manifest.py`, `writing.py` and `loading.py`. `rewriting.py` makes a new
snapshot or an export from a snapshot. `feature_migration.py` makes a snapshot for a model with other
features. `imported_rows.py` reads rows that are to be imported.
"""

from psfleet.checkpoint.feature_migration import Migration, TableChange, plan_migration
from psfleet.checkpoint.imported_rows import RowFile, read_rows
from psfleet.checkpoint.loading import Snapshot, load_shard, read_specs
from psfleet.checkpoint.manifest import (
    MANIFEST,
    CutPosition,
    DeltaBase,
    Manifest,
    Part,
    ShardFile,
    chain,
    read_manifest,
    verify,
)
from psfleet.checkpoint.rewriting import (
    ExportKind,
    TableDifference,
    compare,
    export,
    import_rows,
    reshard,
)
from psfleet.checkpoint.writing import SnapshotDraft, linked, merged_specs, save_fleet, write_frozen

__all__ = [
    "MANIFEST",
    "CutPosition",
    "DeltaBase",
    "ExportKind",
    "Manifest",
    "Migration",
    "Part",
    "RowFile",
    "ShardFile",
    "Snapshot",
    "SnapshotDraft",
    "TableChange",
    "TableDifference",
    "chain",
    "compare",
    "export",
    "import_rows",
    "linked",
    "load_shard",
    "merged_specs",
    "plan_migration",
    "read_manifest",
    "read_rows",
    "read_specs",
    "reshard",
    "save_fleet",
    "verify",
    "write_frozen",
]
