"""Rows and dense values of a model that predicts: where they come from, and how they are kept."""

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.checkpoint import Snapshot
from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.errors import ConfigError, UnknownTable
from psfleet.execution.inference import saved_tables
from psfleet.kernels.hashing import owned_by
from psfleet.runtime.interface import Read, missing_table
from psfleet.runtime.runtime_bases import ForwardingRuntime, ReadOnlyRuntime
from psfleet.schema.table import TableSpec, key_of
from psfleet.serving.served_table import ServedTable
from psfleet.settings.kinds import RowForm
from psfleet.shard.events import CreateTable
from psfleet.tables.row_data import ROW_IDS, rows_of

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class RowSource(Protocol):
    """Source of a model's rows and dense values. Any thread may call it."""

    def specs(self) -> Mapping[str, TableSpec]:
        """The tables by name."""

    def look_up(self, table: str, ids: Ids) -> Floats:
        """The rows of ids, int64 [n], of a sparse table: float32 [n, dim].

        An id without a row has the first value that it would have in training.

        Raises:
            UnknownTable: There is no such sparse table.
        """

    def dense(self, table: str) -> Floats:
        """The value of a dense table, float32 in its shape; it is not changed later.

        Raises:
            UnknownTable: There is no such dense table.
        """

    def held(self) -> AbstractContextManager[object]:
        """Within, all look-ups of this thread are of one cut."""

    @property
    def cut(self) -> int:
        """Number of the cut of the training that the values are of; it rises with each change."""

    @property
    def age(self) -> float | None:
        """Seconds since the values were the training's; None: it follows no training."""

    @property
    def bytes(self) -> int:
        """Memory of all values."""


class ServedRows:
    """Rows and dense values in this process. Implements RowSource.

    Args:
        source: Name of where they come from, for messages.
        form: Form of the rows of all sparse tables.

    Attributes:
        cut: Number of the cut that the values are of.
        age: None: they follow no training.
    """

    def __init__(self, source: str, form: RowForm = "float32") -> None:
        self.source = source
        self.form: RowForm = form
        self.cut = 0
        self.age: float | None = None
        self.sparse: dict[str, ServedTable] = {}
        self._dense: dict[str, tuple[TableSpec, Floats]] = {}
        self._lock = threading.RLock()

    @property
    def bytes(self) -> int:
        """Memory of all values."""
        dense = sum(value.nbytes for _, value in self._dense.values())
        return dense + sum(table.bytes for table in self.sparse.values())

    def held(self) -> AbstractContextManager[object]:
        """Within, no other thread changes a value."""
        return self._lock

    def specs(self) -> Mapping[str, TableSpec]:
        """See RowSource.specs."""
        sparse = {name: table.spec for name, table in self.sparse.items()}
        return sparse | {name: spec for name, (spec, _) in self._dense.items()}

    def has(self, table: str) -> bool:
        """Return whether there is a table of this name."""
        return table in self.sparse or table in self._dense

    def look_up(self, table: str, ids: Ids) -> Floats:
        """See RowSource.look_up."""
        rows = self.sparse.get(table)
        if rows is None:
            raise self._missing(table)
        with self._lock:
            return rows.look_up(ids)

    def dense(self, table: str) -> Floats:
        """See RowSource.dense."""
        if table not in self._dense:
            raise self._missing(table)
        return self._dense[table][1]

    def _missing(self, table: str) -> UnknownTable:
        return UnknownTable(missing_table(table, list(self.specs())))

    def add(self, spec: TableSpec, value: Floats | None = None) -> None:
        """Add a table; a dense one has this value, or zeros."""
        if spec.kind == "sparse":
            self.sparse[spec.name] = ServedTable(spec, self.form)
        else:
            zeros = np.zeros(spec.shape, np.float32)
            self._dense[spec.name] = spec, zeros if value is None else value.reshape(spec.shape)

    def put_dense(self, table: str, value: Floats) -> None:
        """Set the value of a dense table; the array is not to be changed any more."""
        spec, _ = self._dense[table]
        self._dense[table] = spec, value.reshape(spec.shape)


def rows_of_snapshot(
    path: str, form: RowForm = "float32", min_count: float = 0, part: tuple[int, int] = (0, 1)
) -> ServedRows:
    """The weights of a snapshot, without optimizer state.

    Args:
        path: Its folder.
        form: Form of the rows.
        min_count: Rows with fewer shows, or of less frequency, are left out.
        part: Number of the part of the ids that is read, and of all parts: (0, 1) is all.

    Raises:
        CheckpointError: It is missing, incomplete or damaged.
        ConfigError: A table does not count.
    """
    snapshot, rows = Snapshot(path), ServedRows(repr(path), form)
    specs = {spec.key: spec for spec in snapshot.specs()}
    for event in snapshot.events(0, 1):
        if isinstance(event, CreateTable):
            rows.add(event.spec)
            continue
        spec = specs[event.table]
        if spec.kind == "dense":
            rows.put_dense(spec.name, event.columns[spec.slot_names[0]])
        elif ROW_IDS in event.columns:
            page = rows_of(spec, event.columns)
            weights = np.ascontiguousarray(page.values[:, : spec.dim])
            mask: Any = slice(None)
            if min_count:
                mask = _counts(spec, page.scores) >= min_count
            ids, weights = page.ids[mask], weights[mask]
            if part[1] > 1:
                own = owned_by(ids, *part)
                ids, weights = ids[own], weights[own]
            rows.sparse[spec.name].put(ids, weights)
    return rows


def _counts(spec: TableSpec, scores: Floats) -> Floats:
    """Return how often each row was shown, or its frequency where the table counts that."""
    if not spec.scores:
        raise ConfigError(
            f"table {spec.name!r} does not count how often an id comes; train it with a ShowClickEntry, or "
            "a CapacityEntry with a policy of frequency, or export all of its rows"
        )
    counts: Floats = scores[:, -1] if spec.counts_frequency else scores[:, 0]
    return counts


def rows_of_program(path: str, form: RowForm = "float32") -> ServedRows:
    """The weights of an inference model.

    Raises:
        CheckpointError: The folder is no inference model, or damaged.
    """
    rows = ServedRows(repr(path), form)
    for spec, ids, values in saved_tables(path):
        rows.add(spec, None if spec.kind == "sparse" else values)
        if ids is not None:
            rows.sparse[spec.name].put(ids, values)
    return rows


class SourceRuntime(ReadOnlyRuntime, ForwardingRuntime):
    """Implements psfleet.runtime.interface.Runtime on a RowSource, for programs and modules.

    Args:
        rows: Source of the values.
        name: Name of the source, for messages.
    """

    def __init__(self, rows: RowSource, name: str) -> None:
        super().__init__(EmbeddedRuntime(only_reads=True))
        self.rows, self.source = rows, name
        self.instead = "train on a fleet"
        self._names: dict[int, str] = {}

    @override
    def specs(self) -> dict[int, TableSpec]:
        return {spec.key: spec for spec in self.rows.specs().values()}

    @override
    def open(self, name: str) -> TableSpec:
        specs = self.rows.specs()
        if name not in specs:
            raise UnknownTable(missing_table(name, list(specs)))
        return specs[name]

    @override
    def pull(self, reads: Sequence[Read]) -> list[Floats]:
        if len(reads) == 1:
            return [self._pull(reads[0])]
        with self.rows.held():
            return [self._pull(read) for read in reads]

    def _pull(self, read: Read) -> Floats:
        name, ids = self._names.get(read.table), read.ids
        if name is None:
            self._names = {key_of(name): name for name in self.rows.specs()}
            name = self._names[read.table]
        if ids is None:
            return self.rows.dense(name)
        rows = self.rows.look_up(name, np.ascontiguousarray(ids.reshape(-1)))
        return rows.reshape(*ids.shape, rows.shape[1])
