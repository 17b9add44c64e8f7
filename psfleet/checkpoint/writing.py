"""Snapshots are written: each server its file, then one process the manifest, which makes it whole."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from psfleet.checkpoint.draft import SnapshotDraft
from psfleet.checkpoint.leftovers import place_of
from psfleet.checkpoint.manifest import MANIFEST, CutPosition, DeltaBase, Manifest, ShardFile, chain
from psfleet.checkpoint.tensors import HEADER, SERVER, SHARD, TensorWriter, digest
from psfleet.errors import CheckpointError
from psfleet.faults.crash_points import CrashFaults
from psfleet.platform.atomic_files import reason, sync
from psfleet.schema.table import TableSpec
from psfleet.shard.dense_partition import dense_range
from psfleet.shard.shard import Shard
from psfleet.shard.shard_snapshot import FrozenShard
from psfleet.shard.snapshot_cuts import PendingCut
from psfleet.wire.body import flat
from psfleet.wire.server_state import ServerState, write_state
from psfleet.wire.table_clocks import clock_to_json

__all__ = ["linked", "merged_specs", "save_fleet", "write_frozen"]


def save_fleet(
    path: str, shards: Sequence[Shard], cutting: PendingCut | None = None, base: str | None = None
) -> None:
    """Write shards of this process as one checkpoint; `base`: that of which it says the changes.

    Raises:
        CheckpointError: It cannot be written; what was is removed.
    """
    files, cut = [], CutPosition()
    with _told(path), SnapshotDraft(path, CrashFaults.wanted()) as draft:
        for shard in shards:
            frozen = shard.freeze(cutting)
            cut = CutPosition(frozen.number, frozen.mode, frozen.round, dict(frozen.pushes))
            with contextlib.closing(frozen):
                files.append(write_frozen(draft.folder, frozen))
        specs = tuple(table.spec for table in shards[0].tables.values())
        link = linked(base, path) if base else None
        draft.finish(Manifest(specs, tuple(files), cut, link))


@contextlib.contextmanager
def _told(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write to {path!r}: {reason(error)}") from None


def linked(base: str | Path, path: str | Path) -> DeltaBase:
    """What the manifest of a delta at `path` says of the snapshot before it.

    Raises:
        CheckpointError: It would replace one of those that it builds on, or one of them is not there.
    """
    target = place_of(path)
    if any(folder.resolve() == target for folder, _ in chain(base)):
        raise CheckpointError(
            f"a delta cannot be written to {str(path)!r}: it builds on the snapshot there; choose "
            "another folder"
        )
    relative = os.path.relpath(place_of(base), target)
    return DeltaBase(relative, digest(Path(base) / MANIFEST))


def write_frozen(
    folder: str,
    frozen: FrozenShard,
    state: ServerState | None = None,
    between: Callable[[], None] | None = None,
) -> ShardFile:
    """Write a shard as it was at one moment into the folder, durably.

    Args:
        folder: Of the snapshot.
        frozen: The shard; the caller closes it.
        state: In place of the shard's own, if more is to be kept.
        between: Called after each page, and now and then while the file's checksum is made.
    """
    kept = [*map(flat, write_state(state or ServerState(frozen.state)))]
    name = f"shard-{frozen.index}-of-{frozen.servers}.safetensors"
    tables = list(frozen.tables)
    shapes = {
        f"{table.spec.name}/{column}": shape
        for table in tables
        for column, shape in table.columns().items()
    }
    shapes[SERVER] = np.uint8, (sum(map(len, kept)),)
    with TensorWriter(Path(folder) / name, shapes, {HEADER: _header(frozen)}) as writer:
        for part in kept:
            writer.append(SERVER, np.frombuffer(part, np.uint8))
        for table in tables:
            for page in table.pages():
                for column, values in page.items():
                    writer.append(f"{table.spec.name}/{column}", values)
                if between is not None:
                    between()
        sha256, size = writer.finish(between)
    sync(Path(folder))
    dense = [table.spec for table in tables if table.spec.kind == "dense"]
    return ShardFile(
        name,
        sha256,
        size,
        {spec.name: dense_range(spec, frozen.index, frozen.servers) for spec in dense},
        {table.spec.name: table.clock.step for table in tables},
    )


def merged_specs(parts: Sequence[Sequence[TableSpec]]) -> tuple[TableSpec, ...]:
    """The tables of all servers. One that is only on some is being created and has had no push."""
    found = {spec.name: spec for part in parts for spec in part}
    return tuple(found.values())


def _header(frozen: FrozenShard) -> str:
    """What the file says beside the tensors."""
    clocks = {table.spec.name: clock_to_json(table.clock) for table in frozen.tables}
    return json.dumps(SHARD.document(clocks=clocks))
