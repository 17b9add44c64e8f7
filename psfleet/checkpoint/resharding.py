"""A snapshot with other numbers of servers, or compared with another."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from psfleet.checkpoint.draft import SnapshotDraft
from psfleet.checkpoint.loading import Snapshot
from psfleet.checkpoint.manifest import Manifest
from psfleet.checkpoint.table_content import TableContent, content_of
from psfleet.checkpoint.writing import write_frozen
from psfleet.errors import CheckpointError
from psfleet.faults.crash_points import CrashFaults
from psfleet.schema.table import TableSpec
from psfleet.shard.shard import Shard

__all__ = ["TableDifference", "compare", "reshard", "rewrite"]


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
    snapshot = Snapshot(path)
    return rewrite(snapshot, target, servers, snapshot.load)


def rewrite(
    snapshot: Snapshot, target: str, servers: int, load: Callable[[Shard], None]
) -> Manifest:
    """Write a snapshot with the tables that `load` makes, whole by itself; its manifest.

    Args:
        snapshot: What is written.
        target: Where.
        servers: As how many servers.
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
            left, right = (content_of(snapshot, specs[0][name]) for snapshot in pair)
            found.append(_difference(name, specs[0][name], left, right))
    return found


def _difference(
    name: str, spec: TableSpec, left: TableContent, right: TableContent
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
