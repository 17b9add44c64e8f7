"""Snapshots written anew, for other servers or longer tables, or as files for other programs; compared."""

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
from psfleet.checkpoint.table_content import TableContent, content_of, known_tables, sparse_table
from psfleet.checkpoint.tensors import HEADER, write_arrays
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
_LONGEST = 200  # bytes of a file's name before its ending


def shape_text(shape: Sequence[int]) -> str:
    """A shape as the command line has it, such as "113x64"."""
    return "x".join(map(str, shape))


def grown_spec(spec: TableSpec, shape: Sequence[int]) -> TableSpec:
    """The definition of a table of the snapshot with longer axes.

    Raises:
        CheckpointError: It is sparse, or an axis would get shorter.
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
            f"{shape_text(shape)}; give it no shorter axis, or start it anew with --drop {spec.name}"
        )
    return replace(spec, shape=tuple(shape))


def grown_columns(
    before: TableSpec, after: TableSpec, columns: Mapping[str, Floats]
) -> dict[str, Floats]:
    """The whole columns of a table, flat, as those of the longer one.

    New weights come behind the others along each axis, with the first values of the table's initializer;
    new state is the slot's first value, or that of the weights with which it is shared.
    """
    old = tuple(map(slice, before.shape))
    value = initial_array(after.shape, after.initializer, after.seed, after.name)
    planes = {"value": value}
    for slot in before.rule.slots:
        planes[slot.name] = np.full(after.shape, slot.initial, np.float32)
        if slot.per_unit and before.size:
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
    """Difference between two versions of one table.

    Attributes:
        table: Its name.
        missing: Rows (dense: values) that only the first snapshot has.
        added: Those that only the second one has.
        changed: Those of both that differ in any bit, optimizer state included.
        equal: Those that do not.
        largest: Largest difference of a weight.
        steps: Updates of the table in either.
        note: Reason for which the rows could not be compared.
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
        """True if every bit is the same."""
        differing = self.missing or self.added or self.changed or self.note
        return not differing and self.steps[0] == self.steps[1]


def reshard(path: str, target: str, servers: int) -> Manifest:
    """Write the snapshot anew as one of `servers` servers, whole by itself; its manifest.

    Raises:
        CheckpointError: It is damaged, or the target is something else.
    """
    if servers < 1:
        raise CheckpointError(f"a snapshot of {servers} servers is wanted; use at least 1")
    snapshot = Snapshot(path)
    return rewrite(snapshot, target, servers, snapshot.load)


def rewrite(
    snapshot: Snapshot, target: str, servers: int, load: Callable[[Shard], None]
) -> Manifest:
    """Write a snapshot with the tables that `load` makes, whole by itself; its manifest.

    Args:
        snapshot: Snapshot to write.
        target: Path of the new one.
        servers: Number of servers of the new one.
        load: Makes an empty shard hold its part of them.

    Raises:
        CheckpointError: The target is something else, or cannot be written.
    """
    state = snapshot.server(0)
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
    """List the differences between two snapshots, table by table."""
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
        both = [
            (left.arrays[slot].reshape(-1), right.arrays[slot].reshape(-1))
            for slot in spec.slot_names
        ]
        missing = extra = 0
    else:
        ids, ours, theirs = np.intersect1d(
            left.arrays["ids"], right.arrays["ids"], assume_unique=True, return_indices=True
        )
        missing, extra = (len(each.arrays["ids"]) - len(ids) for each in (left, right))
        both = [(left.arrays[slot][ours], right.arrays[slot][theirs]) for slot in spec.slot_names]
    differs = np.zeros(len(both[0][0]), np.bool_)
    for a, b in both:
        bits = np.ascontiguousarray(a).view(np.uint32) != np.ascontiguousarray(b).view(np.uint32)
        differs |= bits if bits.ndim == 1 else bits.any(axis=1)
    gaps = np.abs(both[0][0].astype(np.float64) - both[0][1].astype(np.float64))
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
    """Write each table as one file of plain arrays; returns the files.

    Sparse: `ids`, ascending, `value` [n, dim] and each state slot; dense: `value` and each slot in the
    table's shape. In Parquet these are columns with a list for each row, of a dense table for each index of
    its first axis. The metadata of a file, of npz its comment, name the table and the version of this layout.

    Args:
        path: The snapshot.
        target: A folder or URL; it is made. It gets all the files or none.
        kind: Kind of the files.
        ids: Write the ids of each sparse table as CSV too.
        tables: Names of those that are wanted; empty: all.
        rows: Only rows of these ids, int64 [n]; None: all. Ids without a row are left out.

    Raises:
        CheckpointError: The snapshot is damaged, has no such table, or the files cannot be written.
        ConfigError: pyarrow is wanted and missing.
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
    except (OSError, SafetensorError, ValueError) as error:  # ValueError: no name of a file
        raise CheckpointError(
            f"tables cannot be written to {target!r}: {reason(error)}; choose another folder"
        ) from None


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Within, the folder is there; if that comes to no end it is as it was."""
    was_there = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if not was_there:
            folder.rmdir()
        raise


def _file_name(table: str, names: set[str]) -> str:
    """A name for the files of a table, unlike those that are taken.

    Not all of the name if it is long: a file has 255 bytes for its own. Case does not count, for
    some file systems do not know it.
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
    """Write a snapshot anew with rows of a table set, whole by itself; its manifest.

    Rows that are set count as pushed by the table's last update, and as never shown. Their state is that of
    `rows` if these have all state slots of the table, else its first values. Other rows and tables stay as
    they are.

    Args:
        path: The snapshot.
        target: Path of the new snapshot.
        table: The name of the table.
        rows: Rows to set; ids that have a row already get these values.

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
        target_table = shard.tables[spec.key]
        assert isinstance(target_table, SparseTable)
        mine = owned_rows(spec, rows.ids, shard.index, shard.servers)
        ids = rows.ids[mine]
        never_shown = np.zeros((len(ids), spec.scores), np.float32)
        steps = np.full(len(ids), target_table.clock.step)
        data = RowData(ids, np.ascontiguousarray(values[mine]), steps, never_shown)
        shard.fill(RestorePart(spec.key, target_table.clock, row_columns(data)))

    return rewrite(snapshot, target, len(snapshot.manifest.files), load)


def _with_state(spec: TableSpec, rows: RowFile) -> NDArray[np.float32]:
    """Weights and state, float32 [n, dim * (1 + slots)]."""
    slots = [slot.name for slot in spec.rule.slots]
    if unusable := [name for name in slots if name in rows.unusable]:
        [name, *_] = unusable
        raise CheckpointError(
            f"the rows have the state {name!r} of table {spec.name!r}, which {rows.unusable[name]}; correct "
            "it, or leave it out so that state begins anew"
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
