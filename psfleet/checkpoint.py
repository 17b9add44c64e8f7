"""Checkpoints: a folder of safetensors files, one per server, and a manifest that makes it whole.

    model/
      manifest.json                      format, table definitions, files with length and SHA-256
      shard-0-of-2.safetensors           server 0's part of every table
      shard-1-of-2.safetensors

A sparse table is `<name>/ids` int64 [n] and `<name>/rows` float32 [n, dim * (1 + slots)]; a dense one
is `<name>/<slot>` float32 [high - low] for the weights (slot "value") and each state slot, with
its range in the manifest. Every reader takes the part it owns, so the number of servers may change.
The folder is written under a temporary name and renamed when every byte is on disk.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from psfleet.errors import CheckpointError, PsfleetError
from psfleet.kernels.dedup import owned_by
from psfleet.rules import make_rule
from psfleet.shard.layout import dense_range
from psfleet.shard.shard import Shard
from psfleet.tables.dense import DenseTable
from psfleet.tables.entry import make_entry
from psfleet.tables.spec import Decay, Initializer, TableSpec

__all__ = [
    "ShardFile",
    "begin_save",
    "finish_save",
    "load_shard",
    "read_specs",
    "save_fleet",
    "write_shard",
]

FORMAT = 1
_PAGE = 1 << 20  # rows read at a time

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class ShardFile:
    """One server's file, as the manifest lists it.

    Attributes:
        ranges: Dense tables by name: the half-open range of the flattened array in this file.
        steps: Update counters by table name.
    """

    file: str
    sha256: str
    bytes: int
    ranges: dict[str, tuple[int, int]]
    steps: dict[str, int]


def save_fleet(path: str, shards: Sequence[Shard]) -> None:
    """Write shards of this process as one checkpoint."""
    folder = begin_save(path)
    files = [write_shard(folder, shard) for shard in shards]
    specs = [table.spec for table in shards[0].tables.values()]
    finish_save(folder, path, files, specs)


def begin_save(path: str) -> str:
    """Make the temporary folder that servers write into, beside `path`."""
    target = Path(path)
    if target.exists() and not (target / "manifest.json").exists() and any(target.iterdir()):
        raise CheckpointError(f"{path!r} exists and is not a checkpoint; choose another folder")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return str(temporary)


def finish_save(
    folder: str, path: str, files: Sequence[ShardFile], specs: Sequence[TableSpec]
) -> None:
    """Write the manifest and give the folder its name."""
    manifest = {
        "format": FORMAT,
        "tables": [_spec_to_json(spec) for spec in specs],
        "files": [dataclasses.asdict(file) for file in sorted(files, key=lambda f: f.file)],
    }
    _write_durably(Path(folder) / "manifest.json", json.dumps(manifest, indent=1).encode())
    _sync(Path(folder))
    target = Path(path)
    if target.exists():
        old = target.with_name(f".{target.name}.{os.getpid()}.old")
        target.rename(old)
        Path(folder).rename(target)
        shutil.rmtree(old)
    else:
        Path(folder).rename(target)
    _sync(target.absolute().parent)


def write_shard(folder: str, shard: Shard) -> ShardFile:
    """Write one shard's part of every table into the folder, durably."""
    arrays: dict[str, NDArray[Any]] = {}
    ranges: dict[str, tuple[int, int]] = {}
    for table in shard.tables.values():
        name = table.spec.name
        if isinstance(table, DenseTable):
            ranges[name] = dense_range(table.spec, shard.index, shard.servers)
            for slot, values in zip(_slots(table.spec), table.state(), strict=True):
                arrays[f"{name}/{slot}"] = values
        else:
            arrays[f"{name}/ids"], arrays[f"{name}/rows"] = table.state(0, len(table))
    file = f"shard-{shard.index}-of-{shard.servers}.safetensors"
    where = Path(folder) / file
    save_file(arrays, where)
    _sync(where)
    return ShardFile(
        file,
        _digest(where),
        where.stat().st_size,
        ranges,
        {table.spec.name: table.step for table in shard.tables.values()},
    )


def read_specs(path: str) -> list[TableSpec]:
    """The tables of a checkpoint."""
    return [_spec_from_json(entry) for entry in _manifest(path)["tables"]]


def load_shard(path: str, shard: Shard) -> int:
    """Set the shard's part of every table of the checkpoint, creating tables that are missing.

    Returns:
        How many rows and dense values were set.

    Raises:
        CheckpointError: The checkpoint is missing, incomplete or damaged; nothing was changed.
        TableConflict: A table of the checkpoint exists with another definition.
    """
    manifest = _manifest(path)
    files = [
        ShardFile(**{**entry, "ranges": {k: tuple(v) for k, v in entry["ranges"].items()}})
        for entry in manifest["files"]
    ]
    for file in files:
        _verify(Path(path) / file.file, file)
    specs = [_spec_from_json(entry) for entry in manifest["tables"]]
    for spec in specs:
        low, high = (
            dense_range(spec, shard.index, shard.servers) if spec.kind == "dense" else (0, 0)
        )
        shard.create(spec, np.zeros(high - low, np.float32))
    return sum(_load_table(path, files, shard, spec) for spec in specs)


def _load_table(path: str, files: Sequence[ShardFile], shard: Shard, spec: TableSpec) -> int:
    table = shard.table(spec.key)
    step = max(file.steps[spec.name] for file in files)
    if isinstance(table, DenseTable):
        return _load_dense(path, files, shard, table, step)
    count = 0
    for ids, rows in _sparse_pages(path, files, spec):
        mine = owned_by(ids, shard.index, shard.servers)
        table.restore(np.ascontiguousarray(ids[mine]), np.ascontiguousarray(rows[mine]))
        count += int(mine.sum())
    table.restore_step(step)
    return count


def _load_dense(
    path: str, files: Sequence[ShardFile], shard: Shard, table: DenseTable, step: int
) -> int:
    spec = table.spec
    low, high = dense_range(spec, shard.index, shard.servers)
    values = [np.zeros(high - low, np.float32) for _ in _slots(spec)]
    for file in files:
        start, end = file.ranges[spec.name]
        first, last = max(low, start), min(high, end)
        if first >= last:
            continue
        with _open(Path(path) / file.file) as tensors:
            for slot, value in zip(_slots(spec), values, strict=True):
                part = tensors.get_slice(f"{spec.name}/{slot}")[first - start : last - start]
                value[first - low : last - low] = part
    table.restore(step, values)
    return high - low


def _sparse_pages(
    path: str, files: Sequence[ShardFile], spec: TableSpec
) -> Iterator[tuple[NDArray[np.int64], Floats]]:
    for file in files:
        with _open(Path(path) / file.file) as tensors:
            ids = tensors.get_slice(f"{spec.name}/ids")
            rows = tensors.get_slice(f"{spec.name}/rows")
            count = ids.get_shape()[0]
            for start in range(0, count, _PAGE):
                end = min(start + _PAGE, count)
                yield ids[start:end], rows[start:end]


def _slots(spec: TableSpec) -> list[str]:
    return ["value", *(slot.name for slot in spec.rule.slots)]


def _manifest(path: str) -> dict[str, Any]:
    where = Path(path) / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(where.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path!r} holds no manifest.json; it is not a complete checkpoint"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{str(where)!r} is damaged: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{str(where)!r} is not of checkpoint format {FORMAT}")
    return manifest


def _verify(where: Path, expected: ShardFile) -> None:
    if not where.exists():
        raise CheckpointError(f"{str(where)!r} is missing from the checkpoint")
    length = where.stat().st_size
    if length != expected.bytes or _digest(where) != expected.sha256:
        raise CheckpointError(
            f"{str(where)!r} is damaged: {length} bytes, its checksum is not the manifest's"
        )


def _open(where: Path) -> Any:
    try:
        return safe_open(where, framework="numpy")
    except SafetensorError as error:
        raise CheckpointError(f"{str(where)!r} is damaged: {error}") from None


def _digest(where: Path) -> str:
    with where.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_durably(where: Path, content: bytes) -> None:
    where.write_bytes(content)
    _sync(where)


def _sync(where: Path) -> None:
    handle = os.open(where, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _spec_to_json(spec: TableSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "kind": spec.kind,
        "shape": list(spec.shape),
        "rule": spec.rule.name,
        "hyperparameters": spec.rule.hyperparameters(),
        "decay": dataclasses.asdict(spec.decay),
        "initializer": dataclasses.asdict(spec.initializer),
        "seed": spec.seed,
        "every_row": spec.every_row,
        **({"entry": [spec.entry.kind, spec.entry.values()]} if spec.entry else {}),
    }


def _spec_from_json(entry: dict[str, Any]) -> TableSpec:
    try:
        return TableSpec(
            entry["name"],
            entry["kind"],
            tuple(entry["shape"]),
            make_rule(entry["rule"], entry["hyperparameters"]),
            Decay(**entry["decay"]),
            Initializer(**entry["initializer"]),
            entry["seed"],
            entry["every_row"],
            make_entry(*entry.get("entry", ("", {}))),
        )
    except (KeyError, TypeError, PsfleetError) as error:
        raise CheckpointError(f"the manifest's table {entry!r} is damaged: {error!r}") from None
