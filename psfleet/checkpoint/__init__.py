"""Snapshots on disk: a folder of safetensors files, one per server, and a manifest that makes it whole.

    model/
      manifest.json                      table definitions, position in the training, base of a delta,
                                         length and SHA-256 of each file, and its own SHA-256
      shard-0-of-2.safetensors           part of server 0 of every table, and the rest of its state
      shard-1-of-2.safetensors           the same of server 1

docs/formats.md specifies both kinds of files. A server's state other than its tables is the tensor
`server`, uint8 [n], a message of protos/psfleet/v1/state.proto. No table can have a tensor of that name,
because tensors of tables are named `table/column`.

A snapshot is written into a folder with a temporary name. Once every byte is on the disk and the snapshot
could be opened, the folder is moved to its path in one step.

Read `manifest.py` first, then `writing.py` and `loading.py`. `rewriting.py` makes other snapshots or
exports of one, `feature_migration.py` one for a model with other features, and `imported_rows.py` reads
rows to import.
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
