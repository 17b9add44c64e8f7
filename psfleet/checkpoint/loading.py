"""Reading of snapshots: check all files, merge a delta with its bases, and fill shards with their rows.

A snapshot can be loaded by any number of servers, not only by as many as wrote it. Each server reads all
files and keeps the rows and ranges that it owns.

A delta has the rows that changed since its base, and the ids that were removed. Deltas are read from the
newest back to the full snapshot, and an id that a newer snapshot has named is skipped:

    delta 2    rows 5, 9   removed 7      -> rows 5, 9
    delta 1    rows 5, 7                  -> nothing: both ids were named by delta 2
    full       rows 5, 7, 8               -> row 8

All files are checked before anything is loaded. Checksums find damage. But a file with a correct checksum
may have been written by another program, even with bad intent. So the names, dtypes and shapes of all
tensors are compared with the manifest too, before memory of that size is allocated. Every mistake is a
CheckpointError that names the file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from psfleet.checkpoint.manifest import Manifest, ShardFile, read_manifest, verify
from psfleet.checkpoint.safetensors_files import HEADER, NAMES, SERVER, SHARD
from psfleet.core.base.errors import CheckpointError
from psfleet.core.base.json_documents import Misfit, exact, reading
from psfleet.core.engine.kernels.dedup import ascending
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.events import CreateTable, RestorePart
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.table_placement import dense_range, located_as, owned_rows
from psfleet.core.engine.tables.row_data import (
    CANDIDATE_IDS,
    EVICTED,
    REMOVED,
    ROW_IDS,
    ColumnGroup,
    TableClock,
    candidate_group,
    column_groups,
    furthest,
    row_group,
)
from psfleet.core.net.body import flat
from psfleet.core.net.server_state import ServerState, is_of_version_1, read_state
from psfleet.core.net.table_messages import read_clock

_MOST = 2**62  # largest position in an eviction stream: adding a count to it still fits into int64


# Rows that are read at a time: a server's lock is held for them, and they stay in the processor's caches.
_PAGE = 1 << 14
Ids = NDArray[np.int64]
Events = Iterator[CreateTable | RestorePart]


def check_content(folder: Path, manifest: Manifest, contents: Sequence[tuple[Any, Any]]) -> None:
    """Compare the tensors and table clocks of every file with the manifest.

    A table's clock is the number of its updates, with the times and shrinks that expiry needs.

    Args:
        folder: Folder of the snapshot, for error messages.
        contents: For each file of the manifest, its opened tensors and its table clocks by table name.

    Raises:
        CheckpointError: A tensor or clock is missing or unknown, or has another shape, dtype or range.
    """
    for entry, (tensors, clocks) in zip(manifest.files, contents, strict=True):
        with reading(folder / entry.file):
            _check_file(manifest.tables, entry, tensors, clocks)
    with reading(folder):
        if not manifest.files:
            raise ValueError("no files")
        for spec in manifest.tables:
            _check_ranges(spec, manifest.files)


def _check_ranges(spec: TableSpec, files: Sequence[ShardFile]) -> None:
    """Check that the parts of a dense table in all files cover the table without gaps or overlaps."""
    parts = sorted(entry.ranges[spec.name] for entry in files if spec.name in entry.ranges)
    end = 0
    for low, high in parts:
        if low < high:
            if low != end:
                raise ValueError(f"table {spec.name!r} has the parts {parts} of {spec.size} values")
            end = high
    everywhere = all(spec.name in entry.steps for entry in files)
    # A table that only some servers have was just being created. It may be incomplete, because
    # `Snapshot.specs` leaves it out.
    if spec.kind == "dense" and (end or everywhere) and end != spec.size:
        raise ValueError(f"table {spec.name!r} has {spec.size} values, the files hold {end}")


def _check_file(
    specs: Sequence[TableSpec], entry: ShardFile, tensors: Any, clocks: Mapping[str, TableClock]
) -> None:
    written_specs = [spec for spec in specs if spec.name in entry.steps]
    steps = {name: clock.step for name, clock in clocks.items()}
    dense = {spec.name for spec in written_specs if spec.kind == "dense"}
    if steps != entry.steps or len(written_specs) != len(clocks) or entry.ranges.keys() != dense:
        raise ValueError(f"the clocks {steps} for the tables {entry.steps}, dense {entry.ranges}")
    names: set[str] = set()
    for spec in written_specs:
        _check_table(spec, entry, tensors)
        columns = (name for group in column_groups(spec) for name in group.entries)
        names |= {f"{spec.name}/{column}" for column in columns}
    for name in tensors.keys():  # noqa: SIM118  # not a dict
        if name not in names and name != SERVER:
            raise Misfit(
                f"has the unknown tensor {name!r:.600}; read it with the psfleet version that wrote it"
            )


def _check_table(spec: TableSpec, entry: ShardFile, tensors: Any) -> None:
    count = 0
    if spec.kind == "dense":
        low, high = entry.ranges[spec.name]
        if not 0 <= low <= high <= spec.size:
            raise ValueError(f"table {spec.name!r}: range {low} to {high} of {spec.size} values")
        count = high - low
    for group in column_groups(spec):
        _check_group(spec, group, tensors, count if spec.kind == "dense" else group.length)
    if spec.streams_evictions:
        _check_position(spec, tensors)


def _check_group(spec: TableSpec, group: ColumnGroup, tensors: Any, length: int | None) -> None:
    names = [f"{spec.name}/{name}" for name in group.entries]
    present_names = [name for name in names if name in tensors.keys()]  # noqa: SIM118  # not a dict
    if not present_names and group.need == "if there are any":
        return
    if present_names and present_names != names:
        raise ValueError(f"{present_names} without the others of {names}")
    if length is None:
        length = tensors.get_slice(names[0]).get_shape()[0]
    for name, (dtype, shape) in zip(names, group.sized(length).values(), strict=True):
        _expect(tensors, name, shape, NAMES[np.dtype(dtype).name])


def _check_position(spec: TableSpec, tensors: Any) -> None:
    ids, *_, position = (f"{spec.name}/{name}" for name in EVICTED)
    (count,) = tensors.get_slice(ids).get_shape()
    if not count <= int(tensors.get_tensor(position)[0]) <= _MOST:
        raise ValueError(f"table {spec.name!r} has {count} evictions before an impossible position")


def _expect(tensors: Any, name: str, shape: Sequence[int], dtype: str) -> None:
    tensor = tensors.get_slice(name)
    if list(tensor.get_shape()) != list(shape) or tensor.get_dtype() != dtype:
        raise ValueError(
            f"tensor {name!r} is {tensor.get_dtype()} {tensor.get_shape()}, not {dtype} {list(shape)}"
        )


@dataclass(frozen=True)
class _ServerFile:
    """File of one server in a snapshot, opened for reading.

    Attributes:
        tensors: Open safetensors file (`safe_open`), which reads a tensor when it is needed.
        clocks: Clock (number of updates and times) of each table in the file, by table name.
    """

    where: Path
    entry: ShardFile
    tensors: Any
    clocks: dict[str, TableClock]

    def names(self) -> set[str]:
        """Return the names of the tensors in the file."""
        return set(self.tensors.keys())

    def whole(self, name: str) -> NDArray[Any]:
        """Read a whole tensor."""
        tensor: NDArray[Any] = self.tensors.get_tensor(name)
        return tensor

    def server(self) -> ServerState:
        """Decode the server's state other than its tables.

        Raises:
            CheckpointError: The state is damaged, or was written by another version.
        """
        try:
            return read_state(flat(self.whole(SERVER)))
        except Exception as error:  # a malicious file can cause any error
            raise CheckpointError(
                f"{str(self.where)!r} cannot be read: {error}; read it with the psfleet version "
                "that wrote it"
            ) from None


class Snapshot:
    """Snapshot opened for reading, together with all snapshots that it builds on.

        snapshot = Snapshot("snapshots/best")
        snapshot.load(shard)  # loads the part of server shard.index of shard.servers

    Args:
        path: Folder or URL of the snapshot.
        read_back: True to check every byte with the checksums. False compares only the lengths of files,
            which is enough for files that were just written and read back.

    Attributes:
        path: Folder of the snapshot.
        manifest: Manifest of the snapshot, not of its bases.

    Raises:
        CheckpointError: The snapshot is missing, incomplete or damaged.
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
        """Return the definitions of the tables that every server had when the snapshot was taken.

        A table that only some servers had was just being created, and no push had changed it.

        Args:
            server: Number of a server, to return the tables that this server had. None returns the
                tables that all servers had.
        """
        files = self._levels[-1] if server is None else [self._levels[-1][server]]
        return [
            spec
            for spec in self.manifest.tables
            if all(spec.name in file.entry.steps for file in files)
        ]

    def check_ids(self) -> None:
        """Check that no table has two entries for an id, within a file or in different files of one snapshot.

        `psfleet ckpt verify` calls this. Loading does not, because the check must sort all ids.

        Raises:
            CheckpointError: An id has two rows, or is both a row and removed.
        """
        for (folder, _), level in zip(self._chain, self._levels, strict=True):
            with reading(folder):
                for spec in self.specs():
                    for names in ((ROW_IDS, REMOVED), (CANDIDATE_IDS,)):
                        _check_repeats(spec.name, _ids(level, spec, names))

    def server(self, index: int) -> ServerState:
        """Return the state of one server other than its tables.

        Args:
            index: Number of the server among those that wrote the snapshot.
        """
        return self._levels[-1][index].server()

    def events(
        self,
        server: int,
        servers: int,
        own: bool = False,
        there: Mapping[int, TableSpec] | None = None,
    ) -> Events:
        """Yield the events that create and fill one shard's part of all tables.

        Args:
            server: Number of the shard.
            servers: Number of all shards.
            own: True if the shard wrote one of the files itself and continues from it, as in a restart. It
                then also gets tables that only some servers had.
            there: Definitions, by table key, of tables that exist already. They override the snapshot's
                choice of the servers that hold a table.
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
        """Load the shard's part of every table of the snapshot. Tables that the shard lacks are created.

        Raises:
            TableConflict: A table of the snapshot exists with another definition.
        """
        load_events(shard, self.events(shard.index, shard.servers, there=shard.tables.specs()))

    def fills(self, spec: TableSpec, server: int, servers: int) -> Iterator[RestorePart]:
        """Yield the part of a table that server number `server` of `servers` holds, in pages of rows.

        Rows of a sparse table are read from the newest snapshot of the chain to the oldest. `later` has the
        ids that newer snapshots have named, as rows or as removed; older rows of these ids are out of date.
        Candidates (ids that may get a row later) and evictions come last, because they are not merged row
        by row.
        """
        if spec.kind == "dense":
            yield self._dense(spec, server, servers)
            return
        later = np.zeros(0, np.int64)
        clock = self._clock(spec)
        for level in reversed(self._levels):
            files = [file for file in level if spec.name in file.entry.steps]
            for file in files:
                for columns in _pages(file, spec):
                    is_owned = owned_rows(spec, columns[ROW_IDS], server, servers)
                    is_owned &= ~_are_among(columns[ROW_IDS], later)
                    if is_owned.all():
                        yield RestorePart(spec.key, clock, columns)
                    elif is_owned.any():
                        yield RestorePart(
                            spec.key, clock, {n: _of(c, is_owned) for n, c in columns.items()}
                        )
            if level is not self._levels[0]:  # add the ids that these files have named
                later = ascending([later, *_ids(files, spec, (ROW_IDS, REMOVED))])
        waiting = [_waiting(file, spec) for file in self._levels[-1]]
        candidates = {n: np.concatenate([part[n] for part in waiting]) for n in waiting[0]}
        is_owned = owned_rows(spec, candidates[CANDIDATE_IDS], server, servers)
        if is_owned.any():
            yield RestorePart(spec.key, clock, {n: _of(c, is_owned) for n, c in candidates.items()})
        yield RestorePart(spec.key, clock, self._evicted(spec, server, servers))

    def _evicted(self, spec: TableSpec, server: int, servers: int) -> dict[str, NDArray[Any]]:
        """Return the last evictions of one server, as columns of its eviction stream, or {} if the stream
        cannot continue.

        The eviction stream numbers the evicted ids by position. Each server numbers its own, so a stream
        can continue only on the same number of servers. A delta has the evictions since its base. They are
        joined to those of the base as long as there is no gap between the positions:

            base      positions 100 to 199, following 200
            delta     positions 200 to 229, following 230    ->   100 to 229, following 230
        """
        stream: dict[str, NDArray[Any]] = {}
        *columns, following = EVICTED
        for files in reversed(self._levels) if spec.streams_evictions else ():
            if len(files) != servers or f"{spec.name}/{following}" not in files[server].names():
                break
            earlier = {name: files[server].whole(f"{spec.name}/{name}") for name in EVICTED}
            if not stream:
                stream = earlier
                continue
            first = stream[following][0] - len(stream[columns[0]])
            before = int(first - earlier[following][0]) + len(earlier[columns[0]])
            if before <= 0 or first > earlier[following][0]:
                break
            for name in columns:
                stream[name] = np.concatenate([earlier[name][:before], stream[name]])
        return stream

    def _clock(self, spec: TableSpec) -> TableClock:
        """Return the clock (number of updates and times) of a table. If servers differ, the most advanced
        clock is used.
        """
        clocks = [file.clocks for file in self._levels[-1] if spec.name in file.clocks]
        return furthest(file_clocks[spec.name] for file_clocks in clocks)

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
    """Apply events that create and fill tables to a shard."""
    for event in events:
        if isinstance(event, CreateTable):
            shard.create(event.spec, event.value)
        else:
            shard.fill(event)


def read_specs(path: str | Path) -> list[TableSpec]:
    """Return the definitions of all tables of a snapshot. Only its manifest is read."""
    return list(read_manifest(path).tables)


def load_shard(path: str | Path, shard: Shard) -> None:
    """Load a shard's part of every table of a snapshot. Tables that the shard lacks are created.

    Raises:
        CheckpointError: The snapshot is missing, incomplete or damaged. The shard is unchanged.
        TableConflict: A table of the snapshot exists with another definition.
    """
    Snapshot(path).load(shard)


def _open(where: Path, entry: ShardFile) -> _ServerFile:
    try:
        tensors: Any = safe_open(where, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{str(where)!r} is damaged: {error}") from None
    with reading(where):
        document = SHARD.parse(tensors.metadata()[HEADER])
        (clocks,) = exact(document, "header", clocks=dict)
        file = _ServerFile(
            where, entry, tensors, {name: read_clock(c) for name, c in clocks.items()}
        )
    # Decode the state now, to report damage before any row is loaded. Version 1 of the state cannot be
    # decoded and no job can continue from it, but its tables can still be loaded.
    if not is_of_version_1(flat(file.whole(SERVER))):
        file.server()
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


def _ids(files: Sequence[_ServerFile], spec: TableSpec, columns: Sequence[str]) -> list[Ids]:
    """Read these id columns of a table from all files that have them."""
    names = [f"{spec.name}/{column}" for column in columns]
    return [file.whole(name) for file in files for name in names if name in file.names()]


def _check_repeats(table: str, columns: Sequence[Ids]) -> None:
    ids = np.sort(np.concatenate([np.zeros(0, np.int64), *columns]))
    if (repeats := ids[1:][ids[1:] == ids[:-1]]).size:
        raise ValueError(f"table {table!r} has two entries of the id {repeats[0]}")


def _are_among(ids: Ids, ascending_ids: Ids) -> NDArray[np.bool_]:
    """Return which of `ids` occur in `ascending_ids`, bool [n]. Unlike np.isin, this sorts nothing."""
    if not len(ascending_ids):
        return np.zeros(len(ids), np.bool_)
    positions = np.searchsorted(ascending_ids, ids)
    mask: NDArray[np.bool_] = ascending_ids[np.minimum(positions, len(ascending_ids) - 1)] == ids
    return mask


def _of(column: NDArray[Any], mask: NDArray[np.bool_]) -> NDArray[Any]:
    return np.ascontiguousarray(column[mask])
