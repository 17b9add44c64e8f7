"""Snapshots written anew, for other servers or with longer dense tables, and compared."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from psfleet.checkpoint.imported_rows import TableContent, content_of
from psfleet.checkpoint.loading import Snapshot
from psfleet.checkpoint.manifest import Manifest
from psfleet.checkpoint.writing import SnapshotDraft, write_frozen
from psfleet.errors import CheckpointError
from psfleet.faults import CrashFaults
from psfleet.kernels.initial_values import initial_array
from psfleet.schema.table import TableSpec
from psfleet.shard.shard import Shard

Floats = NDArray[np.float32]


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
    with SnapshotDraft(target, CrashFaults.wanted()) as draft:
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
