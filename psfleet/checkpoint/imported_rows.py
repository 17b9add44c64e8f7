"""Rows of files in many formats, and whole tables of snapshots, as plain arrays."""

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from psfleet.checkpoint.loading import Snapshot
from psfleet.core.base.errors import CheckpointError, PsfleetError
from psfleet.core.base.files import reason
from psfleet.core.base.settings.kinds import local_path
from psfleet.core.engine.gradient_checks import as_float32, as_ids
from psfleet.core.engine.kernels.number_formats import decode
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.data.feature_sets.value_types import hashed

Arrays = Mapping[str, NDArray[Any]]
_COUNTS = re.compile(r"([0-9]{1,18})[ \t]([0-9]{1,18})")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+|nan|inf)(e[+-]?[0-9]+)?", re.IGNORECASE)


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
            return _of_words(path, buckets, salt)
        if Path(path).is_dir():
            return _of_snapshot(path, name)
        return _of_arrays(path, *_arrays(Path(path)), name)
    except PsfleetError:
        raise
    except Exception as error:  # there is no end to what a file can hold
        raise CheckpointError(f"{path!r} cannot be read: {reason(error)}") from None


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


def _arrays(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The arrays of a file by name, and for each that cannot be read the reason."""
    match path.suffix.lower():
        case ".npy":
            return {"value": np.load(path, allow_pickle=False)}, {}
        case ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return _each(archive.files, archive.__getitem__)
        case ".safetensors":
            with safe_open(path, "numpy") as file:
                return _each(file.keys(), lambda name: _tensor(path, file, name))
        case ".parquet":
            from psfleet.core.base.arrow import pq

            table = pq.ParquetFile(path).read()
            return _each(table.column_names, lambda name: _column(table.column(name)))
        case ".pt" | ".pth" | ".bin":
            tensors = dict(_torch_tensors(path))
            return _each(tensors, lambda name: tensors[name].numpy())
    raise CheckpointError(
        f"{str(path)!r} has the ending {path.suffix!r}; use .npy, .npz, .safetensors, .parquet, .pt, .txt "
        "or .vec, or the folder of a snapshot"
    )


def _each(
    names: Collection[str], read: Callable[[str], NDArray[Any]]
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    arrays, unusable = {}, {}
    for name in names:
        try:
            arrays[name] = read(name)
        except Exception as error:  # as of a number format that NumPy does not have
            unusable[name] = f"cannot be read: {reason(error)}"
    return arrays, unusable


def _tensor(path: Path, file: Any, name: str) -> NDArray[Any]:
    """A tensor of an open safetensors file. NumPy has no bfloat16, so these bytes are read here."""
    if file.get_slice(name).get_dtype() != "BF16":
        tensor: NDArray[Any] = file.get_tensor(name)
        return tensor
    with path.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        entry = json.loads(content.read(size))[name]
    start, end = entry["data_offsets"]
    halves = np.fromfile(path, "<u2", (end - start) // 2, offset=8 + size + start)
    return decode(halves.astype(np.uint16, copy=False).reshape(entry["shape"]), "bfloat16")


def _column(column: Any) -> NDArray[Any]:
    """A column, [n], or of lists of equally many numbers [n, dim].

    Raises:
        ValueError: A list of numbers is missing, or longer or shorter than the first, or lacks a number.
    """
    from psfleet.core.base.arrow import pa, pc

    if isinstance(column.type, pa.BaseExtensionType):
        column = column.cast(column.type.storage_type)
    if not pa.types.is_floating(getattr(column.type, "value_type", None) or pa.null()):
        return np.asarray(column)
    missing = np.asarray(pc.is_null(column))
    if missing.any():
        raise ValueError(f"row {np.argmax(missing)} is null")
    widths = np.asarray(pc.list_value_length(column))
    width = int(widths[0]) if len(widths) else getattr(column.type, "list_size", 0)
    if (widths != width).any():
        row = int(np.argmax(widths != width))
        raise ValueError(f"row {row} has {widths[row]} numbers, the rows before it {width}")
    numbers = pc.list_flatten(column)
    missing = np.asarray(pc.is_null(numbers))
    if missing.any():
        raise ValueError(f"row {np.argmax(missing) // width} has a null")
    return np.asarray(numbers).reshape(len(column), width)


def _torch_tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a file of torch as NumPy can have them, those in dicts as "dict.name"."""
    import torch

    def within(thing: Any, name: str) -> Iterator[tuple[str, Any]]:
        if isinstance(thing, torch.Tensor):
            tensor = thing.detach()  # of a Parameter too
            # bfloat16 and float8 are not of NumPy; float64 has to stay, for ids that are none.
            is_short = tensor.is_floating_point() and tensor.element_size() < 4
            yield name or "value", tensor.float() if is_short else tensor
        elif isinstance(thing, Mapping):
            for key, each in thing.items():
                yield from within(each, f"{name}.{key}" if name else str(key))

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # The class is asked for by name, since nothing that is shipped may import the module that has it.
        if type(error).__name__ != "UnpicklingError":
            raise
        raise CheckpointError(
            f"{str(path)!r} is no file of torch, or has more than tensors in dicts; save the state_dict() of "
            "the module"
        ) from None
    yield from within(content, "")


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


def _of_words(path: str, buckets: int, salt: str) -> RowFile:
    words: list[str] = []
    rows: list[NDArray[np.float32]] = []
    # GloVe has words with signs that Python takes for the end of a line.
    with Path(path).open(encoding="utf-8-sig", newline="\n") as file:
        stripped = ((number, line.rstrip("\r\n\t ")) for number, line in enumerate(file, 1))
        lines = ((number, line) for number, line in stripped if line)
        head = [*itertools.islice(lines, 2)]
        count = _count(head)
        for number, line in itertools.chain(head[count is not None :], lines):
            try:
                word, row = _word(line, len(rows[0]) if rows else None)
            except ValueError as error:
                raise CheckpointError(f"{path!r} line {number}: {error}") from None
            words.append(word)
            rows.append(row)
    if count not in (None, len(rows)):
        raise CheckpointError(
            f"{path!r} begins with the line {head[0][1]!r}, and {len(rows)} words follow; correct the number "
            f"of words, or write {head[0][1]}.0 if it is a word and its weight"
        )
    if not rows:
        raise CheckpointError(f"{path!r} has no words")
    ids = hashed(np.array(words, object), buckets, salt)
    return _checked(path, RowFile(ids, np.stack(rows)), words)


def _count(head: Sequence[tuple[int, str]]) -> int | None:
    """Return the number of words that the first line announces, or None if that line is itself a word."""
    match = _COUNTS.fullmatch(head[0][1]) if head else None
    if match is None or (len(head) > 1 and len(_split(head[1][1])[1]) != int(match[2])):
        return None
    return int(match[1])


def _word(line: str, width: int | None) -> tuple[str, NDArray[np.float32]]:
    """Return the word of a line and its weights, float32 [width].

    Args:
        line: The line without its end.
        width: Number of weights of the lines before, or None for the first line.

    Raises:
        ValueError: The line has no word or no weights, another number of weights, or a text among them.
    """
    word, *numbers = line.split(" ")
    if len(numbers) != width or "\t" in line:
        word, numbers = _split(line)
    if not word or not numbers:
        raise ValueError(
            f"{line!r:.60} must be a word, a blank or tab, and numbers with blanks or tabs"
        )
    if width not in (None, len(numbers)):
        raise ValueError(f"{word!r:.60} has {len(numbers)} numbers, the words before it {width}")
    for number in numbers:
        if "_" in number or not number.isascii():  # which Python's own float takes
            raise ValueError(f"{number!r:.60} is no number")
    with np.errstate(over="ignore"):
        return word, np.array(numbers, np.float32)


def _split(line: str) -> tuple[str, list[str]]:
    """Return the word of a line and its numbers as texts.

    The word ends at the first tab, or without a tab before the numbers at the end of the line.
    """
    word, tab, rest = line.partition("\t")
    if tab:
        return word, rest.split()
    fields = line.split(" ")
    start = len(fields)
    while start > 1 and _NUMBER.fullmatch(fields[start - 1]):
        start -= 1
    return " ".join(fields[:start]), fields[start:]


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
