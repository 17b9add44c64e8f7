"""The snapshot of a trained model for other features: a plan, and the snapshot that it makes.

A table of the features that the snapshot lacks is added. Rows of one that gets wider keep their bits and
state, and new columns start as those of a new row do. Whatever cannot be taken over is refused by the plan,
before anything is written.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from psfleet.checkpoint.loading import Events, Snapshot, load_events
from psfleet.checkpoint.manifest import Manifest, chain
from psfleet.checkpoint.rewriting import grown_columns, grown_spec, rewrite, shape_text
from psfleet.checkpoint.tensors import place_of
from psfleet.core.base.errors import CheckpointError
from psfleet.core.engine.kernels.initial_values import initial_rows
from psfleet.core.engine.rules.rule import Rule
from psfleet.core.engine.schema.entry import CapacityEntry, part_of
from psfleet.core.engine.schema.table import OWN, DecaySpec, TableSpec
from psfleet.core.engine.shard.events import CreateTable, RestorePart
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.table_placement import dense_range, placed
from psfleet.core.engine.tables.row_data import EVICTED, candidate_group
from psfleet.data.feature_sets.feature_set import FeatureSet, Table
from psfleet.initializer import starting

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class TableChange:
    """Change of one table.

    Attributes:
        before: Its definition in the snapshot; None: it is new.
        after: Its definition in the migrated snapshot; None: it is dropped.
        rows: Number of its rows in the snapshot; of a dense table: values.
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
        """True if other servers hold it, or none before."""
        if self.before is None or self.after is None:
            return self.before is None
        return self.before.servers != self.after.servers

    def __str__(self) -> str:
        """Return its line of the plan."""
        spec = self.after or self.before
        assert spec is not None
        size = f"{self.rows:,} {'rows' if spec.kind == 'sparse' else 'values'}"
        if self.before is None or self.after is None:
            optimizer = f", {spec.rule.name}" if self.after else ""
            parts = [f"{spec.dim} wide{optimizer}" if spec.kind == "sparse" else "", size]
        else:
            shape = f"shape {shape_text(spec.shape)}" if spec.kind == "dense" else ""
            shape = "" if self.kind == "widen" else shape
            parts = [size, shape, *_differences(self.before, self.after)]
        return f"{self.kind} {spec.name}: {'; '.join(filter(None, parts))}"


def _differences(before: TableSpec, after: TableSpec) -> Iterator[str]:
    if before.shape != after.shape and after.kind == "dense":
        yield f"from {shape_text(before.shape)} to {shape_text(after.shape)}"
    elif before.shape != after.shape:
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
        snapshot: Snapshot to migrate.
        changes: Change of each table, new ones last.
    """

    snapshot: Snapshot
    changes: Sequence[TableChange]

    def __str__(self) -> str:
        """A line for each table, and one of what the plan cannot know."""
        specs = [one.after for one in self.changes if one.kind == "keep" and one.after]
        dense = [spec for spec in specs if spec.kind == "dense"]
        lines = list(map(str, self.changes))
        if dense and any(one.kind in ("add", "drop", "widen") for one in self.changes):
            lines.append(
                "dense tables keep their shapes: the model loads only if its own are the same; for one that "
                f"is not, name its new shape (--shape {dense[0].name}={shape_text(dense[0].shape)}) or leave "
                f"it behind (--drop {dense[0].name})"
            )
        return "\n".join(lines)

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
        load_events(shard, self._migrated(events, shard.index, shard.servers))

    def _migrated(self, events: Events, server: int, servers: int) -> Events:
        """Turn the events that fill a shard with the old tables into those for its part of the new ones."""
        by_key = {change.before.key: change for change in self.changes if change.before}
        for event in events:
            key = event.spec.key if isinstance(event, CreateTable) else event.table
            change = by_key[key]
            if change.after is None or change.before is None:
                continue
            if change.after.kind == "dense" and change.before.shape != change.after.shape:
                yield self._grown(event, change.before, change.after, server, servers)
            elif isinstance(event, CreateTable):
                yield replace(event, spec=change.after)
            else:
                yield replace(event, columns=_columns(change.before, change.after, event.columns))
        for change in self.changes:
            if change.before is None and change.after is not None:
                yield CreateTable(change.after, np.zeros(0, np.float32))

    def _grown(
        self, event: Any, before: TableSpec, after: TableSpec, server: int, servers: int
    ) -> CreateTable | RestorePart:
        """Return the event that creates or fills a server's part of a dense table with longer axes."""
        low, high = dense_range(after, server, servers)
        if isinstance(event, CreateTable):
            return replace(event, spec=after, value=np.zeros(high - low, np.float32))
        [whole] = self.snapshot.fills(before, 0, 1)
        columns = grown_columns(before, after, whole.columns)
        part = {name: np.ascontiguousarray(array[low:high]) for name, array in columns.items()}
        return replace(whole, columns=part)


def plan_migration(
    path: str | Path,
    features: FeatureSet,
    keep: Collection[str] = (),
    drop: Collection[str] = (),
    shapes: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Migration:
    """Plan the change of each table of a snapshot for a model with these features.

    Tables of the features are added, widened, moved to more or fewer servers, changed or kept. Dense tables
    and psfleet's own are kept. Sparse tables that the features do not name are dropped.

    Args:
        path: The snapshot.
        features: Features that the model is to have. A table without an optimizer has that of the
            snapshot; if the snapshot lacks it, the script makes it.
        keep: Names of sparse tables to keep although the features do not name them.
        drop: Names of tables that are not taken over: dense ones that do not fit the model any more, or
            those of features that are to start anew.
        shapes: By name the new shapes of dense tables that get longer axes.

    Raises:
        CheckpointError: The snapshot is damaged, a table cannot be taken over, or a name is unknown.
    """
    snapshot = Snapshot(path)
    before = {spec.name: spec for spec in snapshot.specs()}
    _check_names(str(path), list(before), [*keep, *shapes], drop)
    names = {*keep, *(name for name in before if name.startswith(OWN))}

    def after(spec: TableSpec, rows: int) -> TableSpec | None:
        if spec.name in drop:
            return None
        if spec.name in shapes:
            return grown_spec(spec, shapes[spec.name])
        if spec.name in features.tables:
            return _taken_over(spec, features.tables[spec.name], rows)
        return spec if spec.kind == "dense" or spec.name in names else None

    changes = []
    for spec in before.values():
        rows = _size(snapshot, spec)
        changes.append(TableChange(spec, after(spec, rows), rows))
    there = {change.after.name for change in changes if change.after}
    seed = _script_seed(before, features)
    additions = [
        TableChange(None, _added(table, seed))
        for table in features.tables.values()
        if table.name not in there and table.optimizer is not None
    ]
    return Migration(snapshot, _located([*changes, *additions]))


def _located(changes: Sequence[TableChange]) -> list[TableChange]:
    """The changes, with groups for the tables that are placed anew; the others stay where they are."""
    there = [one.after for one in changes if one.after and not one.is_placed_anew]
    placements = []
    for change in changes:
        after = change.after
        if after is not None and change.is_placed_anew:
            after = placed(replace(after, first=0), there)
            there.append(after)
        placements.append(replace(change, after=after))
    return placements


def _check_names(
    path: str, names: Sequence[str], keep: Collection[str], drop: Collection[str]
) -> None:
    for name in (*keep, *drop):
        if name not in names:
            raise CheckpointError(
                f"{path!r} has no table {name!r} to keep or to drop; it has {', '.join(names)}"
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

    seed: Seed of initializers without one of their own; scripts have one for all.
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
    if table.optimizer is not None and _optimizer(spec) != (optimizer := _optimizer_of(table)):
        raise CheckpointError(
            f"table {spec.name!r} was trained with {_said(_optimizer(spec))} and its features say "
            f"{_said(optimizer)}, which the state of its rows does not fit; keep the optimizer, {anew}"
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
    decay_text = f" and {decay}" if decay != DecaySpec() else ""
    return f"{rule}{decay_text}{', which updates every row' if every_row else ''}"


def _columns(
    before: TableSpec, after: TableSpec, columns: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Columns of a part of the old table as those of the new one."""
    out = dict(columns)
    if "ids" in out:
        out["scores"] = _scores(before, after, out)
    if not after.streams_evictions:
        for name in EVICTED:
            out.pop(name, None)
    if after.candidate != before.candidate:
        for name in candidate_group(before).entries:
            out.pop(name, None)
    if "rows" in out and after.shape != before.shape:
        out["rows"] = _widened(before, after, out["ids"], out["rows"])
    return out


def _scores(before: TableSpec, after: TableSpec, columns: Mapping[str, NDArray[Any]]) -> Floats:
    """The scores [n, after.scores] of rows; where no frequency was counted it is 1, as that of new rows."""
    count = len(columns["ids"])
    scores = np.ones((count, after.scores), np.float32)
    count_columns = after.pushed_scores
    if count_columns:
        scores[:, :count_columns] = columns["scores"][:, :count_columns]
    if before.counts_frequency:
        scores[:, count_columns:] = columns["scores"][:, before.pushed_scores :]
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
