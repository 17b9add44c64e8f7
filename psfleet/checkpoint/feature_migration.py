"""Migration of a trained model's snapshot to another feature set, without training from the start.

Over time features are added and removed, embeddings get wider, and a layer gets more inputs.
`plan_migration` compares the tables of a snapshot with those of the new features, and `Migration.apply`
writes the migrated snapshot:

    plan = plan_migration("snapshots/best", features, shapes={"fc_0.w": (128, 64)})
    print(plan)                      # add country: 8 wide, adagrad; 0 rows ...
    plan.apply("migrated")

Rows that are kept have bit-identical weights and optimizer state. If rows get wider, their new columns have
the initial values of a new row. Some changes would make the rows of a table meaningless, such as another
optimizer or narrower rows. The plan refuses these before anything is written, and the message says what to
do instead.
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
from psfleet.checkpoint.safetensors_files import place_of
from psfleet.core.base.errors import CheckpointError
from psfleet.core.base.panels.panel import counted
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
    """Change of one table by a migration.

    Attributes:
        before: Definition of the table in the snapshot, or None for a new table.
        after: Definition of the table in the migrated snapshot, or None for a table that is dropped.
        rows: Size of the table in the snapshot: number of rows, or of values of a dense table.
    """

    before: TableSpec | None
    after: TableSpec | None
    rows: int = 0

    @property
    def kind(self) -> Literal["add", "drop", "keep", "move", "widen", "change"]:
        """Kind of the change. "move" means that only the servers that hold the table differ."""
        if self.before is None or self.after is None:
            return "add" if self.after else "drop"
        if self.before == self.after:
            return "move" if self.is_placed_anew else "keep"
        return "widen" if self.before.shape != self.after.shape else "change"

    @property
    def is_placed_anew(self) -> bool:
        """True if servers must be chosen for the table: it is new, or will be on another number of
        servers.
        """
        if self.before is None or self.after is None:
            return self.before is None
        return self.before.servers != self.after.servers

    def __str__(self) -> str:
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
    return "all servers" if spec.servers is None else counted(spec.servers, "server")


@dataclass(frozen=True)
class Migration:
    """Plan of a migration. `print` shows it, and `apply` writes the migrated snapshot.

    Attributes:
        snapshot: Snapshot to migrate.
        changes: Change of each table. New tables come last.
    """

    snapshot: Snapshot
    changes: Sequence[TableChange]

    def __str__(self) -> str:
        """Return one line for each table, and a warning if dense tables may not fit the changed model.

        The plan knows the features, but not the script, and so cannot know the shapes of the model's dense
        layers.
        """
        specs = [change.after for change in self.changes if change.kind == "keep" and change.after]
        dense = [spec for spec in specs if spec.kind == "dense"]
        lines = list(map(str, self.changes))
        if dense and any(change.kind in ("add", "drop", "widen") for change in self.changes):
            lines.append(
                "dense tables keep their shapes: the model loads only if its own are the same; for one that "
                f"is not, name its new shape (--shape {dense[0].name}={shape_text(dense[0].shape)}) or leave "
                f"it behind (--drop {dense[0].name})"
            )
        return "\n".join(lines)

    def apply(self, target: str | Path) -> Manifest:
        """Write the migrated snapshot as a full snapshot, and return its manifest.

        It has as many files as the old snapshot, but can be loaded by any number of servers. The workers'
        positions in their data and the state that scripts have saved are copied from the old snapshot.

        Args:
            target: Folder or URL of the migrated snapshot.

        Raises:
            CheckpointError: The snapshot cannot be written, or `target` is the old snapshot or a base of it.
        """
        target_folder = place_of(target)
        if any(folder.resolve() == target_folder for folder, _ in chain(self.snapshot.path)):
            raise CheckpointError(
                f"the migrated snapshot would replace its source at {str(target)!r}; choose another folder"
            )
        servers = len(self.snapshot.manifest.files)
        return rewrite(self.snapshot, str(target), servers, self._load)

    def _load(self, shard: Shard) -> None:
        specs_by_key = {change.after.key: change.after for change in self.changes if change.after}
        events = self.snapshot.events(shard.index, shard.servers, there=specs_by_key)
        load_events(shard, self._migrated(events, shard.index, shard.servers))

    def _migrated(self, events: Events, server: int, servers: int) -> Events:
        """Yield the events that create and fill one shard's tables in the migrated snapshot.

        `events`: Events that would create and fill the shard's tables as they were before.
        """
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
        """Return the event that creates or fills a server's part of a dense table with longer axes.

        With longer axes, values get other indices in the flattened array, and may belong to other servers.
        So the whole table is read and enlarged, and the server's part is cut from it.
        """
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

        plan = plan_migration("snapshots/best", features, drop=["fc_0.w"])
        print(plan)
        plan.apply("migrated")

    - Tables of the features are added, widened, moved to more or fewer servers, changed or kept.
    - Sparse tables that the features do not name are dropped.
    - Dense tables and psfleet's own tables are kept.

    Args:
        path: Folder or URL of the snapshot.
        features: Features of the changed model. A table without an optimizer keeps the optimizer of its
            table in the snapshot. If the snapshot has no such table, the migration does not add it, and the
            script must create it.
        keep: Names of sparse tables to keep although the features do not name them.
        drop: Names of tables to drop: dense tables that do not fit the changed model, or tables of features
            that are to be trained from the start.
        shapes: New shapes of dense tables whose axes get longer, by table name.

    Raises:
        CheckpointError: The snapshot is damaged, a table cannot be migrated, or there is no table of a name.
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
    migrated_names = {change.after.name for change in changes if change.after}
    seed = _script_seed(before, features)
    additions = [
        TableChange(None, _added(table, seed))
        for table in features.tables.values()
        if table.name not in migrated_names and table.optimizer is not None
    ]
    return Migration(snapshot, _located([*changes, *additions]))


def _located(changes: Sequence[TableChange]) -> list[TableChange]:
    """Choose the servers that hold each new or moved table. Kept tables stay on their servers.

    Tables are placed one after the other, because each placement depends on those before it.
    """
    # Placement starts from the tables that stay on their servers. Each table that is placed is added below.
    placed_specs = [old.after for old in changes if old.after and not old.is_placed_anew]
    placements = []
    for change in changes:
        after = change.after
        if after is not None and change.is_placed_anew:
            after = placed(replace(after, first=0), placed_specs)
            placed_specs.append(after)
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
    """Return the seed that the script gives to initializers without a seed, or 0 if it is unknown.

    The snapshot shows it if it already has a table of the features with such an initializer.
    """
    for name, table in features.tables.items():
        if name in before and not getattr(table.initializer, "own_seed", 0):
            return before[name].seed
    return 0


def _size(snapshot: Snapshot, spec: TableSpec) -> int:
    if spec.kind == "dense":
        return spec.size
    return sum(len(fill.columns.get("ids", ())) for fill in snapshot.fills(spec, 0, 1))


def _added(table: Table, seed: int) -> TableSpec:
    """Return the definition of a new table: the same that the changed script will create the table with.

    Args:
        seed: Seed for an initializer without a seed. A script uses the same for all tables.
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
    """Return the new definition of a table that is both in the snapshot and in the features.

    Raises:
        CheckpointError: The rows cannot be used under the new definition.
    """
    anew = f"or start the table again with --drop {spec.name}"
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
    """Convert a page of rows to the columns of the new definition.

    Columns that the new definition lacks are left out.
    """
    out = dict(columns)
    if "ids" in out:
        out["scores"] = _scores(before, after, out)
    if not after.streams_evictions:
        for name in EVICTED:
            out.pop(name, None)
    # The new entry (admission rule) remembers other values of ids without a row, so the old values mean
    # nothing to it.
    if after.candidate != before.candidate:
        for name in candidate_group(before).entries:
            out.pop(name, None)
    if "rows" in out and after.shape != before.shape:
        out["rows"] = _widened(before, after, out["ids"], out["rows"])
    return out


def _scores(before: TableSpec, after: TableSpec, columns: Mapping[str, NDArray[Any]]) -> Floats:
    """Return the scores of rows under the new definition, float32 [n, after.scores].

    The first columns are the pushed scores (shows and clicks). If the table counts frequencies, the last
    column is the frequency. A frequency that was not counted before starts at 1, as in a new row.
    """
    count = len(columns["ids"])
    scores = np.ones((count, after.scores), np.float32)
    count_columns = after.pushed_scores
    if count_columns:
        scores[:, :count_columns] = columns["scores"][:, :count_columns]
    if before.counts_frequency:
        scores[:, count_columns:] = columns["scores"][:, before.pushed_scores :]
    return scores


def _widened(before: TableSpec, after: TableSpec, ids: Ids, rows: Floats) -> Floats:
    """Widen rows together with their optimizer state. A slot is a state value that the optimizer keeps for
    each weight.

        before:   w w | s s          each row, with one slot s
        after:    w w n | s s f      n: weight of a new row of the same id; f: initial value of the slot, or s
                                     if the whole row shares one value of the slot

    Args:
        ids: Ids of the rows, int64 [n].
        rows: Weights and state, float32 [n, before.dim * (1 + slots)].

    Returns:
        Weights and state, float32 [n, after.dim * (1 + slots)].
    """
    added_dim = after.dim - before.dim
    value, *slots = np.split(rows, 1 + len(before.rule.slots), axis=1)
    first = initial_rows(ids, after.dim, after.initializer, after.seed, after.name)
    parts = [value, first[:, before.dim :]]
    for slot, plane in zip(before.rule.slots, slots, strict=True):
        start = plane[:, :1] if slot.per_unit else np.float32(slot.initial)
        parts += [plane, np.broadcast_to(start, (len(ids), added_dim))]
    return np.concatenate(parts, axis=1, dtype=np.float32)
