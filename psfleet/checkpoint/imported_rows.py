"""Rows that a table can import, from a file in one of many formats or from another snapshot.

`read_rows` finds the reader of a file by its ending, and checks what the file has: one id for each row, no
id twice, finite weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.checkpoint.array_files import arrays_of
from psfleet.checkpoint.loading import Snapshot
from psfleet.checkpoint.table_content import content_of, sparse_table
from psfleet.checkpoint.word_vectors import word_rows
from psfleet.core.base.errors import CheckpointError, PsfleetError
from psfleet.core.base.files import reason
from psfleet.core.base.settings.kinds import local_path
from psfleet.core.engine.gradient_checks import as_float32, as_ids
from psfleet.data.feature_sets.value_types import hashed

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class RowFile:
    """Rows that were read.

    Attributes:
        ids: int64 [n], no id twice.
        value: Weights, float32 [n, dim].
        state: Further arrays [n, dim] of the file by name, such as the state slots of an export.
        unusable: Further arrays of the file by name that are not [n, dim] or cannot be read, with why.
    """

    ids: NDArray[np.int64]
    value: NDArray[np.float32]
    state: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)


def read_rows(path: str, name: str = "", buckets: int = 0, salt: str = "") -> RowFile:
    """The rows in a file.

    A `.npz`, `.safetensors`, `.parquet` or `.pt` file has arrays by name: the weights [n, dim], and their
    ids under "ids" or, for "X.weight", "X.ids". Without ids, and in a `.npy` file, row k has the id k. A
    tensor in a dict of a `.pt` file has the names of both, such as "state_dict.X.weight". A `.txt` or `.vec`
    file is in the text format of word2vec and GloVe: each line a word, a blank or tab, and its weights, with
    or without a first line of counts; the ids are the words' hashes. A folder is a snapshot.

    Args:
        path: The file.
        name: Name of the weights, or its end behind a dot; of a snapshot the table; "": "value", or the only
            array [n, dim].
        buckets, salt: Range and salt of the hashes, as of a hashed Feature.

    Raises:
        CheckpointError: It cannot be read, or what it has cannot be rows; the error names the file.
    """
    local_path(path)
    try:
        if Path(path).suffix.lower() in (".txt", ".vec"):
            words, value = word_rows(path)
            ids = hashed(np.array(words, object), buckets, salt)
            return _checked(path, RowFile(ids, value), words)
        if Path(path).is_dir():
            return _of_snapshot(path, name)
        return _of_arrays(path, *arrays_of(Path(path)), name)
    except PsfleetError:
        raise
    except Exception as error:  # there is no end to what a file can hold
        raise CheckpointError(f"{path!r} cannot be read: {reason(error)}") from None


def _of_arrays(path: str, arrays: Arrays, unusable: dict[str, str], name: str) -> RowFile:
    wide = [n for n, array in arrays.items() if array.ndim == 2 and array.dtype.kind == "f"]
    wide += unusable
    wanted = name or "value"
    keys = [n for n in wide if n == wanted] or [n for n in wide if n.endswith(f".{wanted}")]
    if not keys and not name:
        keys = wide
    if len(keys) != 1:
        content = (
            f"no array {name!r}, or several,"
            if name
            else "several arrays, or none, that may be the weights"
        )
        raise CheckpointError(
            f"{path!r} has {content}; name one of float [n, dim]: {', '.join(wide) or 'there is none'}"
        )
    [key] = keys
    prefix = key.rpartition(".")[0]
    ids_key = f"{prefix}.ids" if prefix else "ids"
    for each in {key, ids_key} & unusable.keys():
        raise CheckpointError(f"{path!r}: {each!r} {unusable[each]}")
    value, ids = as_float32(arrays[key]), arrays.get(ids_key)
    others = {n: array for n, array in arrays.items() if n not in (key, ids_key)}
    state = {n: array for n, array in others.items() if array.shape == value.shape}
    unusable |= {n: f"has the shape {a.shape}" for n, a in others.items() if n not in state}
    owner = f"{path!r}: {ids_key!r}"
    numbers = np.arange(len(value)) if ids is None else as_ids(ids, owner)
    return _checked(path, RowFile(numbers, value, state, unusable))


def _of_snapshot(path: str, name: str) -> RowFile:
    snapshot = Snapshot(path)
    spec = sparse_table(path, snapshot.specs(), name)
    arrays = content_of(snapshot, spec).arrays
    state = {slot: arrays[slot] for slot in spec.slot_names[1:]}
    return _checked(path, RowFile(arrays["ids"], arrays["value"], state))


def _checked(path: str, rows: RowFile, words: Sequence[str] = ()) -> RowFile:
    ids, value = np.ascontiguousarray(rows.ids), rows.value
    if ids.shape != value.shape[:1]:
        raise CheckpointError(f"{path!r} has {len(value)} rows and ids of shape {ids.shape}")
    unique, counts = np.unique(ids, return_counts=True)
    if len(unique) < len(ids):
        repeated = unique[counts > 1][0]
        places = np.flatnonzero(ids == repeated)[:2]
        of = f", of {' and '.join(repr(words[place]) for place in places)}" if words else ""
        raise CheckpointError(
            f"{path!r} has two rows of the id {repeated}{of}; each id has one row"
        )
    finite = np.isfinite(value).all(axis=1)
    if not finite.all():
        place = int(np.argmin(finite))
        of = repr(words[place]) if words else f"id {ids[place]}"
        raise CheckpointError(f"{path!r}: the row of {of} is not finite")
    return replace(rows, ids=ids)
