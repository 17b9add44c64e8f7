"""Weights for prediction: read from a snapshot, an inference model or an export, and written as an export.

Models look rows up through the interface RowSource. ServedRows implements it with weights in memory, and
Follower (in follower.py) with those of a running job. SourceRuntime lets programs and torch modules read a
RowSource as if it were a fleet.

An export is a folder:

    export.json        definitions of the tables, number format of the rows, name of the file of arrays
    rows.<sha256>.npz  (or .safetensors, .pt) dense tables `value/<name>`; sparse ones `ids/<name>`, int64,
                       `rows/<name>`, and `scales/<name>`, float32, if the format has scales
    program.json, ...  of an inference model: its operations, as in the folder that was exported

export.json is written last, so a folder that has export.json is complete. docs/formats.md has the layout.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.checkpoint import Snapshot
from psfleet.checkpoint.safetensors_files import digest, read_arrays, write_arrays
from psfleet.core.base.errors import ConfigError, UnknownTable, optional_module
from psfleet.core.base.files import read_small, regular, replace, sync
from psfleet.core.base.json_documents import Format, Misfit, exact, reading
from psfleet.core.base.settings.kinds import ArrayFormat, RowForm
from psfleet.core.engine.kernels.id_routing import owned_by
from psfleet.core.engine.rules.momentum import SGD
from psfleet.core.engine.runtime_interface import Read, Runtime, missing_table
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec, key_of
from psfleet.core.engine.shard.events import CreateTable
from psfleet.core.engine.tables.row_data import ROW_IDS, rows_of
from psfleet.core.graph.execution.inference import saved_tables
from psfleet.core.runtime.runtime_bases import ReadOnlyRuntime, refused
from psfleet.serving.served_table import CODECS, ServedTable

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


EXPORT = "export.json"
Arrays = dict[str, NDArray[Any]]
_FORMAT = Format("exported model")
_ARRAYS = Format("arrays of an exported model")
_LONGEST = 64 << 20  # maximum bytes of export.json


class RowSource(Protocol):
    """Source of a model's weights: rows of sparse tables, and values of dense tables. Any thread
    may call it.
    """

    def specs(self) -> Mapping[str, TableSpec]:
        """Return the definition of each table, by name."""

    def look_up(self, table: str, ids: Ids) -> Floats:
        """Return the rows of ids, int64 [n], of a sparse table, as float32 [n, dim].

        An id without a row gets the initial value that it would have in training.

        Raises:
            UnknownTable: There is no sparse table of this name.
        """

    def dense(self, table: str) -> Floats:
        """Return the value of a dense table, float32 in the table's shape. Later changes do not affect the
        array.

        Raises:
            UnknownTable: There is no dense table of this name.
        """

    def held(self) -> AbstractContextManager[object]:
        """Return a context manager under which all lookups of this thread see the same state of the
        weights.
        """

    @property
    def cut(self) -> int:
        """Number of the cut, the training state that the present weights are from. It rises with
        each change.
        """

    @property
    def age(self) -> float | None:
        """Seconds since the training had the present values, or None if the source follows no training."""

    @property
    def bytes(self) -> int:
        """Memory that all values take, in bytes."""


class ServedRows:
    """Weights in the memory of this process. Implements RowSource.

    Args:
        source: Origin of the weights, for error messages.
        form: Number format of the rows of all sparse tables.

    Attributes:
        cut: Always 0, because the weights follow no training.
        age: Always None, because the weights follow no training.
        sparse: Sparse tables by name.
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
        """Memory that all values take, in bytes."""
        dense = sum(value.nbytes for _, value in self._dense.values())
        return dense + sum(table.bytes for table in self.sparse.values())

    def held(self) -> AbstractContextManager[object]:
        """Return a context manager under which lookups of other threads wait."""
        return self._lock

    def specs(self) -> Mapping[str, TableSpec]:
        sparse = {name: table.spec for name, table in self.sparse.items()}
        return sparse | {name: spec for name, (spec, _) in self._dense.items()}

    def has(self, table: str) -> bool:
        """Return True if there is a table of this name."""
        return table in self.sparse or table in self._dense

    def look_up(self, table: str, ids: Ids) -> Floats:
        rows = self.sparse.get(table)
        if rows is None:
            raise self._missing(table)
        with self._lock:
            return rows.look_up(ids)

    def dense(self, table: str) -> Floats:
        if table not in self._dense:
            raise self._missing(table)
        return self._dense[table][1]

    def _missing(self, table: str) -> UnknownTable:
        return UnknownTable(missing_table(table, list(self.specs())))

    def add(self, spec: TableSpec, value: Floats | None = None) -> None:
        """Add a table. A sparse table is empty at first. A dense table gets `value`, or zeros if that is
        None.
        """
        if spec.kind == "sparse":
            self.sparse[spec.name] = ServedTable(spec, self.form)
        else:
            zeros = np.zeros(spec.shape, np.float32)
            self._dense[spec.name] = spec, zeros if value is None else value.reshape(spec.shape)

    def put_dense(self, table: str, value: Floats) -> None:
        """Set the value of a dense table. The array is kept, so the caller must not change it afterwards."""
        spec, _ = self._dense[table]
        self._dense[table] = spec, value.reshape(spec.shape)


def rows_of_snapshot(
    path: str, form: RowForm = "float32", min_count: float = 0, part: tuple[int, int] = (0, 1)
) -> ServedRows:
    """Read the weights of a snapshot, without optimizer state.

    Args:
        form: Number format of the rows in memory.
        min_count: Minimum number of shows, or minimum frequency, of a row. Other rows are left out.
        part: Share of the ids to read, as (number from 0, number of parts). (0, 1) reads all ids.

    Raises:
        CheckpointError: The snapshot is missing, incomplete or damaged.
        ConfigError: `min_count` is set, and a table counts neither shows nor frequency.
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
                in_part = owned_by(ids, *part)
                ids, weights = ids[in_part], weights[in_part]
            rows.sparse[spec.name].put(ids, weights)
    return rows


def _counts(spec: TableSpec, scores: Floats) -> Floats:
    """Return the frequency of each row if the table counts frequencies, and otherwise its number of shows."""
    if not spec.scores:
        raise ConfigError(
            f"table {spec.name!r} does not count how often an id comes; train it with a ShowClickEntry, or "
            "a CapacityEntry with a policy of frequency, or export all of its rows"
        )
    counts: Floats = scores[:, -1] if spec.counts_frequency else scores[:, 0]
    return counts


def rows_of_program(path: str, form: RowForm = "float32") -> ServedRows:
    """Read the weights in the folder of an inference model.

    Raises:
        CheckpointError: The folder is no inference model, or is damaged.
    """
    rows = ServedRows(repr(path), form)
    for spec, ids, values in saved_tables(path):
        rows.add(spec, None if spec.kind == "sparse" else values)
        if ids is not None:
            rows.sparse[spec.name].put(ids, values)
    return rows


class SourceRuntime(ReadOnlyRuntime):
    """Read-only runtime whose tables have the values of a RowSource, for programs and torch modules.

    `read_table` and `evictions` raise an error, because a RowSource can look up ids but not list them.

    Args:
        name: Name of the source, for error messages.
        instead: Advice on how to change the tables, for error messages.
    """

    def __init__(self, rows: RowSource, name: str, instead: str = "train on a fleet") -> None:
        super().__init__(name, instead)
        self.rows = rows
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
        # A read names its table by key, and a RowSource by name. If a key is unknown, build the map again,
        # because a running job may have created tables.
        name, ids = self._names.get(read.table), read.ids
        if name is None:
            self._names = {key_of(name): name for name in self.rows.specs()}
            name = self._names[read.table]
        if ids is None:
            return self.rows.dense(name)
        rows = self.rows.look_up(name, np.ascontiguousarray(ids.reshape(-1)))
        return rows.reshape(*ids.shape, rows.shape[1])

    read_table = refused(Runtime.read_table, "be read whole")
    evictions = refused(Runtime.evictions, "tell of evictions")

    @override
    def stats(self) -> list[dict[str, Any]]:
        return []

    @override
    def close(self) -> None:
        """Do nothing, because the source belongs to the caller."""


@dataclass(frozen=True)
class _ArrayFile:
    ending: str
    write: Callable[[Path, Arrays], object]
    read: Callable[[Path], Arrays]


def _write_npz(where: Path, arrays: Arrays) -> None:
    with where.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # any name of a table may be a key


def _read_npz(where: Path) -> Arrays:
    with regular(where), np.load(where, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _torch() -> Any:
    return optional_module("torch", "files of the format torch need", "PyTorch", "torch")


def _write_torch(where: Path, arrays: Arrays) -> None:
    torch = _torch()
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, where)


def _read_torch(where: Path) -> Arrays:
    tensors = _torch().load(where, weights_only=True)
    return {name: tensor.numpy() for name, tensor in tensors.items()}


_FILES: dict[ArrayFormat, _ArrayFile] = {
    "npz": _ArrayFile("npz", _write_npz, _read_npz),
    "safetensors": _ArrayFile(
        "safetensors",
        lambda where, arrays: write_arrays(where, arrays, _ARRAYS.document()),
        lambda where: read_arrays(where, _ARRAYS)[1],
    ),
    "torch": _ArrayFile("pt", _write_torch, _read_torch),
}


def write_rows(folder: Path, rows: ServedRows, kind: ArrayFormat) -> None:
    """Write all tables to an existing folder: the file of arrays first, then export.json.

    The name of the file of arrays contains its SHA-256, so an export.json cannot be combined with another
    file.
    """
    arrays: Arrays = {}
    for name, spec in rows.specs().items():
        if spec.kind == "dense":
            arrays[f"value/{name}"] = np.ascontiguousarray(rows.dense(name))
            continue
        ids, codes, scales = rows.sparse[name].content()
        arrays |= {f"ids/{name}": ids, f"rows/{name}": codes}
        if len(scales):
            arrays[f"scales/{name}"] = scales
    # The arrays are on disk under their final name before export.json names them. So after a crash the
    # folder has no export.json, or the export is complete.
    file = _FILES[kind]
    partial = folder / f".rows.{os.getpid()}.partial"
    file.write(partial, arrays)
    sync(partial)
    where = folder / f"rows.{digest(partial)}.{file.ending}"
    partial.rename(where)
    document = _FORMAT.document(
        file=where.name,
        kind=kind,
        form=rows.form,
        tables=[_described(spec) for spec in rows.specs().values()],
    )
    replace(folder / EXPORT, lambda to: to.write_text(json.dumps(document, indent=1)))


def _described(spec: TableSpec) -> dict[str, Any]:
    start = spec.initializer
    return {
        "name": spec.name,
        "kind": spec.kind,
        "shape": spec.shape,
        "seed": spec.seed,
        "initializer": {"kind": start.kind, "low": start.low, "high": start.high},
    }


def rows_of_export(path: str, rows_form: RowForm | None = None) -> ServedRows:
    """Read the weights of an exported model.

    Args:
        rows_form: Number format of the rows in memory, or None to keep the format of the export.

    Raises:
        CheckpointError: The folder is no export, or is damaged.
    """
    where = Path(path, EXPORT)
    with reading(where):
        fields = _FORMAT.parse(read_small(where, _LONGEST))
        name, kind, form, tables = exact(
            fields, "export", file=str, kind=str, form=str, tables=list
        )
        if kind not in get_args(ArrayFormat) or form not in get_args(RowForm):
            raise Misfit(f"has the unknown format {kind!r:.60} or form {form!r:.60} of rows")
        file = where.parent / Path(name).name
        rows = ServedRows(repr(path), rows_form or form)
        with reading(file):
            if file.stem != f"rows.{digest(file)}":
                raise Misfit("is damaged: its checksum is not that of its name")
            arrays = _FILES[kind].read(file)
            for entry in tables:
                _fill(rows, _table(entry), arrays, form)
    return rows


def _table(entry: Any) -> TableSpec:
    kinds = {"name": str, "kind": str, "shape": list, "seed": int, "initializer": dict}
    name, kind, shape, seed, start = exact(entry, "table", **kinds)
    number = float | int
    values = exact(start, "initializer", kind=str, low=number, high=number)
    return TableSpec(
        name, kind, tuple(shape), SGD(), initializer=InitializerSpec(*values), seed=seed
    )


def _fill(
    rows: ServedRows, spec: TableSpec, arrays: Mapping[str, NDArray[Any]], form: RowForm
) -> None:
    if spec.kind == "dense":
        rows.add(spec, arrays[f"value/{spec.name}"])
        return
    ids, codes = arrays[f"ids/{spec.name}"], arrays[f"rows/{spec.name}"]
    codec = CODECS[form]
    if codes.shape != (len(ids), codec.width(spec.dim)) or codes.dtype != codec.dtype:
        raise Misfit(f"has rows of {spec.name!r} of the shape {codes.shape} and {codes.dtype}")
    rows.add(spec)
    scales = arrays.get(f"scales/{spec.name}", np.empty(0, np.float32))
    # Rows in the requested format are copied unchanged, so that they are not rounded twice.
    if form == rows.form:
        rows.sparse[spec.name].put_codes(ids, codes, scales)
    else:
        rows.sparse[spec.name].put(ids, codec.decode(codes, scales, spec.dim))
