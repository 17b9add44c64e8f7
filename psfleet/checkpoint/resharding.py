"""A snapshot with other numbers of servers, compared with another, or as plain arrays."""

import contextlib
import csv
import json
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from psfleet.checkpoint.draft import SnapshotDraft
from psfleet.checkpoint.loading import Events, Snapshot
from psfleet.checkpoint.manifest import Manifest
from psfleet.checkpoint.tensors import write_arrays
from psfleet.checkpoint.writing import write_frozen
from psfleet.errors import CheckpointError, PsfleetError
from psfleet.faults.crash_points import CrashFaults
from psfleet.formats.document import Format
from psfleet.platform.atomic_files import reason
from psfleet.schema.table import TableSpec
from psfleet.shard.shard import Shard
from psfleet.tables.dense import DenseTable

__all__ = ["TableDifference", "compare", "export", "reshard", "rewrite"]

_EXPORT = Format("exported table")
_LONGEST = 200  # bytes of a file's name before its ending


@dataclass(frozen=True)
class TableDifference:
    """What differs in one table.

    Attributes:
        table: Its name.
        missing: Rows (dense: values) that only the first snapshot has.
        added: Those that only the second one has.
        changed: Those of both that differ in any bit, optimizer state included.
        equal: Those that do not.
        largest: Largest difference of a weight.
        steps: Updates of the table in either.
        note: Why the rows could not be compared.
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
        """Whether every bit is the same."""
        differing = self.missing or self.added or self.changed or self.note
        return not differing and self.steps[0] == self.steps[1]


def reshard(path: str, target: str, servers: int) -> Manifest:
    """Write the snapshot anew as one of `servers` servers, whole by itself; its manifest.

    Raises:
        CheckpointError: It is damaged, or the target is something else.
    """
    if servers < 1:
        raise CheckpointError(f"a snapshot of {servers} servers is wanted; use at least 1")
    return rewrite(Snapshot(path), target, servers)


def rewrite(
    snapshot: Snapshot, target: str, servers: int, changed: Callable[[Events], Events] = iter
) -> Manifest:
    """Write a snapshot anew, whole by itself; its manifest.

    Args:
        snapshot: What is written.
        target: Where.
        servers: As how many servers.
        changed: What makes an empty shard, of what makes it hold its part of the snapshot's tables.

    Raises:
        CheckpointError: The target is something else, or cannot be written.
    """
    state = snapshot.server(0)
    files, specs = [], []
    with SnapshotDraft(target, CrashFaults.wanted()) as draft:
        for index in range(servers):
            shard = Shard(index, servers)
            snapshot.load(shard, changed)
            specs = [table.spec for table in shard.tables.values()]
            with contextlib.closing(shard.freeze()) as frozen:
                files.append(write_frozen(draft.folder, frozen, state))
        manifest = replace(snapshot.manifest, files=tuple(files), tables=tuple(specs), base=None)
        draft.finish(manifest)
    return manifest


def compare(first: str, second: str) -> list[TableDifference]:
    """What differs between two snapshots, table by table."""
    pair = Snapshot(first), Snapshot(second)
    specs = [{spec.name: spec for spec in snapshot.specs()} for snapshot in pair]
    found = []
    for name in sorted({*specs[0], *specs[1]}):
        if name not in specs[0] or name not in specs[1]:
            where = first if name in specs[0] else second
            found.append(TableDifference(name, note=f"only {where} has it"))
        elif specs[0][name].shape != specs[1][name].shape or (
            specs[0][name].slot_names != specs[1][name].slot_names
        ):
            found.append(TableDifference(name, note="the definitions differ"))
        else:
            left, right = (_content(snapshot, specs[0][name]) for snapshot in pair)
            found.append(_difference(name, specs[0][name], left, right))
    return found


def export(path: str, target: str, kind: Literal["safetensors", "npz"], ids: bool) -> list[Path]:
    """Write each table as one file of plain arrays; returns the files.

    Sparse: `ids`, ascending, `value` [n, dim] and each state slot; dense: `value` and each slot in the
    table's shape. The metadata of a safetensors file and the comment of an npz file name the table and
    the version of this layout.

    Args:
        path: The snapshot.
        target: A folder; it is made. It gets all the files or none.
        kind: Of the files.
        ids: Write the ids of each sparse table as CSV too.

    Raises:
        CheckpointError: The snapshot is damaged, or the files cannot be written.
    """
    snapshot = Snapshot(path)
    folder = Path(target)
    try:
        with _made(folder), tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as temporary:
            stems: set[str] = set()
            for spec in snapshot.specs():
                stem = _file_name(spec.name, stems)
                _write_table(Path(temporary), stem, spec, _content(snapshot, spec), kind, ids)
            written = sorted(Path(temporary).iterdir())
            return [file.rename(folder / file.name) for file in written]
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


def _file_name(table: str, taken: set[str]) -> str:
    """A name for the files of a table, unlike those that are taken.

    Not all of the name if it is long: a file has 255 bytes for its own. Case does not count, for
    some file systems do not know it.
    """
    plain = re.sub(r"[^\w.+ -]", "_", table)
    start = plain.encode()[:_LONGEST].decode(errors="ignore").lstrip(".") or "_"
    name, number = start, 1
    while name.casefold() in taken:
        number += 1
        name = f"{start}_{number}"
    taken.add(name.casefold())
    return name


def _write_table(
    folder: Path, stem: str, spec: TableSpec, content: "_TableContent", kind: str, ids: bool
) -> None:
    where = folder / f"{stem}.{kind}"
    document = _EXPORT.document(table=spec.name, kind=spec.kind)
    if kind == "npz":
        np.savez(where, **content.arrays)  # type: ignore[arg-type]  # names are of arrays
        with zipfile.ZipFile(where, "a") as archive:
            archive.comment = json.dumps(document).encode()
    else:
        write_arrays(where, content.arrays, document)
    if ids and spec.kind == "sparse":
        with where.with_name(f"{stem}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["id"], *([int(i)] for i in content.arrays["ids"])])


@dataclass(frozen=True)
class _TableContent:
    """A whole table: its arrays by name, rows in ascending order of id."""

    arrays: dict[str, NDArray[np.generic]]
    step: int


def _content(snapshot: Snapshot, spec: TableSpec) -> _TableContent:
    shard = Shard()
    shard.create(spec, np.zeros(spec.size if spec.kind == "dense" else 0, np.float32))
    for fill in snapshot.fills(spec, 0, 1):
        shard.fill(fill)
    table = shard.tables.find(spec.key)
    if isinstance(table, DenseTable):
        planes = [plane.reshape(spec.shape) for plane in table.state()]
        return _TableContent(dict(zip(spec.slot_names, planes, strict=True)), table.step)
    rows = table.rows(table.ids())
    planes = np.split(rows.values, len(spec.slot_names), axis=1)
    named = dict(zip(spec.slot_names, map(np.ascontiguousarray, planes), strict=True))
    return _TableContent({"ids": rows.ids, **named}, table.step)


def _difference(
    name: str, spec: TableSpec, left: _TableContent, right: _TableContent
) -> TableDifference:
    steps = left.step, right.step
    if spec.kind == "dense":
        both = [
            (left.arrays[slot].reshape(-1), right.arrays[slot].reshape(-1))
            for slot in spec.slot_names
        ]
        missing = added = 0
    else:
        ids, ours, theirs = np.intersect1d(
            left.arrays["ids"], right.arrays["ids"], assume_unique=True, return_indices=True
        )
        missing, added = len(left.arrays["ids"]) - len(ids), len(right.arrays["ids"]) - len(ids)
        both = [(left.arrays[slot][ours], right.arrays[slot][theirs]) for slot in spec.slot_names]
    differs = np.zeros(len(both[0][0]), np.bool_)
    for a, b in both:
        bits = np.ascontiguousarray(a).view(np.uint32) != np.ascontiguousarray(b).view(np.uint32)
        differs |= bits if bits.ndim == 1 else bits.any(axis=1)
    gaps = np.abs(both[0][0].astype(np.float64) - both[0][1].astype(np.float64))
    changed = int(differs.sum())
    largest = float(gaps.max(initial=0.0))
    return TableDifference(name, missing, added, changed, len(differs) - changed, largest, steps)
