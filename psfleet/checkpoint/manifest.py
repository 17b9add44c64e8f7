"""The manifest of a snapshot: written, read, checked against the files, and followed to the bases of a delta.

`manifest.json` lists the definitions of the tables, the file of each server with its SHA-256, the position
in the training, the states of workers and, for a delta, the snapshot that it builds on. It also has a
checksum of its own content. It is the last file written, so a folder with a manifest is a complete
snapshot.

A manifest may be damaged or made by another program. So each value is checked for its type and range, and
an error is reported as a CheckpointError that names the file. The functions keep no state, and any thread
may call them.

Snapshots have versions. A table's definition has fields that were added after version 1, which
psfleet/core/engine/schema/table.py declares (`later`). Such a field is written only if it differs from its
default, and the document gets the lowest version that has all its fields. So an older psfleet can read a
snapshot that uses nothing new.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from psfleet.checkpoint.safetensors_files import digest, place_of, put_back
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

_LATER = [later_field for later_field in later_fields(TableSpec) if later_field.since]
LATEST = max(later_field.since or 1 for later_field in _LATER)
"""Newest version of snapshots, which has all fields."""


_FORMAT = Format("snapshot", versions=tuple(range(1, LATEST + 1)))
_PART = Format("part of a snapshot")
MANIFEST = "manifest.json"
_LONGEST_CHAIN = 1000
_LONGEST = 256 << 20  # maximum bytes of a manifest, which includes the states of all workers


def version_of(document: Any) -> int:
    """Return the lowest version of snapshots that has all fields of this table definition, given as JSON."""
    document_fields = document if isinstance(document, dict) else {}
    return max(
        (later_field.since or 1 for later_field in _LATER if later_field.key in document_fields),
        default=1,
    )


def table_to_json(spec: TableSpec) -> dict[str, Any]:
    """Return a table's definition as JSON. Fields added after version 1 are left out if they have their
    defaults.
    """
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
    """Return the table definition that is given as JSON.

    Raises:
        ValueError, TypeError, PsfleetError: The JSON is no table definition. Call this within `reading`,
            which turns these errors into a CheckpointError that names the file.
    """
    kinds = {"name": str, "kind": str, "shape": list, "rule": str, "hyperparameters": dict}
    more_kinds = {"decay": dict, "initializer": dict, "seed": int, "every_row": bool}
    later = [later_field for later_field in _LATER if later_field.key in document]
    name, kind, shape, rule, hyperparameters, decay, start, seed, every_row, entry, *_ = exact(
        document,
        "table",
        **kinds,
        **more_kinds,
        entry=dict | None,
        **{
            later_field.key: dict if later_field.inside else later_field.kind
            for later_field in later
        },
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
    for later_field, value in later_values(spec).items():
        if later_field in _LATER:
            part = document.setdefault(later_field.inside, {}) if later_field.inside else document
            part[later_field.name] = value
    return document


def _later_from_json(document: dict[str, Any], later: list[LaterField]) -> dict[str, Any]:
    values = {
        later_field.name: document[later_field.name]
        for later_field in later
        if not later_field.inside
    }
    for key in {later_field.inside for later_field in later if later_field.inside}:
        kinds = {
            later_field.name: later_field.kind for later_field in later if later_field.inside == key
        }
        values |= zip(kinds, exact(document[key], key, **kinds), strict=True)
    return values


@dataclass(frozen=True)
class ShardFile:
    """Entry in a manifest for the file of one server.

    Attributes:
        file: Name of the file in the snapshot's folder.
        sha256: SHA-256 of the whole file, in hexadecimal.
        bytes: Length of the file in bytes.
        ranges: For each dense table, by name, the half-open range of the flattened table that the file has.
        steps: For each table in the file, by name, the number of updates that the table had.
    """

    file: str
    sha256: str
    bytes: int
    ranges: dict[str, tuple[int, int]]
    steps: dict[str, int]


@dataclass(frozen=True)
class DeltaBase:
    """Reference from a delta to its base, the snapshot whose changes it has.

    Attributes:
        path: Folder of the base relative to the folder of the delta, so that both can be moved together.
        sha256: SHA-256 of the base's manifest. If the base was replaced, the checksum differs, and the
            delta is refused.
    """

    path: str
    sha256: str


@dataclass(frozen=True)
class CutPosition:
    """Position in the training at which a snapshot was taken.

    Attributes:
        number: Number of the cut, the point at which all servers took the snapshot. It also counts cuts
            before a restart of the fleet. 0 means that one process wrote its own shards, without a cut.
        mode: Name of the fleet's consistency mode.
        round: Last round that the snapshot includes. Only in sync mode.
        pushes: For each seat (number of a worker), its incarnation (the registered process) and the
            sequence number of its last push that the snapshot includes.
    """

    number: int = 0
    mode: str = ""
    round: int = 0
    pushes: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """Content of a snapshot's manifest, which describes the whole snapshot.

    Attributes:
        tables: Definitions of all tables.
        files: Entry for the file of each server, in the order of the servers.
        cut: Position in the training at which the snapshot was taken.
        base: Base of a delta, or None for a full snapshot.
        workers: For each seat (number of a worker), the states that the worker's script has saved in
            snapshots, as JSON (psfleet.core.engine.worker_state).
    """

    tables: tuple[TableSpec, ...]
    files: tuple[ShardFile, ...]
    cut: CutPosition = CutPosition()
    base: DeltaBase | None = None
    workers: Mapping[int, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Literal["full", "delta"]:
        """Kind of the snapshot: "delta" if loading it needs another snapshot, its base."""
        return "delta" if self.base else "full"


@dataclass(frozen=True)
class Part:
    """Report from one server to server 0 after the server has written its file of a snapshot.

    Server 0 makes the manifest from the reports of all servers.

    Attributes:
        file: Entry for the file in the manifest.
        tables: Definitions of the tables that the server has.
        mode, round, pushes: Position in the training at which the file was taken, as in CutPosition.
    """

    file: ShardFile
    tables: tuple[TableSpec, ...]
    mode: str
    round: int
    pushes: dict[int, tuple[int, int]]

    def encode(self) -> bytes:
        """Return the report as JSON, for a message."""
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
        """Decode a report of another server.

        Raises:
            CheckpointError: The content is no report, or a report of another version.
        """
        with reading("what a server says of its file"):
            kinds = {"file": dict, "tables": list, "mode": str, "round": int, "pushes": dict}
            document = _PART.parse(content)
            file, tables, mode, number, pushes = exact(document, "part of a snapshot", **kinds)
            specs = tuple(map(table_from_json, tables))
            natural(number, "its round")
            return cls(_file_from_json(file), specs, mode, number, _pushes_from_json(pushes))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into a snapshot's folder. It is durable when the call returns."""
    write_durably(folder / MANIFEST, _text(_to_json(manifest)))


def read_manifest(path: str | Path) -> Manifest:
    """Return the manifest of a snapshot in a folder or object store.

    Only the manifest is checked. `verify` also checks the files that it lists.

    Raises:
        CheckpointError: The manifest is missing or damaged.
    """
    folder = readable(path)
    where = folder / MANIFEST
    try:
        # If a save was killed between its two renames, the snapshot is still under another name.
        put_back(place_of(folder))
        content = read_small(where, _LONGEST)
    except (FileNotFoundError, NotADirectoryError):
        missing = "" if folder.exists() else "does not exist, so it "
        raise CheckpointError(
            f"{str(path)!r} {missing}holds no {MANIFEST}; it is not a complete checkpoint"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        raise CheckpointError(f"{str(where)!r} cannot be read: {reason(error)}") from None
    with reading(where):
        # The checksum is that of the other fields. To compare it, write them again: the same fields always
        # give the same bytes, so even changed white space or another order is found.
        document = _FORMAT.parse(content)
        if document.pop("sha256", None) is None or content != _text(document):
            raise Misfit("is damaged: its checksum is not its own")
        return _from_json(document)


def verify(path: str | Path, *, read_back: bool = True) -> list[tuple[Path, Manifest]]:
    """Check the files of a snapshot and of all snapshots that it builds on.

    Args:
        path: Folder or URL of the snapshot.
        read_back: True to check every byte. False checks only the lengths of the servers' files.

    Returns:
        Folder and manifest of each snapshot, from the full snapshot to the one at `path`.

    Raises:
        CheckpointError: A file is missing, or differs from its entry in the manifest.
    """
    snapshots = chain(path)
    for folder, manifest in snapshots:
        for file in manifest.files:
            _verify(folder / file.file, file, read_back=read_back)
    return snapshots


def chain(path: str | Path) -> list[tuple[Path, Manifest]]:
    """Return folder and manifest of each snapshot that loading this one needs, beginning with the full
    snapshot.

    Raises:
        CheckpointError: A snapshot is missing, or was replaced after a delta was built on it.
    """
    folder = readable(path).absolute()
    snapshots = [(folder, read_manifest(folder))]
    while (base := snapshots[0][1].base) is not None:
        folder = Path(folder, base.path).resolve()
        if len(snapshots) == _LONGEST_CHAIN or any(
            folder == folder_in_chain for folder_in_chain, _ in snapshots
        ):
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
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        raise CheckpointError(f"{str(where)!r} cannot be read: {reason(error)}") from None
    if not same:
        raise CheckpointError(
            f"{str(where)!r} is damaged: {length} bytes, its checksum is not the manifest's"
        )


def _text(fields: Mapping[str, Any]) -> bytes:
    """Return the text of a manifest with these fields. Version and checksum are added to the fields.

    The same fields always give the same bytes. `read_manifest` relies on this.
    """
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
    for cut_number in (number, at_round):
        natural(cut_number, "a number of its cut")
    for item_kind, items in (("table", tables), ("file", files)):
        names = [str(item.get({"table": "name"}.get(item_kind, item_kind))) for item in items]
        if len(set(names)) < len(names):
            raise Misfit(f"has two entries of one {item_kind}, in {', '.join(names):.200}")
    return Manifest(
        tuple(map(table_from_json, tables)),
        tuple(map(_file_from_json, files)),
        CutPosition(number, mode, at_round, _pushes_from_json(pushes)),
        DeltaBase(*exact(base, "base", path=str, sha256=str)) if base is not None else None,
        {_seat(seat): state for seat, state in workers.items()},
    )


def _by_seat(values: Mapping[int, Any]) -> dict[str, Any]:
    """Return the values with seats (numbers of workers) as text keys, as JSON requires."""
    # json.dumps would sort number keys as numbers, 2 before 10. Read back, they are texts and sorted 10
    # before 2, so the checksum of the same fields would differ. So convert them first.
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
    if Path(name).name != name:  # otherwise a manifest could name files outside its folder
        raise ValueError(f"{name!r} is no name of a file in the folder")
    ranges = {
        table: (natural(low, "the start of a range"), natural(high, "the end of a range"))
        for table, (low, high) in ranges.items()
    }
    for table, step in steps.items():
        natural(step, f"the number of updates of table {table!r}")
    return ShardFile(name, sha256, natural(size, "the length of a file"), ranges, steps)
