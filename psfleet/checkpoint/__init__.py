"""Snapshots on disk: a folder of safetensors files, one per server, and a manifest that makes it whole.

    model/
      manifest.json                      table definitions, where in the training it lies, what it
                                         builds on, files with length and SHA-256, its own SHA-256
      shard-0-of-2.safetensors           server 0: its part of every table, and what else it was
      shard-1-of-2.safetensors

docs/formats.md has the layout of both; `manifest` says how a table's definition is written. The
tensor `server` uint8 [n] is what the server was beside its tables, see protos/psfleet/v1/state.proto. No
table can have a tensor of that name: each of a table's has a `/` before its last word.

The folder is written under a temporary name. It takes its place in one step when every byte is on the
disk and it could be opened; see psfleet.checkpoint.writing.
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
