"""Operations on existing snapshots: reshard, compare, export and import rows (`psfleet ckpt`).

All functions that make a new snapshot call `rewrite`. It fills one shard at a time from the old snapshot
and writes it, so that memory for one shard is enough. The new snapshot is full, even if the old one is a
delta, and has the same position in the training and the same states of workers. Compare and export read one
whole table at a time. No operation changes its source, and each writes its complete result or nothing.
"""

import contextlib
import csv
import json
import re
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from psfleet.checkpoint.imported_rows import RowFile
from psfleet.checkpoint.loading import Snapshot
from psfleet.checkpoint.manifest import Manifest
from psfleet.checkpoint.safetensors_files import HEADER, write_arrays
from psfleet.checkpoint.table_content import TableContent, content_of, known_tables, sparse_table
from psfleet.checkpoint.writing import SnapshotDraft, write_frozen
from psfleet.core.base.errors import CheckpointError, PsfleetError
from psfleet.core.base.files import reason
from psfleet.core.base.json_documents import Format
from psfleet.core.base.object_store import upload
from psfleet.core.base.settings.kinds import local_path, url_of
from psfleet.core.engine.gradient_checks import as_float32
from psfleet.core.engine.kernels.initial_values import initial_array
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.events import RestorePart
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.table_placement import owned_rows
from psfleet.core.engine.tables.row_data import RowData, row_columns
from psfleet.core.engine.tables.sparse import SparseTable

Floats = NDArray[np.float32]


ExportKind = Literal["safetensors", "npz", "parquet"]
Arrays = Mapping[str, NDArray[Any]]
_EXPORT = Format("exported table")
_LONGEST = 200  # maximum bytes of a file's name before its ending


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as the command line writes it, such as "113x64"."""
    return "x".join(map(str, shape))


def grown_spec(spec: TableSpec, shape: Sequence[int]) -> TableSpec:
    """Return the definition of a dense table with a new shape. Each axis is as long as before or longer.

    Raises:
        CheckpointError: The table is sparse, an axis would get shorter, or the number of axes differs.
    """
    if spec.kind != "dense":
        raise CheckpointError(
            f"table {spec.name!r} is sparse; the dim of its Table in --features says how wide it gets"
        )
    longer = len(shape) == len(spec.shape) and all(
        new >= old for old, new in zip(spec.shape, shape, strict=True)
    )
    if not longer:
        raise CheckpointError(
            f"table {spec.name!r} has the shape {shape_text(spec.shape)} in the snapshot and cannot get "
            f"{shape_text(shape)}; give it no shorter axis, or start it again with --drop {spec.name}"
        )
    return replace(spec, shape=tuple(shape))


def grown_columns(
    before: TableSpec, after: TableSpec, columns: Mapping[str, Floats]
) -> dict[str, Floats]:
    """Enlarge the columns of a dense table along its axes.

    Old values keep their indices, and new values follow along each axis:

        old  old  new        weights: initial values of the table's initializer
        old  old  new        state:   initial value of the slot or, if a row or the whole table shares one
        new  new  new                 value of the slot, that value

    A slot is a state value that the optimizer keeps for each weight, such as Adam's first moment.

    Args:
        columns: Flattened columns of the whole old table by name, float32 [before.size].

    Returns:
        Flattened columns of the enlarged table by name, float32 [after.size].
    """
    old = tuple(map(slice, before.shape))
    value = initial_array(after.shape, after.initializer, after.seed, after.name)
    planes = {"value": value}
    for slot in before.rule.slots:
        planes[slot.name] = np.full(after.shape, slot.initial, np.float32)
        if slot.per_unit and before.size:
            # The slot has one value for each row or for the table, which is stored at every weight. New
            # weights of an old row get this value from the row's first column.
            plane = columns[slot.name].reshape(before.shape)
            if before.rule.unit == "row":
                rows = plane.reshape(len(plane), -1)[:, 0]
                planes[slot.name].T[..., : len(rows)] = rows
            else:
                planes[slot.name][...] = plane.flat[0]
    for name, array in planes.items():
        array[old] = columns[name].reshape(before.shape)
    return {name: array.reshape(-1) for name, array in planes.items()}


@dataclass(frozen=True)
class TableDifference:
    """Differences of one table between two snapshots, as numbers of rows or of values of a dense table.

    Attributes:
        table: Name of the table.
        missing: Number of rows that only the first snapshot has.
        added: Number of rows that only the second snapshot has.
        changed: Number of rows in both that are not bit-identical in weights and optimizer state.
        equal: Number of rows in both that are bit-identical.
        largest: Largest absolute difference of a weight.
        steps: Number of the table's updates in the first and in the second snapshot.
        note: Reason why the rows could not be compared, or "".
    """

    table: str
    missing: int = 0
    added: int = 0
    changed: int = 0
    equal: int = 0
    largest: float = 0.0
    steps: tuple[int, int] = (0, 0)
    note: str = ""

    @property
    def is_equal(self) -> bool:
        """True if the table has bit-identical rows and the same number of updates in both snapshots."""
        differing = self.missing or self.added or self.changed or self.note
        return not differing and self.steps[0] == self.steps[1]


def reshard(path: str, target: str, servers: int) -> Manifest:
    """Write a snapshot for another number of servers, as a full snapshot, and return its manifest.

        reshard("snapshots/best", "resharded", servers=4)

    This is not necessary before loading, because any number of servers can load any snapshot. A delta is
    merged with its bases.

    Args:
        path: Folder or URL of the snapshot.
        target: Folder or URL of the new snapshot.
        servers: Number of servers, and so of files, of the new snapshot.

    Raises:
        CheckpointError: The snapshot is damaged, or there is something other than a snapshot at `target`.
    """
    if servers < 1:
        raise CheckpointError(f"a snapshot of {servers} servers is wanted; use at least 1")
    snapshot = Snapshot(path)
    return rewrite(snapshot, target, servers, snapshot.load)


def rewrite(
    snapshot: Snapshot, target: str, servers: int, load: Callable[[Shard], None]
) -> Manifest:
    """Write a full snapshot with new tables and everything else from `snapshot`, and return its manifest.

    Args:
        snapshot: Snapshot whose position in the training and states of workers the new one gets.
        load: Function that creates and fills the tables of an empty shard. The shard has its index and the
            number of shards.

    Raises:
        CheckpointError: The snapshot cannot be written, or there is something other than a snapshot at
            `target`.
    """
    state = snapshot.server(0)  # only server 0 has the coordinator's state
    files, specs = [], []
    with SnapshotDraft(target) as draft:
        for index in range(servers):
            shard = Shard(index, servers)
            load(shard)
            specs = [table.spec for table in shard.tables.values()]
            with contextlib.closing(shard.freeze()) as frozen:
                files.append(write_frozen(draft.folder, frozen, state))
        manifest = replace(snapshot.manifest, files=tuple(files), tables=tuple(specs), base=None)
        draft.finish(manifest)
    return manifest


def compare(first: str, second: str) -> list[TableDifference]:
    """Compare two snapshots bit by bit, and return the differences of each table, sorted by name.

        for table in compare("snapshots/1", "snapshots/2"):
            print(table.table, table.changed)

    The snapshots may have different numbers of files. If the shape or the optimizer state of a table
    differs, its rows are not compared.
    """
    pair = Snapshot(first), Snapshot(second)
    specs = [{spec.name: spec for spec in snapshot.specs()} for snapshot in pair]
    differences = []
    for name in sorted({*specs[0], *specs[1]}):
        if name not in specs[0] or name not in specs[1]:
            where = first if name in specs[0] else second
            differences.append(TableDifference(name, note=f"only {where} has it"))
        elif specs[0][name].shape != specs[1][name].shape or (
            specs[0][name].slot_names != specs[1][name].slot_names
        ):
            differences.append(TableDifference(name, note="the definitions differ"))
        else:
            left, right = (content_of(snapshot, specs[0][name]) for snapshot in pair)
            differences.append(_difference(name, specs[0][name], left, right))
    return differences


def _difference(
    name: str, spec: TableSpec, left: TableContent, right: TableContent
) -> TableDifference:
    steps = left.step, right.step
    if spec.kind == "dense":
        column_pairs = [
            (left.arrays[slot].reshape(-1), right.arrays[slot].reshape(-1))
            for slot in spec.slot_names
        ]
        missing = extra = 0
    else:
        ids, left_rows, right_rows = np.intersect1d(
            left.arrays["ids"], right.arrays["ids"], assume_unique=True, return_indices=True
        )
        missing, extra = (len(content.arrays["ids"]) - len(ids) for content in (left, right))
        column_pairs = [
            (left.arrays[slot][left_rows], right.arrays[slot][right_rows])
            for slot in spec.slot_names
        ]
    # Compare as integers, which means bit by bit: -0.0 differs from 0.0, and a NaN is equal to itself.
    differs = np.zeros(len(column_pairs[0][0]), np.bool_)
    for a, b in column_pairs:
        bits = np.ascontiguousarray(a).view(np.uint32) != np.ascontiguousarray(b).view(np.uint32)
        differs |= bits if bits.ndim == 1 else bits.any(axis=1)
    gaps = np.abs(column_pairs[0][0].astype(np.float64) - column_pairs[0][1].astype(np.float64))
    differing = int(differs.sum())
    largest = float(gaps.max(initial=0.0))
    return TableDifference(
        name, missing, extra, differing, len(differs) - differing, largest, steps
    )


def export(
    path: str,
    target: str,
    kind: ExportKind,
    ids: bool = False,
    tables: Collection[str] = (),
    rows: NDArray[np.int64] | None = None,
) -> list[Path]:
    """Write each table of a snapshot as one file of plain arrays, and return the paths of the files.

        export("snapshots/best", "out", "npz", tables=["embedding"])
        np.load("out/embedding.npz")["value"]  # float32 [n, dim]

    A sparse table's file has `ids`, int64 [n] in ascending order, the weights as `value` [n, dim], and one
    array [n, dim] for each state slot of the optimizer, such as Adam's first moment. A dense table's file
    has `value` and each state slot in the table's shape. Parquet files have columns of the same names. A
    cell is the list of values of one row, or of one index of a dense table's first axis. The metadata of a
    file (for npz the comment of the archive) has the name of the table and the version of this layout.

    Args:
        path: Folder or URL of the snapshot.
        target: Folder or URL for the files. It is created if necessary. After an error it has no new file.
        kind: Format of the files.
        ids: True to also write the ids of each sparse table as CSV.
        tables: Names of the tables to write, or () for all.
        rows: Ids of the rows to write, int64 [n], or None for all rows. Ids without a row are ignored.

    Raises:
        CheckpointError: The snapshot is damaged or has no such table, or the files cannot be written.
        ConfigError: `kind` is "parquet" and pyarrow is not installed.
    """
    if (url := url_of(target)) is not None:
        with tempfile.TemporaryDirectory(prefix="psfleet-") as staging:
            export(path, staging, kind, ids=ids, tables=tables, rows=rows)
            return [Path(name) for name in upload(Path(staging), url)]
    folder = local_path(target)
    snapshot = Snapshot(path)
    specs = known_tables(path, snapshot.specs(), tables)
    try:
        with _made(folder), tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as temporary:
            stems: set[str] = set()
            for spec in specs:
                arrays = content_of(snapshot, spec).arrays
                if rows is not None and spec.kind == "sparse":
                    mask = np.isin(arrays["ids"], rows)
                    arrays = {name: array[mask] for name, array in arrays.items()}
                stem = _file_name(spec.name, stems)
                _write_table(Path(temporary) / f"{stem}.{kind}", spec, arrays, kind)
                if ids and spec.kind == "sparse":
                    _write_ids(Path(temporary) / f"{stem}.csv", arrays["ids"])
            files = sorted(Path(temporary).iterdir())
            return [file.rename(folder / file.name) for file in files]
    except PsfleetError:
        raise
    except (OSError, SafetensorError, ValueError) as error:  # ValueError: an invalid file name
        raise CheckpointError(
            f"tables cannot be written to {target!r}: {reason(error)}; choose another folder"
        ) from None


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Return a context manager that creates a folder.

    If the block raises an error and the folder did not exist before, the folder is removed again.
    """
    was_there = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if not was_there:
            folder.rmdir()
        raise


def _file_name(table: str, names: set[str]) -> str:
    """Return a file name for a table, without its ending, and add the name to `names`.

    Names are shortened, because file systems allow only 255 bytes. Names that differ only in case get a
    number, because some file systems ignore case.
    """
    plain = re.sub(r"[^\w.+ -]", "_", table)
    start = plain.encode()[:_LONGEST].decode(errors="ignore").lstrip(".") or "_"
    name, number = start, 1
    while name.casefold() in names:
        number += 1
        name = f"{start}_{number}"
    names.add(name.casefold())
    return name


def _write_table(where: Path, spec: TableSpec, arrays: Arrays, kind: ExportKind) -> None:
    document = _EXPORT.document(table=spec.name, kind=spec.kind)
    if kind == "npz":
        np.savez(where, **arrays)  # type: ignore[arg-type]  # names are of arrays
        with zipfile.ZipFile(where, "a") as archive:
            archive.comment = json.dumps(document).encode()
    elif kind == "parquet":
        _write_parquet(where, arrays, {HEADER: json.dumps(document)})
    else:
        write_arrays(where, arrays, document)


def _write_parquet(where: Path, arrays: Arrays, metadata: Mapping[str, str]) -> None:
    from psfleet.core.base.arrow import pa, pq

    columns = {}
    for name, array in arrays.items():
        flat = pa.array(array.reshape(-1))
        width = int(np.prod(array.shape[1:])) if array.ndim > 1 else 0
        columns[name] = pa.FixedSizeListArray.from_arrays(flat, width) if width else flat
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), where)


def _write_ids(where: Path, ids: NDArray[np.int64]) -> None:
    with where.open("w", newline="") as file:
        csv.writer(file).writerows([["id"], *([int(i)] for i in ids)])


def import_rows(path: str, target: str, table: str, rows: RowFile) -> Manifest:
    """Write a full snapshot with rows added to one sparse table or replaced in it, and return its manifest.

        import_rows("snapshots/best", "imported", "items", read_rows("vectors.npz"))

    Imported rows count as updated by the table's last push, so that they do not expire at once. Their counts
    of shows and clicks are 0. They get the optimizer state in `rows` if `rows` has all state slots of the
    table, and initial state otherwise. All other rows and tables are unchanged.

    Args:
        path: Folder or URL of the snapshot.
        target: Folder or URL of the new snapshot.
        table: Name of the sparse table.
        rows: Rows to import. They replace rows of the snapshot with the same ids.

    Raises:
        CheckpointError: The snapshot has no such sparse table, or the rows do not fit it.
        UsageError: The table has a capacity, and the rows exceed it.
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
        target_table = shard.tables[spec.key]
        assert isinstance(target_table, SparseTable)
        is_owned = owned_rows(spec, rows.ids, shard.index, shard.servers)
        ids = rows.ids[is_owned]
        never_shown = np.zeros((len(ids), spec.scores), np.float32)
        steps = np.full(len(ids), target_table.clock.step)
        data = RowData(ids, np.ascontiguousarray(values[is_owned]), steps, never_shown)
        shard.fill(RestorePart(spec.key, target_table.clock, row_columns(data)))

    return rewrite(snapshot, target, len(snapshot.manifest.files), load)


def _with_state(spec: TableSpec, rows: RowFile) -> NDArray[np.float32]:
    """Return the weights and state of imported rows in the table's layout, float32 [n, dim * (1 + slots)]."""
    slots = [slot.name for slot in spec.rule.slots]
    if unusable := [name for name in slots if name in rows.unusable]:
        [name, *_] = unusable
        raise CheckpointError(
            f"the rows have the state {name!r} of table {spec.name!r}, which {rows.unusable[name]}; correct "
            "it, or leave it out so that state begins again"
        )
    if not all(name in rows.state for name in slots):
        state = [np.full_like(rows.value, slot.initial) for slot in spec.rule.slots]
        return np.concatenate([rows.value, *state], axis=1)
    state = [as_float32(rows.state[name]) for name in slots]
    for name, array in zip(slots, state, strict=True):
        finite = np.isfinite(array).all(axis=1)
        if not finite.all():
            bad = rows.ids[int(np.argmin(finite))]
            raise CheckpointError(f"the state {name!r} of the row of id {bad} is not finite")
    return np.concatenate([rows.value, *state], axis=1)
