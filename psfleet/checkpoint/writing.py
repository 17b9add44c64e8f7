"""Writing of snapshots, so that a reader always finds a whole one, even if the process is killed.

SnapshotDraft is the folder under way: it is made beside the final path under another name, filled with
servers' files (`write_frozen`) and a manifest, opened once as a load would, and only then moved to the
path. A running fleet uses these functions from its servers, one file each; `save_fleet` writes all shards
of one process.

A path may also be a URL of an object store, where nothing can be renamed: see SnapshotDraft. If a
snapshot cannot be written, the functions raise a CheckpointError that names the path, and the earlier
snapshot stays.
"""

import contextlib
import fcntl
import json
import os
import posixpath
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from psfleet.checkpoint.loading import Snapshot
from psfleet.checkpoint.manifest import (
    MANIFEST,
    CutPosition,
    DeltaBase,
    Manifest,
    ShardFile,
    chain,
    write_manifest,
)
from psfleet.checkpoint.tensors import (
    HEADER,
    SERVER,
    SHARD,
    TensorWriter,
    beside,
    clear,
    digest,
    place_of,
)
from psfleet.core.base import faults
from psfleet.core.base.errors import CheckpointError
from psfleet.core.base.files import exchange, reason, sync
from psfleet.core.base.object_store import ObjectStore, readable
from psfleet.core.base.settings.kinds import local_path, shown_url, url_of
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.events import FrozenShard
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.snapshot_cuts import PendingCut
from psfleet.core.engine.shard.table_placement import dense_range
from psfleet.core.net.body import flat
from psfleet.core.net.server_state import ServerState, write_state
from psfleet.core.net.table_messages import clock_to_json


class SnapshotDraft:
    """Unfinished snapshot, which `finish` moves to `path`. It is removed if the `with` block ends before
    that.

    A reader of `path` finds either the earlier snapshot or the whole new one, whenever the process is killed:
    the two folders are exchanged in one step (renameat2). A system without that call needs two renames, with
    nothing at the path between them; if the process dies there, the next save or load puts the earlier
    snapshot back. A path that is a symbolic link stays one: the folder that it leads to is replaced.

    In a store (a URL) the files are written where they will stay, under names that no earlier snapshot has.
    The manifest is written last, as one object, and the earlier snapshot's files are removed after that.

        with SnapshotDraft(path) as draft:
            file = write_frozen(draft.folder, frozen)
            draft.finish(Manifest(specs, (file,)))

    Args:
        path: Path or URL of the finished snapshot.

    Attributes:
        folder: Folder or URL that the files are to be written to.

    Raises:
        CheckpointError: There is something other than a snapshot at `path`, or the folder cannot be made.
    """

    def __init__(self, path: str | Path) -> None:
        self._url = url_of(path)
        if self._url is not None:
            self._path, self.folder = shown_url(self._url), self._url
            self._store = ObjectStore(self._url)
            self._check_store()
            return
        self._path = str(local_path(path))
        try:
            self._place = place_of(path)
            self._place.parent.mkdir(parents=True, exist_ok=True)
            clear(self._place)
            self._check_place()
            folder = beside(self._place, "partial")
            folder.mkdir()
            self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except (OSError, ValueError) as error:  # ValueError: no name of a file
            raise CheckpointError(
                f"a snapshot cannot be written to {self._path!r}: {reason(error)}; "
                "choose another folder"
            ) from None
        # The lock says that the folder is in use. On a file system without locks `clear` cannot lock the
        # folder either, and so never removes it.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.folder = str(folder)
        faults.reach("began")

    def __enter__(self) -> "SnapshotDraft":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._url is not None:
            return
        os.close(self._lock)
        # After `finish` this is the earlier snapshot, which was exchanged for the new one.
        shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self, manifest: Manifest, check: Callable[[Snapshot], None] | None = None) -> None:
        """Write the manifest, try to open the snapshot as a load or a restart will, and move it to its path.

        Args:
            manifest: Manifest of the files in the folder, each of which was read back for its checksum.
            check: Further check of the opened snapshot, which raises if it must not be used.

        Raises:
            CheckpointError: The snapshot cannot be opened. The earlier one is still at the path.
        """
        if self._url is not None:
            self._finish_in_store(manifest)
            return
        folder = Path(self.folder)
        write_manifest(folder, manifest)
        sync(folder)  # before the rename: else a power cut could leave the name without the files
        # Only lengths: each file was read back a moment ago, for the checksum in the manifest.
        snapshot = Snapshot(folder, read_back=False)
        for index in range(len(manifest.files)):
            Shard().become(snapshot.server(index).shard)
        if check is not None:
            check(snapshot)
        faults.reach("unnamed")
        self._check_place()
        self._take_place(folder)
        faults.reach("named")
        sync(self._place.parent)

    def _finish_in_store(self, manifest: Manifest) -> None:
        """Replace the manifest in the store, which makes the new snapshot valid, then remove older files."""
        sizes = self._store.sizes()
        for file in manifest.files:
            if sizes.get(file.file) != file.bytes:
                raise CheckpointError(
                    f"{self._path!r} has {sizes.get(file.file, 0):,} bytes of {file.file}, which has "
                    f"{file.bytes:,}; the snapshot is not complete"
                )
        with tempfile.TemporaryDirectory(prefix="psfleet-") as staging:
            write_manifest(Path(staging), manifest)
            faults.reach("unnamed")
            self._store.put(Path(staging) / MANIFEST, MANIFEST)
        faults.reach("named")
        names = {MANIFEST, *(file.file for file in manifest.files)}
        for name in sizes:
            if name not in names and name.startswith("shard-"):
                self._store.remove(name)

    def _check_store(self) -> None:
        names = self._store.sizes()
        if MANIFEST not in names and any(not name.startswith("shard-") for name in names):
            raise CheckpointError(
                f"{self._path!r} exists and is not a checkpoint; choose another folder"
            )

    def _take_place(self, folder: Path) -> None:
        target = self._place
        if not target.exists():
            folder.rename(target)
            return
        if exchange(folder, target):
            return
        old = beside(target, "old")
        target.rename(old)
        faults.reach("away")
        folder.rename(target)
        old.rename(folder)

    def _check_place(self) -> None:
        target = self._place
        if target.exists() and not (target / MANIFEST).exists() and any(target.iterdir()):
            raise CheckpointError(
                f"{self._path!r} exists and is not a checkpoint; choose another folder"
            )


def save_fleet(
    path: str, shards: Sequence[Shard], cutting: PendingCut | None = None, base: str | None = None
) -> None:
    """Write all shards of this process as one snapshot.

    Args:
        path: Path or URL of the snapshot.
        shards: All shards of a fleet without servers of its own.
        cutting: Cut at which the shards are frozen, or None for their present state.
        base: Path of the snapshot that a delta builds on, or None for a full snapshot.

    Raises:
        CheckpointError: The snapshot cannot be written. Nothing of it remains.
    """
    files, cut = [], CutPosition()
    with _told(path), SnapshotDraft(path) as draft:
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
    """Return a reference to the snapshot `base`, for the manifest of a delta at `path`.

    Raises:
        CheckpointError: The delta would replace a snapshot that it builds on, or such a snapshot is missing.
    """
    if (url := url_of(path)) is not None:
        return _linked_in_store(base, url)
    target = place_of(path)
    if any(folder.resolve() == target for folder, _ in chain(base)):
        raise CheckpointError(
            f"a delta cannot be written to {str(path)!r}: it builds on the snapshot there; choose "
            "another folder"
        )
    relative = os.path.relpath(place_of(base), target)
    return DeltaBase(relative, digest(Path(base) / MANIFEST))


def _linked_in_store(base: str | Path, url: str) -> DeltaBase:
    before = url_of(base)
    if before is None or before.partition("://")[0] != url.partition("://")[0] or before == url:
        raise CheckpointError(
            f"a delta cannot be written to {shown_url(url)!r}: it says the changes of "
            f"{str(before or base)!r}, which must be another folder of the same store"
        )
    relative = posixpath.relpath(before.partition("://")[2], url.partition("://")[2])
    return DeltaBase(relative, digest(readable(before) / MANIFEST))


def write_frozen(
    folder: str,
    frozen: FrozenShard,
    state: ServerState | None = None,
    between: Callable[[], None] | None = None,
) -> ShardFile:
    """Write the image of a shard as one file, and return its entry in the manifest once it is durable.

    Training goes on meanwhile: tables are copied page by page (psfleet.core.engine.tables.row_snapshot).

    Args:
        folder: Folder or URL of the snapshot.
        frozen: Image of the shard, which the caller closes.
        state: State of the server to write, or None for the shard's state alone.
        between: Function that is called after each page and each half MiB of the checksum, with which
            a server slows the write down in favour of training.
    """
    if (url := url_of(folder)) is not None:
        with tempfile.TemporaryDirectory(prefix="psfleet-") as staging:
            file = write_frozen(staging, frozen, state, between)
            # A random name: the file of the earlier snapshot must stay, because readers use it until the new
            # manifest is written.
            name = file.file.replace(".", f"-{secrets.token_hex(4)}.", 1)
            ObjectStore(url).put(Path(staging) / file.file, name)
        return replace(file, file=name)
    state_parts = [*map(flat, write_state(state or ServerState(frozen.state)))]
    name = f"shard-{frozen.index}-of-{frozen.servers}.safetensors"
    tables = list(frozen.tables)
    shapes = {
        f"{table.spec.name}/{column}": shape
        for table in tables
        for column, shape in table.columns().items()
    }
    shapes[SERVER] = np.uint8, (sum(map(len, state_parts)),)
    with TensorWriter(Path(folder) / name, shapes, {HEADER: _header(frozen)}) as writer:
        for part in state_parts:
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
    """Return the definitions of all servers' tables, each once.

    A table that only some servers have is being created, and has had no push yet.
    """
    specs_by_name = {spec.name: spec for part in parts for spec in part}
    return tuple(specs_by_name.values())


def _header(frozen: FrozenShard) -> str:
    """Return the document in the metadata of a shard's file: the clock of each table."""
    clocks = {table.spec.name: clock_to_json(table.clock) for table in frozen.tables}
    return json.dumps(SHARD.document(clocks=clocks))
