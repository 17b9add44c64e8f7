"""Exported models: only weights, in one file of arrays that other programs read, and what they are.

    export.json        definitions of the tables, form of the rows, name of the file of arrays
    rows.<sha256>.npz  (or .safetensors, .pt) dense tables `value/<name>`; sparse ones `ids/<name>`, int64,
                       `rows/<name>` in the form, and `scales/<name>`, float32, where a row has a scale
    program.json, ...  of an inference model: its operations, as in the folder that was exported

export.json is written last, so that an export is there when it is whole. docs/formats.md has the layout.
"""

import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from psfleet.checkpoint.tensors import digest, read_arrays, write_arrays
from psfleet.errors import not_installed
from psfleet.formats import Format, Misfit, exact, reading
from psfleet.platform.files import read_small, regular, replace, sync
from psfleet.rules.momentum import SGD
from psfleet.schema.table import InitializerSpec, TableSpec
from psfleet.serving.row_source import ServedRows
from psfleet.serving.served_table import CODECS
from psfleet.settings.kinds import ArrayFormat, RowForm

EXPORT = "export.json"
Arrays = dict[str, NDArray[Any]]
_FORMAT = Format("exported model")
_ARRAYS = Format("arrays of an exported model")
_LONGEST = 64 << 20  # bytes of export.json


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
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise not_installed("files of the format torch need", "PyTorch", "torch") from None


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
    """Write all tables to a folder that is there, without the operations of a program."""
    arrays: Arrays = {}
    for name, spec in rows.specs().items():
        if spec.kind == "dense":
            arrays[f"value/{name}"] = np.ascontiguousarray(rows.dense(name))
            continue
        ids, codes, scales = rows.sparse[name].content()
        arrays |= {f"ids/{name}": ids, f"rows/{name}": codes}
        if len(scales):
            arrays[f"scales/{name}"] = scales
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
    """The weights of an exported model.

    Args:
        path: Its folder.
        rows_form: Form of the rows; None: the one in which they were exported.

    Raises:
        CheckpointError: The folder is no export, or damaged.
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
    if form == rows.form:
        rows.sparse[spec.name].put_codes(ids, codes, scales)
    else:
        rows.sparse[spec.name].put(ids, codec.decode(codes, scales, spec.dim))
