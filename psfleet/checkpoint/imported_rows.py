"""Reading of rows to import into a sparse table, from a file of another program or from a snapshot.

`psfleet ckpt import` starts a table with pretrained embeddings in this way. `read_rows` chooses the reader
by the ending of the file's name. It checks that each row has an id, that no id occurs twice, and that all
weights are finite. The whole file is read into memory.
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
    """Ids and weights to import, with optimizer state if the file has it.

    Attributes:
        ids: int64 [n]. No id occurs twice.
        value: Weights, float32 [n, dim].
        state: Other arrays [n, dim] of the file by name, such as the optimizer's state slots in an export.
        unusable: Maps the name of each array that was left out to the reason: it is not [n, dim], or cannot
            be read.
    """

    ids: NDArray[np.int64]
    value: NDArray[np.float32]
    state: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)


def read_rows(path: str, name: str = "", buckets: int = 0, salt: str = "") -> RowFile:
    """Read rows to import from a file or a snapshot.

        read_rows("item_vectors.npz")                     # arrays "value" and "ids"
        read_rows("model.pt", "items.weight")             # a tensor of a state dict
        read_rows("glove.6B.100d.txt", buckets=1 << 20)   # words; their ids are hashes
        read_rows("snapshots/best", "embedding")          # a table of a snapshot

    - `.npz`, `.safetensors`, `.parquet` and `.pt` files have arrays by name. The weights "X.weight" have
      their ids in "X.ids", and weights without a dot in their name have them in "ids". If there is no such
      array, row k has the id k. A tensor in a dict of a `.pt` file is named with the dict's key, such as
      "state_dict.X.weight".
    - A `.npy` file has only weights, and row k has the id k.
    - `.txt` and `.vec` files have the text format of word2vec and GloVe. Each line is a word, a blank or
      tab, and the word's weights. The first line may be the number of words and of weights. The ids are
      hashes of the words.
    - A folder is a snapshot.

    Args:
        path: Path of the file or snapshot.
        name: Name of the array with the weights, or the end of this name after a dot. For a snapshot, name
            of the table. "" chooses the array "value", or the only float array [n, dim].
        buckets, salt: Range and salt of the hashes of words, as in a hashed Feature.

    Raises:
        CheckpointError: The file cannot be read, or does not contain rows. The message names the file.
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
    except Exception as error:  # other libraries may raise any error
        raise CheckpointError(f"{path!r} cannot be read: {reason(error)}") from None


def _of_arrays(path: str, arrays: Arrays, unusable: dict[str, str], name: str) -> RowFile:
    wide = [n for n, array in arrays.items() if array.ndim == 2 and array.dtype.kind == "f"]
    wide += unusable
    wanted_name = name or "value"
    keys = [n for n in wide if n == wanted_name] or [
        n for n in wide if n.endswith(f".{wanted_name}")
    ]
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
    for unusable_key in {key, ids_key} & unusable.keys():
        raise CheckpointError(f"{path!r}: {unusable_key!r} {unusable[unusable_key]}")
    value, ids = as_float32(arrays[key]), arrays.get(ids_key)
    other_arrays = {n: array for n, array in arrays.items() if n not in (key, ids_key)}
    state = {n: array for n, array in other_arrays.items() if array.shape == value.shape}
    unusable |= {n: f"has the shape {a.shape}" for n, a in other_arrays.items() if n not in state}
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
        row_numbers = np.flatnonzero(ids == repeated)[:2]
        of = f", of {' and '.join(repr(words[row]) for row in row_numbers)}" if words else ""
        raise CheckpointError(
            f"{path!r} has two rows of the id {repeated}{of}; each id has one row"
        )
    finite = np.isfinite(value).all(axis=1)
    if not finite.all():
        bad_row = int(np.argmin(finite))
        of = repr(words[bad_row]) if words else f"id {ids[bad_row]}"
        raise CheckpointError(f"{path!r}: the row of {of} is not finite")
    return replace(rows, ids=ids)
