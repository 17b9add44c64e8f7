"""The snapshot of a trained model for other features: a plan, and the snapshot that it makes.

A table of the features that the snapshot lacks is added. Rows of one that gets wider keep their bits and
state, and new columns start as those of a new row do. Whatever cannot be taken over is refused by the plan,
before anything is written.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from psfleet.checkpoint.leftovers import place_of
from psfleet.checkpoint.loading import Events, Snapshot, load_events
from psfleet.checkpoint.manifest import Manifest, chain
from psfleet.checkpoint.resharding import rewrite
from psfleet.errors import CheckpointError
from psfleet.feature_sets.feature_set import FeatureSet, Table
from psfleet.kernels.initial_values import initial_rows
from psfleet.parameters.initializer import starting
from psfleet.rules.rule import Rule
from psfleet.schema.entry import CapacityEntry, part_of
from psfleet.schema.table import OWN, DecaySpec, TableSpec
from psfleet.shard.events import CreateTable
from psfleet.shard.server_group import placed
from psfleet.shard.shard import Shard
from psfleet.tables.snapshot_columns import EVICTED, candidate_group

__all__ = ["Migration", "TableChange", "plan_migration"]

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class TableChange:
    """What becomes of one table.

    Attributes:
        before: Its definition in the snapshot; None: it is new.
        after: Its definition in the migrated snapshot; None: it is dropped.
        rows: How many rows it has in the snapshot; of a dense table: values.
    """

    before: TableSpec | None
    after: TableSpec | None
    rows: int = 0

    @property
    def kind(self) -> Literal["add", "drop", "keep", "move", "widen", "change"]:
        """In a word."""
        if self.before is None or self.after is None:
            return "add" if self.after else "drop"
        if self.before == self.after:
            return "move" if self.is_placed_anew else "keep"
        return "widen" if self.before.shape != self.after.shape else "change"

    @property
    def is_placed_anew(self) -> bool:
        """Whether other servers hold it, or none before."""
        if self.before is None or self.after is None:
            return self.before is None
        return self.before.servers != self.after.servers

    def __str__(self) -> str:
        """As a line of the plan."""
        spec = self.after or self.before
        assert spec is not None
        size = f"{self.rows:,} {'rows' if spec.kind == 'sparse' else 'values'}"
        if self.before is None or self.after is None:
            optimizer = f", {spec.rule.name}" if self.after else ""
            said = [f"{spec.dim} wide{optimizer}" if spec.kind == "sparse" else "", size]
        else:
            said = [size, *_differences(self.before, self.after)]
        return f"{self.kind} {spec.name}: {'; '.join(filter(None, said))}"


def _differences(before: TableSpec, after: TableSpec) -> Iterator[str]:
    if before.shape != after.shape:
        yield f"from {before.dim} to {after.dim} wide"
    if (before.initializer, before.seed) != (after.initializer, after.seed):
        yield f"new rows start from {after.initializer}, seed {after.seed}"
    if before.precision != after.precision:
        yield f"rows in {after.precision} in place of {before.precision}"
    if before.entry != after.entry:
        yield f"entry {after.entry} in place of {before.entry}"
    if before.servers != after.servers:
        yield f"on {_where(after)} in place of {_where(before)}"


def _where(spec: TableSpec) -> str:
    if spec.servers is None:
        return "all servers"
    return f"{spec.servers} server{'s' if spec.servers > 1 else ''}"


@dataclass(frozen=True)
class Migration:
    """A plan. Nothing is written before `apply`.

    Attributes:
        snapshot: What is migrated.
        changes: Of each table, new ones last.
    """

    snapshot: Snapshot
    changes: Sequence[TableChange]

    def __str__(self) -> str:
        """A line for each table."""
        return "\n".join(map(str, self.changes))

    def apply(self, target: str | Path) -> Manifest:
        """Write the migrated snapshot, whole by itself, in as many files as the old one has.

        It loads on any number of servers. Positions of workers in their data, and what their scripts
        remember, are those of the old one.

        Raises:
            CheckpointError: The target is the snapshot itself, or one that it builds on, or it cannot
                be written.
        """
        place = place_of(target)
        if any(folder.resolve() == place for folder, _ in chain(self.snapshot.path)):
            raise CheckpointError(
                f"the migrated snapshot would replace its source at {str(target)!r}; choose another folder"
            )
        servers = len(self.snapshot.manifest.files)
        return rewrite(self.snapshot, str(target), servers, self._load)

    def _load(self, shard: Shard) -> None:
        there = {change.after.key: change.after for change in self.changes if change.after}
        events = self.snapshot.events(shard.index, shard.servers, there=there)
        load_events(shard, self._migrated(events))

    def _migrated(self, events: Events) -> Events:
        """What makes a shard hold its part of the new tables, from what makes it hold the old ones."""
        by_key = {change.before.key: change for change in self.changes if change.before}
        for event in events:
            key = event.spec.key if isinstance(event, CreateTable) else event.table
            change = by_key[key]
            if change.after is None or change.before is None:
                continue
            if isinstance(event, CreateTable):
                yield replace(event, spec=change.after)
            else:
                yield replace(event, columns=_columns(change.before, change.after, event.columns))
        for change in self.changes:
            if change.before is None and change.after is not None:
                yield CreateTable(change.after, np.zeros(0, np.float32))


def plan_migration(
    path: str | Path, features: FeatureSet, keep: Collection[str] = (), drop: Collection[str] = ()
) -> Migration:
    """What becomes of each table of a snapshot when the model's features are these.

    Tables of the features are added, widened, moved to more or fewer servers, changed or kept. Dense tables
    and psfleet's own are kept. Sparse tables that the features do not name are dropped.

    Args:
        path: The snapshot.
        features: What the model is to have. A table without an optimizer has that of the snapshot; if the
            snapshot lacks it, the script makes it.
        keep: Names of sparse tables to keep although the features do not name them.
        drop: Names of tables that are not taken over: dense ones that do not fit the model any more, or
            those of features that are to start anew.

    Raises:
        CheckpointError: The snapshot is damaged, a table cannot be taken over, or a name is unknown.
    """
    snapshot = Snapshot(path)
    before = {spec.name: spec for spec in snapshot.specs()}
    _check_names(str(path), list(before), keep, drop)
    kept = {*keep, *(name for name in before if name.startswith(OWN))}

    def after(spec: TableSpec, rows: int) -> TableSpec | None:
        if spec.name in drop:
            return None
        if spec.name in features.tables:
            return _taken_over(spec, features.tables[spec.name], rows)
        return spec if spec.kind == "dense" or spec.name in kept else None

    changes = []
    for spec in before.values():
        rows = _size(snapshot, spec)
        changes.append(TableChange(spec, after(spec, rows), rows))
    there = {change.after.name for change in changes if change.after}
    seed = _script_seed(before, features)
    added = [
        TableChange(None, _added(table, seed))
        for table in features.tables.values()
        if table.name not in there and table.optimizer is not None
    ]
    return Migration(snapshot, _located([*changes, *added]))


def _located(changes: Sequence[TableChange]) -> list[TableChange]:
    """The changes, with groups for the tables that are placed anew; the others stay where they are."""
    there = [one.after for one in changes if one.after and not one.is_placed_anew]
    found = []
    for change in changes:
        after = change.after
        if after is not None and change.is_placed_anew:
            after = placed(replace(after, first=0), there)
            there.append(after)
        found.append(replace(change, after=after))
    return found


def _check_names(
    path: str, known: Sequence[str], keep: Collection[str], drop: Collection[str]
) -> None:
    for name in (*keep, *drop):
        if name not in known:
            raise CheckpointError(
                f"{path!r} has no table {name!r} to keep or to drop; it has {', '.join(known)}"
            )
        if name in keep and name in drop:
            raise CheckpointError(f"table {name!r} cannot be both kept and dropped; choose one")


def _script_seed(before: Mapping[str, TableSpec], features: FeatureSet) -> int:
    """The seed that the script gives to initializers without one, as far as the snapshot tells."""
    for name, table in features.tables.items():
        if name in before and not getattr(table.initializer, "own_seed", 0):
            return before[name].seed
    return 0


def _size(snapshot: Snapshot, spec: TableSpec) -> int:
    if spec.kind == "dense":
        return spec.size
    return sum(len(fill.columns.get("ids", ())) for fill in snapshot.fills(spec, 0, 1))


def _added(table: Table, seed: int) -> TableSpec:
    """The definition that scripts will give a new table.

    seed: Of initializers without a seed of their own; scripts have one for all.
    """
    start, seed = starting(table.initializer, (None, table.dim), seed, f"table {table.name!r}")
    rule, decay, every_row = _optimizer_of(table)
    return TableSpec(
        table.name,
        "sparse",
        (table.dim,),
        rule,
        decay,
        start,
        seed,
        every_row,
        table.entry,
        servers=table.servers,
        precision=table.precision,
    )


def _taken_over(spec: TableSpec, table: Table, rows: int) -> TableSpec:
    """The new definition of a table of the snapshot that has so many rows.

    Raises:
        CheckpointError: Its rows mean nothing under that definition.
    """
    anew = f"or start the table anew with --drop {spec.name}"
    if spec.kind == "dense":
        raise CheckpointError(
            f"table {spec.name!r} is dense in the snapshot and a feature's rows are sparse; give the "
            f"feature's table another name, {anew}"
        )
    if table.dim < spec.dim:
        raise CheckpointError(
            f"table {spec.name!r} is {spec.dim} wide in the snapshot and {table.dim} in the features; rows "
            f"cannot get narrower: keep dim {spec.dim}, {anew}"
        )
    start, seed = starting(table.initializer, (None, table.dim), spec.seed, f"table {spec.name!r}")
    after = replace(
        spec,
        shape=(table.dim,),
        initializer=start,
        seed=seed,
        entry=table.entry,
        servers=table.servers,
        precision=table.precision,
    )
    if table.optimizer is not None and _optimizer(spec) != (wanted := _optimizer_of(table)):
        raise CheckpointError(
            f"table {spec.name!r} was trained with {_said(_optimizer(spec))} and its features say "
            f"{_said(wanted)}, which the state of its rows does not fit; keep the optimizer, {anew}"
        )
    _check_entry(spec, after, rows, anew)
    return after


def _check_entry(spec: TableSpec, after: TableSpec, rows: int, anew: str) -> None:
    if after.pushed_scores and not spec.pushed_scores:
        raise CheckpointError(
            f"table {spec.name!r} has counted no shows and clicks, which its new entry {after.entry} needs: "
            f"the next shrink would remove every row; keep the entry {spec.entry}, {anew}"
        )
    capacity = part_of(after.entry, CapacityEntry)
    if capacity is not None and 0 < capacity.rows < rows:
        raise CheckpointError(
            f"table {spec.name!r} has {rows} rows and its new entry {capacity} holds {capacity.rows}; let "
            f"rows go with fleet.shrink before, give it more room, {anew}"
        )


def _optimizer(spec: TableSpec) -> tuple[Rule, DecaySpec, bool]:
    return spec.rule, spec.decay, spec.every_row


def _optimizer_of(table: Table) -> tuple[Rule, DecaySpec, bool]:
    return table.optimizer.rule(), table.optimizer.decay(), table.optimizer.every_row


def _said(optimizer: tuple[Rule, DecaySpec, bool]) -> str:
    rule, decay, every_row = optimizer
    decayed = f" and {decay}" if decay != DecaySpec() else ""
    return f"{rule}{decayed}{', which updates every row' if every_row else ''}"


def _columns(
    before: TableSpec, after: TableSpec, columns: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Columns of a part of the old table as those of the new one."""
    found = dict(columns)
    if "ids" in found:
        found["scores"] = _scores(before, after, found)
    if not after.streams_evictions:
        for name in EVICTED:
            found.pop(name, None)
    if after.candidate != before.candidate:
        for name in candidate_group(before).entries:
            found.pop(name, None)
    if "rows" in found and after.shape != before.shape:
        found["rows"] = _widened(before, after, found["ids"], found["rows"])
    return found


def _scores(before: TableSpec, after: TableSpec, columns: Mapping[str, NDArray[Any]]) -> Floats:
    """The scores [n, after.scores] of rows; where no frequency was counted it is 1, as that of new rows."""
    count = len(columns["ids"])
    scores = np.ones((count, after.scores), np.float32)
    shown = after.pushed_scores
    if shown:
        scores[:, :shown] = columns["scores"][:, :shown]
    if before.counts_frequency:
        scores[:, shown:] = columns["scores"][:, before.pushed_scores :]
    return scores


def _widened(before: TableSpec, after: TableSpec, ids: Ids, rows: Floats) -> Floats:
    """Rows with their state in a wider table.

    Args:
        before, after: Its definitions.
        ids: int64 [n].
        rows: float32 [n, before.dim * (1 + slots)].

    Returns:
        float32 [n, after.dim * (1 + slots)]. New weights are those of the ids' first rows, new state is
        the slot's first value, or that of the row where a whole row shares it.
    """
    more = after.dim - before.dim
    value, *slots = np.split(rows, 1 + len(before.rule.slots), axis=1)
    first = initial_rows(ids, after.dim, after.initializer, after.seed, after.name)
    parts = [value, first[:, before.dim :]]
    for slot, plane in zip(before.rule.slots, slots, strict=True):
        start = plane[:, :1] if slot.per_unit else np.float32(slot.initial)
        parts += [plane, np.broadcast_to(start, (len(ids), more))]
    return np.concatenate(parts, axis=1, dtype=np.float32)
