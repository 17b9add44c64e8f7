"""Snapshots are read: by the servers that wrote them, or by any number of others.

A delta says the changes of the snapshot before it. Of several that build on each other the newest
file that names a row counts, so a reader takes from each what no later one names.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from psfleet.checkpoint.manifest import ShardFile, read_manifest, verify
from psfleet.checkpoint.tensors import HEADER, SERVER, SHARD
from psfleet.checkpoint.verification import check_content
from psfleet.errors import CheckpointError
from psfleet.formats.document import exact, reading
from psfleet.schema.table import TableSpec
from psfleet.shard.dense_partition import dense_range
from psfleet.shard.events import CreateTable, RestorePart
from psfleet.shard.server_group import located_as, owned_rows
from psfleet.shard.shard import Shard
from psfleet.tables.row_data import TableClock
from psfleet.tables.snapshot_columns import (
    CANDIDATE_IDS,
    EVICTED,
    REMOVED,
    ROW_IDS,
    candidate_group,
    row_group,
)
from psfleet.wire.body import flat
from psfleet.wire.server_state import ServerState, read_state
from psfleet.wire.table_clocks import furthest, read_clock

__all__ = ["Events", "Snapshot", "load_events", "load_shard", "read_specs"]

_PAGE = 1 << 16  # rows read at a time

Ids = NDArray[np.int64]
Events = Iterator[CreateTable | RestorePart]


@dataclass(frozen=True)
class _ServerFile:
    """One server's file of one snapshot of a chain, opened."""

    where: Path
    entry: ShardFile
    tensors: Any
    clocks: dict[str, TableClock]

    def names(self) -> set[str]:
        """Of its tensors."""
        return set(self.tensors.keys())

    def whole(self, name: str) -> NDArray[Any]:
        """A tensor."""
        found: NDArray[Any] = self.tensors.get_tensor(name)
        return found

    def server(self) -> ServerState:
        """What the server was beside the tables.

        Raises:
            CheckpointError: That is of another version, or damaged.
        """
        try:
            return read_state(flat(self.whole(SERVER)))
        except Exception as error:  # there is no end to what a file can hold
            raise CheckpointError(
                f"{str(self.where)!r} cannot be read: {error}; read it with the psfleet version "
                "that wrote it"
            ) from None


class Snapshot:
    """A snapshot with all that it builds on, every byte of it checked.

    Args:
        path: Its folder.
        read_back: Compare every byte with its checksum. False: only lengths, as of files just written.

    Attributes:
        manifest: Its own.

    Raises:
        CheckpointError: It is missing, incomplete or damaged.
    """

    def __init__(self, path: str | Path, *, read_back: bool = True) -> None:
        self._chain = verify(path, read_back=read_back)
        self.path, self.manifest = self._chain[-1]
        self._levels = [
            [_open(folder / entry.file, entry) for entry in manifest.files]
            for folder, manifest in self._chain
        ]
        for (folder, manifest), level in zip(self._chain, self._levels, strict=True):
            check_content(folder, manifest, [(file.tensors, file.clocks) for file in level])

    def specs(self, server: int | None = None) -> list[TableSpec]:
        """The tables that every server had, for one that only some had was being created.

        server: Instead those that this one had.
        """
        files = self._levels[-1] if server is None else [self._levels[-1][server]]
        return [
            spec
            for spec in self.manifest.tables
            if all(spec.name in file.entry.steps for file in files)
        ]

    def server(self, index: int) -> ServerState:
        """What one of its servers was beside the tables."""
        return self._levels[-1][index].server()

    def events(
        self,
        server: int,
        servers: int,
        own: bool = False,
        there: Mapping[int, TableSpec] | None = None,
    ) -> Events:
        """What makes a shard, the one of `servers`, hold its part of the tables.

        Args:
            server, servers: Which shard.
            own: It is the shard that was written; it gets tables that only it had too.
            there: By key definitions of tables which say the servers that hold them; None: the snapshot's.
        """
        specs = [
            located_as(there[spec.key], spec) if there and spec.key in there else spec
            for spec in self.specs(server if own else None)
        ]
        for spec in specs:
            dense = spec.kind == "dense"
            low, high = dense_range(spec, server, servers) if dense else (0, 0)
            yield CreateTable(spec, np.zeros(high - low, np.float32))
        for spec in specs:
            yield from self.fills(spec, server, servers)

    def load(self, shard: Shard) -> None:
        """Set the shard's part of every table, creating tables that are missing.

        Raises:
            TableConflict: A table of the snapshot exists with another definition.
        """
        load_events(shard, self.events(shard.index, shard.servers, there=shard.tables.specs()))

    def fills(self, spec: TableSpec, server: int, servers: int) -> Iterator[RestorePart]:
        """What one of `servers` holds of a table, in parts."""
        if spec.kind == "dense":
            yield self._dense(spec, server, servers)
            return
        later = np.zeros(0, np.int64)
        clock = self._clock(spec)
        for level in reversed(self._levels):
            files = [file for file in level if spec.name in file.entry.steps]
            for file in files:
                for columns in _pages(file, spec):
                    mine = owned_rows(spec, columns[ROW_IDS], server, servers)
                    mine &= ~np.isin(columns[ROW_IDS], later)
                    if mine.any():
                        yield RestorePart(
                            spec.key, clock, {n: _of(c, mine) for n, c in columns.items()}
                        )
            later = _named(files, spec, later) if level is not self._levels[0] else later
        waiting = [_waiting(file, spec) for file in self._levels[-1]]
        joined = {n: np.concatenate([part[n] for part in waiting]) for n in waiting[0]}
        mine = owned_rows(spec, joined[CANDIDATE_IDS], server, servers)
        if mine.any():
            yield RestorePart(spec.key, clock, {n: _of(c, mine) for n, c in joined.items()})
        yield RestorePart(spec.key, clock, self._evicted(spec, server, servers))

    def _evicted(self, spec: TableSpec, server: int, servers: int) -> dict[str, NDArray[Any]]:
        """The evictions that a server remembers. Their positions count those of as many servers."""
        files = self._levels[-1]
        if not spec.streams_evictions or len(files) != servers:
            return {}
        names = {name: f"{spec.name}/{name}" for name in EVICTED}
        there = files[server].names()
        return {n: files[server].whole(tensor) for n, tensor in names.items() if tensor in there}

    def _clock(self, spec: TableSpec) -> TableClock:
        """The furthest among the servers: equal on all if the snapshot is one cut."""
        clocks = [file.clocks for file in self._levels[-1] if spec.name in file.clocks]
        return furthest(found[spec.name] for found in clocks)

    def _dense(self, spec: TableSpec, server: int, servers: int) -> RestorePart:
        low, high = dense_range(spec, server, servers)
        columns = {name: np.zeros(high - low, np.float32) for name in spec.slot_names}
        for file in self._levels[-1]:
            start, end = file.entry.ranges.get(spec.name, (0, 0))
            first, last = max(low, start), min(high, end)
            if first >= last:
                continue
            for name, values in columns.items():
                part = file.tensors.get_slice(f"{spec.name}/{name}")
                values[first - low : last - low] = part[first - start : last - start]
        return RestorePart(spec.key, self._clock(spec), columns)


def load_events(shard: Shard, events: Events) -> None:
    """Create and fill tables of a shard."""
    for event in events:
        if isinstance(event, CreateTable):
            shard.create(event.spec, event.value)
        else:
            shard.fill(event)


def read_specs(path: str | Path) -> list[TableSpec]:
    """The tables of a snapshot."""
    return list(read_manifest(path).tables)


def load_shard(path: str | Path, shard: Shard) -> None:
    """Set the shard's part of every table of the snapshot, creating tables that are missing.

    Raises:
        CheckpointError: The snapshot is missing, incomplete or damaged; nothing was changed.
        TableConflict: A table of the snapshot exists with another definition.
    """
    Snapshot(path).load(shard)


def _open(where: Path, entry: ShardFile) -> _ServerFile:
    try:
        tensors: Any = safe_open(where, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{str(where)!r} is damaged: {error}") from None
    with reading(where):
        said = SHARD.parse(tensors.metadata()[HEADER])
        (clocks,) = exact(said, "header", clocks=dict)
        file = _ServerFile(
            where, entry, tensors, {name: read_clock(c) for name, c in clocks.items()}
        )
    file.server()  # one that cannot be taken whole is not taken in part
    return file


def _pages(file: _ServerFile, spec: TableSpec) -> Iterator[dict[str, NDArray[Any]]]:
    names = row_group(spec).entries
    slices = {name: file.tensors.get_slice(f"{spec.name}/{name}") for name in names}
    count = slices[ROW_IDS].get_shape()[0]
    for start in range(0, count, _PAGE):
        end = min(start + _PAGE, count)
        yield {name: part[start:end] for name, part in slices.items()}


def _waiting(file: _ServerFile, spec: TableSpec) -> dict[str, NDArray[Any]]:
    group = candidate_group(spec)
    if f"{spec.name}/{CANDIDATE_IDS}" not in file.names():
        return {name: np.zeros(shape, dtype) for name, (dtype, shape) in group.sized(0).items()}
    return {name: file.whole(f"{spec.name}/{name}") for name in group.entries}


def _named(files: Sequence[_ServerFile], spec: TableSpec, later: Ids) -> Ids:
    """The ids that these files or later ones say something of, ascending."""
    found = [later]
    for file in files:
        there = (f"{spec.name}/{name}" for name in (ROW_IDS, REMOVED))
        found += [file.whole(name) for name in there if name in file.names()]
    return np.unique(np.concatenate(found))


def _of(column: NDArray[Any], chosen: NDArray[np.bool_]) -> NDArray[Any]:
    return np.ascontiguousarray(column[chosen])
