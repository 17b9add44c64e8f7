"""Writing of snapshots. A reader always finds a complete snapshot, even if the writing process is killed.

SnapshotDraft is an unfinished snapshot. Its folder has another name beside the final path. `write_frozen`
writes a server's file into it, and `finish` writes the manifest, opens the snapshot once as a check, and
moves it to its path. In a running fleet each server writes its own file; `save_fleet` writes all shards of
one process.

A path may also be a URL of an object store, which cannot rename files. SnapshotDraft describes how it
replaces a snapshot there. If a snapshot cannot be written, the functions raise a CheckpointError that names
the path, and the earlier snapshot is kept.
"""

import contextlib
import errno
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
from psfleet.checkpoint.safetensors_files import (
    HEADER,
    SERVER,
    SHARD,
    TensorWriter,
    beside,
    clear,
    digest,
    place_of,
)
from psfleet.core.base import crash_points
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
    """Unfinished snapshot, which `finish` moves to `path`. If its `with` block ends before that, it is
    removed.

        with SnapshotDraft(path) as draft:
            file = write_frozen(draft.folder, frozen)
            draft.finish(Manifest(specs, (file,)))

    Even if the process is killed, a reader of `path` finds either the earlier snapshot or the complete new
    one, because the two folders are exchanged in one step (renameat2). A system without this call needs two
    renames, and there is nothing at `path` between them. If the process dies at that point, the next save
    or load puts the earlier snapshot back. If `path` is a symbolic link, the link is kept and the folder
    behind it is replaced.

    In an object store (a URL) files are written under their final names, which no earlier snapshot has
    used. The manifest is one object and is written last. After that the files of the earlier snapshot are
    removed.

    Args:
        path: Path or URL of the finished snapshot.

    Attributes:
        folder: Folder or URL in which the files must be written.

    Raises:
        CheckpointError: There is something other than a snapshot at `path`, or the folder cannot be created.
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
        except (OSError, ValueError) as error:  # ValueError: an invalid file name
            raise CheckpointError(
                f"a snapshot cannot be written to {self._path!r}: {reason(error)}; "
                "choose another folder"
            ) from None
        # The lock marks the folder as in use. On a file system without locks, `clear` cannot lock the
        # folder either, and so does not remove it.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.folder = str(folder)
        crash_points.reach("began")

    def __enter__(self) -> "SnapshotDraft":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._url is not None:
            return
        os.close(self._lock)
        # After `finish`, this folder has the earlier snapshot, because the two folders were exchanged.
        shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self, manifest: Manifest, check: Callable[[Snapshot], None] | None = None) -> None:
        """Write the manifest, open the snapshot as a check, and move it to its path.

        Args:
            manifest: Manifest of the files in the folder. Each file was read back for its checksum.
            check: Further check of the opened snapshot. It raises an error if the snapshot must not be used.

        Raises:
            CheckpointError: The snapshot cannot be opened. The earlier snapshot is still at the path.
        """
        if self._url is not None:
            self._finish_in_store(manifest)
            return
        folder = Path(self.folder)
        write_manifest(folder, manifest)
        # Sync before the rename, so that a power cut cannot leave the name without the files.
        sync(folder)
        # Compare only the lengths: each file was just read back for the checksum in the manifest.
        snapshot = Snapshot(folder, read_back=False)
        for index in range(len(manifest.files)):
            Shard().become(snapshot.server(index).shard)
        if check is not None:
            check(snapshot)
        crash_points.reach("unnamed")
        self._check_place()
        self._take_place(folder)
        crash_points.reach("named")
        sync(self._place.parent)

    def _finish_in_store(self, manifest: Manifest) -> None:
        """Replace the manifest in the store, which makes the new snapshot valid. Then remove the earlier
        snapshot's files.
        """
        sizes = self._store.sizes()
        for file in manifest.files:
            if sizes.get(file.file) != file.bytes:
                raise CheckpointError(
                    f"{self._path!r} has {sizes.get(file.file, 0):,} bytes of {file.file}, which has "
                    f"{file.bytes:,}; the snapshot is not complete"
                )
        with tempfile.TemporaryDirectory(prefix="psfleet-") as staging:
            write_manifest(Path(staging), manifest)
            crash_points.reach("unnamed")
            self._store.put(Path(staging) / MANIFEST, MANIFEST)
        crash_points.reach("named")
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
        if target.exists() and exchange(folder, target):
            return
        while True:
            old = beside(target, "old")
            with contextlib.suppress(FileNotFoundError):
                target.rename(old)
                crash_points.reach("away")
            try:
                folder.rename(target)
            except OSError as error:
                # Another process has found nothing at the path, and has put the earlier snapshot back, or has
                # saved one of its own.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            else:
                break
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
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
        shards: All shards of a fleet that has no server processes.
        cutting: Cut, the point in the pushes at which the shards were frozen. None means their present state.
        base: Path of the snapshot that a delta builds on. None means a full snapshot.

    Raises:
        CheckpointError: The snapshot cannot be written. No part of it is left.
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
        CheckpointError: The delta would replace a snapshot that it builds on, or one of these snapshots is
            missing.
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
    """Write a frozen shard as one file, and return the file's entry for the manifest when the file is
    durable.

    Training goes on meanwhile: tables are copied page by page (psfleet.core.engine.tables.row_snapshot).

    Args:
        folder: Folder or URL of the snapshot.
        frozen: Copy-on-write image of the shard. The caller closes it.
        state: State of the server to write. None means only the state of the shard.
        between: Function that is called after each page and after each half MiB of the checksum. A server
            uses it to slow the writing down in favour of training.
    """
    if (url := url_of(folder)) is not None:
        with tempfile.TemporaryDirectory(prefix="psfleet-") as staging:
            file = write_frozen(staging, frozen, state, between)
            # A random name, so that the file of the earlier snapshot is kept: readers use it until the new
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
    """Return the definitions of the tables of all servers, each table once.

    A table that only some servers have is included too. It is just being created, so no push has changed it.
    """
    specs_by_name = {spec.name: spec for part in parts for spec in part}
    return tuple(specs_by_name.values())


def _header(frozen: FrozenShard) -> str:
    """Return the document for the metadata of a shard's file, with each table's clock (number of updates
    and times).
    """
    clocks = {table.spec.name: clock_to_json(table.clock) for table in frozen.tables}
    return json.dumps(SHARD.document(clocks=clocks))
