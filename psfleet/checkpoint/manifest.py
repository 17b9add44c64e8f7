"""The manifest of a snapshot: what it holds, with a checksum of every byte, its own included."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from psfleet.checkpoint.leftovers import place_of, put_back
from psfleet.checkpoint.table_definitions import LATEST, table_from_json, table_to_json, version_of
from psfleet.checkpoint.tensors import digest
from psfleet.data.worker_state import read_states
from psfleet.errors import CheckpointError
from psfleet.formats.document import Format, Misfit, exact, reading
from psfleet.platform.atomic_files import read_small, reason, regular, write_durably
from psfleet.schema.table import TableSpec

__all__ = [
    "MANIFEST",
    "CutPosition",
    "DeltaBase",
    "Manifest",
    "Part",
    "ShardFile",
    "chain",
    "own_name",
    "read_manifest",
    "verify",
    "write_manifest",
]

_FORMAT = Format("snapshot", versions=tuple(range(1, LATEST + 1)))
_PART = Format("part of a snapshot")
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
class DeltaBase:
    """What a delta says the changes of.

    Attributes:
        path: The folder of the snapshot before it, relative to the folder of this one.
        sha256: Of that one's manifest.
    """

    path: str
    sha256: str


@dataclass(frozen=True)
class CutPosition:
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
        workers: By seat what its worker keeps in a snapshot, see psfleet.data.worker_state.
    """

    tables: tuple[TableSpec, ...]
    files: tuple[ShardFile, ...]
    cut: CutPosition = CutPosition()
    base: DeltaBase | None = None
    workers: Mapping[int, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Literal["full", "delta"]:
        """Whether it is whole by itself."""
        return "delta" if self.base else "full"


@dataclass(frozen=True)
class Part:
    """What one server tells server 0 of its file of a snapshot.

    Attributes:
        file: The file.
        tables: Definitions of the tables that the server has.
        mode, round, pushes: As in Cut.
    """

    file: ShardFile
    tables: tuple[TableSpec, ...]
    mode: str
    round: int
    pushes: dict[int, tuple[int, int]]

    def encode(self) -> bytes:
        """The part as it travels."""
        return json.dumps(
            _PART.document(
                file=_file_to_json(self.file),
                tables=[table_to_json(spec) for spec in self.tables],
                mode=self.mode,
                round=self.round,
                pushes=_by_seat(self.pushes),
            )
        ).encode()

    @classmethod
    def decode(cls, content: bytes) -> "Part":
        """The part again.

        Raises:
            CheckpointError: It is of another version.
        """
        with reading("what a server says of its file"):
            kinds = {"file": dict, "tables": list, "mode": str, "round": int, "pushes": dict}
            said = _PART.parse(content)
            file, tables, mode, number, pushes = exact(said, "part of a snapshot", **kinds)
            specs = tuple(map(table_from_json, tables))
            return cls(_file_from_json(file), specs, mode, number, _pushes_from_json(pushes))


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
    with reading(where):
        said = _FORMAT.parse(content)
        if said.pop("sha256", None) is None or content != _text(said):
            raise Misfit("is damaged: its checksum is not its own")
        return _from_json(said)


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


def _text(fields: Mapping[str, Any]) -> bytes:
    """The one way to write these fields: any other bytes are damage."""
    said = _FORMAT.document(**fields)
    tables = fields.get("tables")
    if isinstance(tables, list):
        said["version"] = max(map(version_of, tables), default=said["version"])
    checksum = hashlib.sha256(json.dumps(said, indent=1, sort_keys=True).encode()).hexdigest()
    return json.dumps({**said, "sha256": checksum}, indent=1, sort_keys=True).encode()


def _to_json(manifest: Manifest) -> dict[str, Any]:
    base, cut = manifest.base, manifest.cut
    return {
        "base": {"path": base.path, "sha256": base.sha256} if base else None,
        "cut": {
            "number": cut.number,
            "mode": cut.mode,
            "round": cut.round,
            "pushes": _by_seat(cut.pushes),
        },
        "tables": [table_to_json(spec) for spec in manifest.tables],
        "files": [_file_to_json(file) for file in manifest.files],
        "workers": _by_seat(manifest.workers),
    }


def _from_json(said: Mapping[str, Any]) -> Manifest:
    kinds = {"base": dict | None, "cut": dict, "tables": list, "files": list, "workers": dict}
    base, cut, tables, files, workers = exact(said, "manifest", **kinds)
    for state in workers.values():
        read_states(state)
    number, mode, at_round, pushes = exact(cut, "cut", number=int, mode=str, round=int, pushes=dict)
    return Manifest(
        tuple(map(table_from_json, tables)),
        tuple(map(_file_from_json, files)),
        CutPosition(number, mode, at_round, _pushes_from_json(pushes)),
        DeltaBase(*exact(base, "base", path=str, sha256=str)) if base is not None else None,
        {int(seat): state for seat, state in workers.items()},
    )


def _by_seat(values: Mapping[int, Any]) -> dict[str, Any]:
    """With the names that JSON will give them, by which they are sorted when they are written."""
    return {str(seat): value for seat, value in values.items()}


def _pushes_from_json(said: Mapping[str, Any]) -> dict[int, tuple[int, int]]:
    return {int(seat): (int(life), int(last)) for seat, (life, last) in said.items()}


def _file_to_json(file: ShardFile) -> dict[str, Any]:
    return {
        "file": file.file,
        "sha256": file.sha256,
        "bytes": file.bytes,
        "ranges": file.ranges,
        "steps": file.steps,
    }


def _file_from_json(said: Any) -> ShardFile:
    kinds = {"file": str, "sha256": str, "bytes": int, "ranges": dict, "steps": dict}
    name, sha256, size, ranges, steps = exact(said, "file", **kinds)
    if Path(name).name != name:
        raise ValueError(f"{name!r} is no name of a file in the folder")
    ranges = {table: (int(low), int(high)) for table, (low, high) in ranges.items()}
    return ShardFile(name, sha256, size, ranges, steps)
