"""The manifest of a snapshot: what it holds, with a checksum of every byte, its own included."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from psfleet.checkpoint.leftovers import place_of, put_back
from psfleet.checkpoint.tensors import digest
from psfleet.errors import CheckpointError, PsfleetError
from psfleet.platform.atomic_files import read_small, reason, regular, write_durably
from psfleet.rules import make_rule
from psfleet.schema.entry import make_entry
from psfleet.schema.table import Decay, Initializer, TableSpec

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Base",
    "Cut",
    "Manifest",
    "ShardFile",
    "chain",
    "own_name",
    "read_manifest",
    "spec_from_json",
    "spec_to_json",
    "verify",
    "write_manifest",
]

FORMAT = 2
MANIFEST = "manifest.json"
_LONGEST_CHAIN = 1000
_LONGEST = 256 << 20  # bytes of a manifest; what workers keep is in it


def own_name(number: int) -> str:
    """The folder of a snapshot among those that a job keeps."""
    return f"snapshot-{number:06d}"


@dataclass(frozen=True)
class ShardFile:
    """One server's file.

    Attributes:
        file: Its name.
        sha256: Of all its bytes, in hexadecimal.
        bytes: Its length.
        ranges: Dense tables by name: the half-open range of the flattened array in this file.
        steps: Update counters by table name.
    """

    file: str
    sha256: str
    bytes: int
    ranges: dict[str, tuple[int, int]]
    steps: dict[str, int]


@dataclass(frozen=True)
class Base:
    """What a delta says the changes of.

    Attributes:
        path: The folder of the snapshot before it, relative to the folder of this one.
        sha256: Of that one's manifest.
    """

    path: str
    sha256: str


@dataclass(frozen=True)
class Cut:
    """Where in the training the snapshot lies.

    Attributes:
        number: Of the cut, in the life of the fleet; 0: shards of one process were written.
        mode: Of the fleet.
        round: Sync mode: the last round in it.
        pushes: By seat: (incarnation, last push in it).
    """

    number: int = 0
    mode: str = ""
    round: int = 0
    pushes: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """A snapshot as its manifest describes it.

    Attributes:
        tables: Their definitions.
        files: One for each server.
        cut: Where in the training it lies.
        base: None: it is whole by itself.
        workers: By seat what its worker keeps in a snapshot (JSON).
    """

    tables: tuple[TableSpec, ...]
    files: tuple[ShardFile, ...]
    cut: Cut = Cut()
    base: Base | None = None
    workers: Mapping[int, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Literal["full", "delta"]:
        """Whether it is whole by itself."""
        return "delta" if self.base else "full"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it into the folder, durably."""
    write_durably(folder / MANIFEST, _text(_to_json(manifest)))


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of a snapshot.

    Raises:
        CheckpointError: It is missing, or not as it was written.
    """
    where = Path(path) / MANIFEST
    try:
        put_back(place_of(path))
        content = read_small(where, _LONGEST)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{str(path)!r} holds no {MANIFEST}; it is not a complete checkpoint"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: no name of a file
        raise CheckpointError(f"{str(where)!r} cannot be read: {reason(error)}") from None
    try:
        said = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(where)!r} is damaged: {error}") from None
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise CheckpointError(f"{str(where)!r} is damaged, or not of checkpoint format {FORMAT}")
    said.pop("sha256", None)
    try:
        same = content == _text(said)
    except (ValueError, RecursionError):
        same = False
    if not same:
        raise CheckpointError(f"{str(where)!r} is damaged: its checksum is not its own")
    try:
        return _from_json(said)
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
        PsfleetError,
    ) as error:
        raise CheckpointError(f"{str(where)!r} is damaged: {error!r}") from None


def verify(path: str | Path, *, read_back: bool = True) -> list[tuple[Path, Manifest]]:
    """Check every byte of a snapshot and of those that it builds on; these, the full one first.

    read_back: False: of the files with tables only the lengths.

    Raises:
        CheckpointError: A file is missing or not as it was written.
    """
    found = chain(path)
    for folder, manifest in found:
        for file in manifest.files:
            _verify(folder / file.file, file, read_back=read_back)
    return found


def chain(path: str | Path) -> list[tuple[Path, Manifest]]:
    """The snapshot after those that it says the changes of, the full one first.

    Raises:
        CheckpointError: One of them is missing, or is not the one that was there then.
    """
    folder = Path(path).absolute()
    found = [(folder, read_manifest(folder))]
    while (base := found[0][1].base) is not None:
        folder = Path(folder, base.path).resolve()
        if len(found) == _LONGEST_CHAIN or any(folder == other for other, _ in found):
            raise CheckpointError(f"{str(path)!r} builds on itself or on too many others")
        manifest = read_manifest(folder)
        if digest(folder / MANIFEST) != base.sha256:
            raise CheckpointError(
                f"{str(found[0][0])!r} says the changes of {str(folder)!r}, which has been "
                "replaced since"
            )
        found.insert(0, (folder, manifest))
    return found


def _verify(where: Path, expected: ShardFile, *, read_back: bool) -> None:
    try:
        with regular(where) as file:
            length = os.fstat(file.fileno()).st_size
        same = length == expected.bytes and not (read_back and digest(where) != expected.sha256)
    except FileNotFoundError:
        raise CheckpointError(f"{str(where)!r} is missing from the checkpoint") from None
    except (OSError, ValueError) as error:  # ValueError: no name of a file
        raise CheckpointError(f"{str(where)!r} cannot be read: {reason(error)}") from None
    if not same:
        raise CheckpointError(
            f"{str(where)!r} is damaged: {length} bytes, its checksum is not the manifest's"
        )


def _text(said: Mapping[str, Any]) -> bytes:
    """The one way to write these values: any other bytes are damage."""
    body = json.dumps(said, indent=1, sort_keys=True)
    checksum = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({**said, "sha256": checksum}, indent=1, sort_keys=True).encode()


def _to_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kind": manifest.kind,
        "base": dataclasses.asdict(manifest.base) if manifest.base else None,
        "cut": dataclasses.asdict(manifest.cut),
        "tables": [spec_to_json(spec) for spec in manifest.tables],
        "files": [dataclasses.asdict(file) for file in manifest.files],
        "workers": {str(seat): state for seat, state in manifest.workers.items()},
    }


def _from_json(said: Mapping[str, Any]) -> Manifest:
    cut = said["cut"]
    pushes = {int(seat): (int(life), int(n)) for seat, (life, n) in cut["pushes"].items()}
    files = tuple(_file_from_json(file) for file in said["files"])
    return Manifest(
        tuple(spec_from_json(entry) for entry in said["tables"]),
        files,
        Cut(**{**cut, "pushes": pushes}),
        Base(**said["base"]) if said["base"] else None,
        {int(seat): state for seat, state in said["workers"].items()},
    )


def _file_from_json(said: Mapping[str, Any]) -> ShardFile:
    if Path(said["file"]).name != said["file"]:
        raise ValueError(f"{said['file']!r} is no name of a file in the folder")
    ranges = {name: (int(low), int(high)) for name, (low, high) in said["ranges"].items()}
    return ShardFile(**{**said, "ranges": ranges})


def spec_to_json(spec: TableSpec) -> dict[str, Any]:
    """A table's definition as the manifest has it."""
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


def spec_from_json(entry: Mapping[str, Any]) -> TableSpec:
    """The definition again; raises whatever does not fit."""
    whole = (*entry["shape"], entry["seed"])
    if any(type(number) is not int for number in whole) or type(entry["every_row"]) is not bool:
        raise TypeError(f"table {entry['name']!r}: {whole}, {entry['every_row']!r}")
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
