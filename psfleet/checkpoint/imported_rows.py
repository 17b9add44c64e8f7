"""Rows of files in many formats, and whole tables of snapshots, as plain arrays."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from psfleet.checkpoint.loading import Snapshot
from psfleet.core.base.errors import CheckpointError, PsfleetError
from psfleet.core.base.files import reason
from psfleet.core.base.settings.kinds import local_path
from psfleet.core.engine.gradient_checks import as_ids
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.data.feature_sets.value_types import hashed


@dataclass(frozen=True)
class TableContent:
    """A whole table.

    Attributes:
        arrays: By name. Sparse: `ids` int64 [n], ascending, `value` float32 [n, dim] and each state slot
            likewise. Dense: `value` and each slot in the table's shape.
        step: Number of updates that it has had.
    """

    arrays: dict[str, NDArray[Any]]
    step: int


def content_of(snapshot: Snapshot, spec: TableSpec) -> TableContent:
    """All of a table of a snapshot."""
    shard = Shard()
    shard.create(spec, np.zeros(spec.size if spec.kind == "dense" else 0, np.float32))
    for fill in snapshot.fills(spec, 0, 1):
        shard.fill(fill)
    table = shard.tables[spec.key]
    if isinstance(table, DenseTable):
        planes = [plane.reshape(spec.shape) for plane in table.state()]
        return TableContent(dict(zip(spec.slot_names, planes, strict=True)), table.step)
    rows = table.rows(table.ids())
    planes = np.split(rows.values, len(spec.slot_names), axis=1)
    slots = dict(zip(spec.slot_names, map(np.ascontiguousarray, planes), strict=True))
    return TableContent({"ids": rows.ids, **slots}, table.step)


Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class RowFile:
    """Rows that were read.

    Attributes:
        ids: int64 [n], no id twice.
        value: Weights, float32 [n, dim].
        state: Further arrays [n, dim] of the file by name, such as the state slots of an export.
    """

    ids: NDArray[np.int64]
    value: NDArray[np.float32]
    state: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


def read_rows(path: str, name: str = "", buckets: int = 0, salt: str = "") -> RowFile:
    """The rows in a file.

    A `.npz`, `.safetensors`, `.parquet` or `.pt` (a state dict of torch) file has arrays by name: the
    weights [n, dim], and their ids under "ids" or, for "X.weight", "X.ids". Without ids, and in a `.npy`
    file, row k has the id k. A `.txt` or `.vec` file is in word2vec's text format: each line a word and its
    weights, with or without a first line of counts; the ids are the words' hashes. A folder is a snapshot.

    Args:
        path: The file.
        name: Name of the weights, of a snapshot the table; "": "value", or the only array [n, dim].
        buckets, salt: Range and salt of the hashes, as of a hashed Feature.

    Raises:
        CheckpointError: It cannot be read, or what it has cannot be rows; the error names the file.
    """
    local_path(path)
    try:
        if Path(path).suffix in (".txt", ".vec"):
            file = _of_words(path, buckets, salt)
        elif Path(path).is_dir():
            file = _of_snapshot(path, name)
        else:
            file = _of_arrays(path, _arrays(Path(path)), name)
    except PsfleetError:
        raise
    except Exception as error:  # there is no end to what a file can hold
        raise CheckpointError(f"{path!r} cannot be read: {reason(error)}") from None
    return _checked(path, file)


def known_tables(path: str, specs: Sequence[TableSpec], names: Collection[str]) -> list[TableSpec]:
    """The tables of these names; all if there are none.

    Raises:
        CheckpointError: There is no such table.
    """
    by_name = {spec.name: spec for spec in specs}
    for name in names:
        if name not in by_name:
            raise CheckpointError(f"{path!r} has no table {name!r}; it has {', '.join(by_name)}")
    return [by_name[name] for name in names] if names else list(specs)


def sparse_table(path: str, specs: Sequence[TableSpec], name: str) -> TableSpec:
    """The sparse table of this name.

    Raises:
        CheckpointError: There is no such table, or it is dense.
    """
    [spec] = known_tables(path, specs, [name])
    if spec.kind != "sparse":
        raise CheckpointError(f"table {name!r} of {path!r} is dense; only rows can be imported")
    return spec


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    match path.suffix:
        case ".npy":
            return {"value": np.load(path, allow_pickle=False)}
        case ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return dict(archive)
        case ".safetensors":
            with safe_open(path, "numpy") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        case ".parquet":
            from psfleet.core.base.arrow import pq

            table = pq.read_table(path)
            return {name: _column(table.column(name)) for name in table.column_names}
        case ".pt" | ".pth" | ".bin":
            import torch

            state = torch.load(path, map_location="cpu", weights_only=True)
            tensors = {n: t for n, t in state.items() if isinstance(t, torch.Tensor)}
            return {
                name: (tensor.float() if tensor.is_floating_point() else tensor).numpy()
                for name, tensor in tensors.items()
            }
    raise CheckpointError(
        f"{str(path)!r} has the ending {path.suffix!r}; use .npy, .npz, .safetensors, .parquet, .pt, .txt "
        "or .vec, or the folder of a snapshot"
    )


def _column(column: Any) -> NDArray[Any]:
    """A column of numbers, or of lists of equally many."""
    array = column.combine_chunks()
    if not hasattr(array.type, "value_type"):
        return np.asarray(array)
    return np.asarray(array.flatten()).reshape(len(array), -1)


def _of_arrays(path: str, arrays: Arrays, name: str) -> RowFile:
    wide = [n for n, array in arrays.items() if array.ndim == 2 and array.dtype.kind == "f"]
    key = name or ("value" if "value" in wide else "") or (wide[0] if len(wide) == 1 else "")
    if key not in wide:
        content = (
            f"no array {name!r}" if name else "several arrays, or none, that may be the weights"
        )
        raise CheckpointError(
            f"{path!r} has {content}; name one of float [n, dim]: {', '.join(wide) or 'there is none'}"
        )
    value = arrays[key]
    prefix = key.rpartition(".")[0]
    ids = arrays.get(f"{prefix}.ids" if prefix else "ids")
    others = {n: a for n, a in arrays.items() if n != key and a.shape == value.shape}
    return RowFile(np.arange(len(value)) if ids is None else as_ids(ids, path), value, others)


def _of_snapshot(path: str, name: str) -> RowFile:
    snapshot = Snapshot(path)
    spec = sparse_table(path, snapshot.specs(), name)
    arrays = content_of(snapshot, spec).arrays
    state = {slot: arrays[slot] for slot in spec.slot_names[1:]}
    return RowFile(arrays["ids"], arrays["value"], state)


def _of_words(path: str, buckets: int, salt: str) -> RowFile:
    words: list[str] = []
    rows: list[NDArray[np.float32]] = []
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            word, *numbers = line.rstrip().split(" ")
            if number == 1 and len(numbers) == 1 and word.isdecimal():
                continue  # how many words there are, and how wide
            try:
                row = np.array(numbers, np.float32)
            except ValueError as error:
                raise CheckpointError(f"{path!r} line {number}: {error}") from None
            if rows and len(row) != len(rows[0]):
                raise CheckpointError(
                    f"{path!r} line {number}: {word!r:.60} has {len(row)} numbers, the words before it "
                    f"{len(rows[0])}"
                )
            words.append(word)
            rows.append(row)
    if not rows:
        raise CheckpointError(f"{path!r} has no words")
    return RowFile(hashed(np.array(words, object), buckets, salt), np.stack(rows))


def _checked(path: str, rows: RowFile) -> RowFile:
    ids, value = np.ascontiguousarray(rows.ids), np.asarray(rows.value, np.float32)
    if ids.shape != value.shape[:1]:
        raise CheckpointError(f"{path!r} has {len(value)} rows and ids of shape {ids.shape}")
    unique, counts = np.unique(ids, return_counts=True)
    if len(unique) < len(ids):
        raise CheckpointError(
            f"{path!r} has two rows of the id {unique[counts > 1][0]}; each id has one row"
        )
    finite = np.isfinite(value).all(axis=1)
    if not finite.all():
        raise CheckpointError(f"{path!r}: the row of id {ids[~finite][0]} is not finite")
    state = {name: np.asarray(array, np.float32) for name, array in rows.state.items()}
    return RowFile(ids, value, state)
