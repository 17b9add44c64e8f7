"""The manifest of a snapshot: tables, files with checksums, position in the training, and what it builds on.

psfleet/core/engine/schema/table.py declares the fields of a table's definition that came after version 1.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from psfleet.checkpoint.tensors import digest, place_of, put_back
from psfleet.core.base.errors import CheckpointError
from psfleet.core.base.files import read_small, reason, regular, write_durably
from psfleet.core.base.json_documents import Format, Misfit, exact, natural, reading
from psfleet.core.base.object_store import readable
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.rules import make_rule, reference_of
from psfleet.core.engine.schema.entry import make_entry
from psfleet.core.engine.schema.table import (
    DecaySpec,
    InitializerSpec,
    LaterField,
    TableSpec,
    arguments,
    later_fields,
    later_values,
)
from psfleet.core.engine.worker_state import read_states

_LATER = [each for each in later_fields(TableSpec) if each.since]
LATEST = max(each.since or 1 for each in _LATER)
"""The version of snapshots that has every later field."""


_FORMAT = Format("snapshot", versions=tuple(range(1, LATEST + 1)))
_PART = Format("part of a snapshot")
MANIFEST = "manifest.json"
_LONGEST_CHAIN = 1000
_LONGEST = 256 << 20  # bytes of a manifest; what workers keep is in it


def version_of(document: Any) -> int:
    """Return the version of snapshots that a definition in a document needs."""
    there = document if isinstance(document, dict) else {}
    return max((each.since or 1 for each in _LATER if each.key in there), default=1)


def table_to_json(spec: TableSpec) -> dict[str, Any]:
    """The definition in a document."""
    start, entry = spec.initializer, spec.entry
    return {
        **_later_to_json(spec),
        "name": spec.name,
        "kind": spec.kind,
        "shape": spec.shape,
        "rule": reference_of(spec.rule),
        "hyperparameters": spec.rule.hyperparameters(),
        "decay": {"l1": spec.decay.l1, "l2": spec.decay.l2},
        "initializer": {"kind": start.kind, "low": start.low, "high": start.high},
        "seed": spec.seed,
        "every_row": spec.every_row,
        "entry": {"kind": entry.kind, "values": entry.values()} if entry else None,
    }


def table_from_json(document: Any) -> TableSpec:
    """The definition that a document holds.

    Raises:
        ValueError, TypeError, PsfleetError: It is none.
    """
    kinds = {"name": str, "kind": str, "shape": list, "rule": str, "hyperparameters": dict}
    more = {"decay": dict, "initializer": dict, "seed": int, "every_row": bool}
    later = [each for each in _LATER if each.key in document]
    name, kind, shape, rule, hyperparameters, decay, start, seed, every_row, entry, *_ = exact(
        document,
        "table",
        **kinds,
        **more,
        entry=dict | None,
        **{each.key: dict if each.inside else each.kind for each in later},
    )
    if any(type(extent) is not int for extent in shape):
        raise TypeError(f"table {name!r} has the shape {shape!r}")
    number = float | int
    made_of = ("", {}) if entry is None else exact(entry, "entry", kind=str, values=dict)
    for values in (hyperparameters, made_of[1]):
        exact(values, f"table {name!r}", **dict.fromkeys(values, number))
    return TableSpec(
        name,
        kind,
        tuple(shape),
        make_rule(rule, hyperparameters),
        DecaySpec(*exact(decay, "decay", l1=number, l2=number)),
        InitializerSpec(*exact(start, "initializer", kind=str, low=number, high=number)),
        seed,
        every_row,
        None if entry is None else make_entry(*made_of),
        **arguments(TableSpec, _later_from_json(document, later)),
    )


def _later_to_json(spec: TableSpec) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for each, value in later_values(spec).items():
        if each in _LATER:
            part = document.setdefault(each.inside, {}) if each.inside else document
            part[each.name] = value
    return document


def _later_from_json(document: dict[str, Any], later: list[LaterField]) -> dict[str, Any]:
    values = {each.name: document[each.name] for each in later if not each.inside}
    for key in {each.inside for each in later if each.inside}:
        kinds = {each.name: each.kind for each in later if each.inside == key}
        values |= zip(kinds, exact(document[key], key, **kinds), strict=True)
    return values


@dataclass(frozen=True)
class ShardFile:
    """One server's file.

    Attributes:
        file: Its name.
        sha256: SHA-256 of all its bytes, in hexadecimal.
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
    """Snapshot on which a delta is based.

    Attributes:
        path: The folder of the snapshot before it, relative to the folder of this one.
        sha256: SHA-256 of that one's manifest.
    """

    path: str
    sha256: str


@dataclass(frozen=True)
class CutPosition:
    """Position of the snapshot in the training.

    Attributes:
        number: Number of the cut, in all incarnations of the fleet; 0: shards of one process were
            written.
        mode: Mode of the fleet.
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
        cut: Position in the training.
        base: None: it is whole by itself.
        workers: By seat what its worker keeps in a snapshot, see psfleet.core.engine.worker_state.
    """

    tables: tuple[TableSpec, ...]
    files: tuple[ShardFile, ...]
    cut: CutPosition = CutPosition()
    base: DeltaBase | None = None
    workers: Mapping[int, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Literal["full", "delta"]:
        """Kind of the snapshot: full if it is whole by itself."""
        return "delta" if self.base else "full"


@dataclass(frozen=True)
class Part:
    """Report of one server to server 0 about its file of a snapshot.

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
            document = _PART.parse(content)
            file, tables, mode, number, pushes = exact(document, "part of a snapshot", **kinds)
            specs = tuple(map(table_from_json, tables))
            natural(number, "its round")
            return cls(_file_from_json(file), specs, mode, number, _pushes_from_json(pushes))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it into the folder, durably."""
    write_durably(folder / MANIFEST, _text(_to_json(manifest)))


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of a snapshot.

    Raises:
        CheckpointError: It is missing, or not as it was written.
    """
    folder = readable(path)
    where = folder / MANIFEST
    try:
        put_back(place_of(folder))
        content = read_small(where, _LONGEST)
    except (FileNotFoundError, NotADirectoryError):
        missing = "" if folder.exists() else "does not exist, so it "
        raise CheckpointError(
            f"{str(path)!r} {missing}holds no {MANIFEST}; it is not a complete checkpoint"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: no name of a file
        raise CheckpointError(f"{str(where)!r} cannot be read: {reason(error)}") from None
    with reading(where):
        document = _FORMAT.parse(content)
        if document.pop("sha256", None) is None or content != _text(document):
            raise Misfit("is damaged: its checksum is not its own")
        return _from_json(document)


def verify(path: str | Path, *, read_back: bool = True) -> list[tuple[Path, Manifest]]:
    """Check every byte of a snapshot and of those that it builds on; these, the full one first.

    read_back: False: of the files with tables only the lengths.

    Raises:
        CheckpointError: A file is missing or not as it was written.
    """
    snapshots = chain(path)
    for folder, manifest in snapshots:
        for file in manifest.files:
            _verify(folder / file.file, file, read_back=read_back)
    return snapshots


def chain(path: str | Path) -> list[tuple[Path, Manifest]]:
    """The snapshot after those that it says the changes of, the full one first.

    Raises:
        CheckpointError: One of them is missing, or is not the one that was there then.
    """
    folder = readable(path).absolute()
    snapshots = [(folder, read_manifest(folder))]
    while (base := snapshots[0][1].base) is not None:
        folder = Path(folder, base.path).resolve()
        if len(snapshots) == _LONGEST_CHAIN or any(folder == other for other, _ in snapshots):
            raise CheckpointError(f"{str(path)!r} builds on itself or on too many others")
        manifest = read_manifest(folder)
        if digest(folder / MANIFEST) != base.sha256:
            raise CheckpointError(
                f"{str(snapshots[0][0])!r} says the changes of {str(folder)!r}, which has been "
                "replaced since"
            )
        snapshots.insert(0, (folder, manifest))
    return snapshots


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
    document = _FORMAT.document(**fields)
    tables = fields.get("tables")
    if isinstance(tables, list):
        document["version"] = max(map(version_of, tables), default=document["version"])
    checksum = hashlib.sha256(json.dumps(document, indent=1, sort_keys=True).encode()).hexdigest()
    return json.dumps({**document, "sha256": checksum}, indent=1, sort_keys=True).encode()


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


def _from_json(document: Mapping[str, Any]) -> Manifest:
    kinds = {"base": dict | None, "cut": dict, "tables": list, "files": list, "workers": dict}
    base, cut, tables, files, workers = exact(document, "manifest", **kinds)
    for state in workers.values():
        read_states(state)
    number, mode, at_round, pushes = exact(cut, "cut", number=int, mode=str, round=int, pushes=dict)
    if mode:
        find_mode(mode)
    for each in (number, at_round):
        natural(each, "a number of its cut")
    for what, items in (("table", tables), ("file", files)):
        names = [str(item.get({"table": "name"}.get(what, what))) for item in items]
        if len(set(names)) < len(names):
            raise Misfit(f"has two entries of one {what}, in {', '.join(names):.200}")
    return Manifest(
        tuple(map(table_from_json, tables)),
        tuple(map(_file_from_json, files)),
        CutPosition(number, mode, at_round, _pushes_from_json(pushes)),
        DeltaBase(*exact(base, "base", path=str, sha256=str)) if base is not None else None,
        {_seat(seat): state for seat, state in workers.items()},
    )


def _by_seat(values: Mapping[int, Any]) -> dict[str, Any]:
    """With the names that JSON will give them, by which they are sorted when they are written."""
    return {str(seat): value for seat, value in values.items()}


def _seat(text: str) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) < 20
    return natural(int(text) if is_number else text, "a seat")


def _pushes_from_json(pushes: Mapping[str, Any]) -> dict[int, tuple[int, int]]:
    return {
        _seat(seat): (natural(incarnation, "an incarnation"), natural(last, "a last push"))
        for seat, (incarnation, last) in pushes.items()
    }


def _file_to_json(file: ShardFile) -> dict[str, Any]:
    return {
        "file": file.file,
        "sha256": file.sha256,
        "bytes": file.bytes,
        "ranges": file.ranges,
        "steps": file.steps,
    }


def _file_from_json(document: Any) -> ShardFile:
    kinds = {"file": str, "sha256": str, "bytes": int, "ranges": dict, "steps": dict}
    name, sha256, size, ranges, steps = exact(document, "file", **kinds)
    if Path(name).name != name:
        raise ValueError(f"{name!r} is no name of a file in the folder")
    ranges = {
        table: (natural(low, "the start of a range"), natural(high, "the end of a range"))
        for table, (low, high) in ranges.items()
    }
    for table, step in steps.items():
        natural(step, f"the number of updates of table {table!r}")
    return ShardFile(name, sha256, natural(size, "the length of a file"), ranges, steps)
