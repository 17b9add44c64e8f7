"""Moves the tables of a shard to another number of servers (rescaling), as records for each new server.

Each old server yields records (`dealt`), and each new server applies the records of all old servers to a
DealtShard, beside its own shard. Rows are moved in two passes:

    1. ahead     all rows, while training goes on and changes them
    2. last      training is stopped: only the rows that have changed since the first pass, candidates,
                 dense values and clocks

table_placement.py alone decides which server owns an id or a range, so no server has to ask another. Records
may arrive twice and in any order; the resulting tables are the same.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.hash_index import SEGMENT_COUNT
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.events import (
    CreateTable,
    Journal,
    PartState,
    RestorePart,
    WriteState,
)
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.shard_state import ShardState
from psfleet.core.engine.shard.shard_tables import DeltaBases
from psfleet.core.engine.shard.table_placement import dense_range, owners, servers_of
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.row_data import (
    CANDIDATE_IDS,
    REMOVED,
    HistoryPoint,
    TableClock,
    candidate_columns,
    furthest,
    row_columns,
)
from psfleet.core.engine.tables.row_snapshot import PAGE
from psfleet.core.engine.tables.sparse import SparseTable

Dealt = CreateTable | RestorePart | WriteState

Ids = NDArray[np.int64]

_NONE = np.zeros(0, np.int64)
_AT_ONCE = 8 * PAGE  # about how many rows one list of segments covers
_LEAST = 4  # segments in one list, at least: on a device each list costs two launches of kernels
_ADVANCE = 1 << 20
"""Steps by which the clock of a table is set ahead while the table is filled.

Setting the clock scans all rows, so it must not be set for every record.
"""


def dealt(
    shard: Shard, since: Mapping[int, HistoryPoint], servers: int, ahead: bool = False
) -> Iterator[tuple[int, Dealt]]:
    """Yield pairs of a new server's index and a record for it, for all tables of the shard.

    Recorded evictions are left out: readers refer to them by positions on the old servers.

    Args:
        shard: Shard that stores the tables.
        since: For each table that a first pass has moved, a point in its history (SparseTable.mark) from
            before that pass. Only changes since then are yielded.
        servers: New number of servers.
        ahead: True for the first pass, which yields rows only. Rows may still change.
    """
    tables = [*shard.tables.values()]
    for table in tables:
        for server in range(servers):
            values = np.zeros(_values(table.spec, server, servers), np.float32)
            yield server, CreateTable(table.spec, values)
    for table in tables:
        if isinstance(table, SparseTable):
            yield from _dealt_rows(table, since.get(table.spec.key), servers, ahead)
        elif not ahead:
            yield from _dealt_values(table, shard, servers)


def _values(spec: TableSpec, server: int, servers: int) -> int:
    if spec.kind == "sparse":
        return 0
    low, high = dense_range(spec, server, servers)
    return high - low


def _dealt_rows(
    table: SparseTable, since: HistoryPoint | None, servers: int, ahead: bool
) -> Iterator[tuple[int, Dealt]]:
    """Yield the records that move a sparse table's rows and candidates to another number of servers.

    The table may be updated meanwhile: rows are read in pages, without freezing the table. A row that changes
    after its page was read is sent again in the last pass. That pass covers every change since `since`, a
    point in the table's history from before the first pass.
    """
    spec = table.spec
    written, removed = (_NONE, _NONE) if since is None else table.set_since(since)
    # Removals first, to make room for the rows that follow.
    for server, ids in _split(spec, removed, servers):
        yield server, RestorePart(spec.key, table.clock, {REMOVED: ids})
    for listed in itertools.chain([written], _listed(table, since)):
        for server, ids in _split(spec, listed, servers):
            for start in range(0, len(ids), PAGE):
                columns = row_columns(table.rows(ids[start : start + PAGE]))
                yield server, RestorePart(spec.key, table.clock, columns)
    candidates = {} if ahead else candidate_columns(table.candidates())
    for server, ids in _split(spec, candidates.get(CANDIDATE_IDS, _NONE), servers):
        is_owned = np.isin(candidates[CANDIDATE_IDS], ids)
        columns = {
            name: np.ascontiguousarray(column[is_owned]) for name, column in candidates.items()
        }
        yield server, RestorePart(spec.key, table.clock, columns)
    # A server may get no row at all, but needs the clock.
    for server in servers_of(spec, servers):
        yield server, RestorePart(spec.key, table.clock, {})


def _split(spec: TableSpec, ids: Ids, servers: int) -> Iterator[tuple[int, Ids]]:
    """Yield pairs of a server and those of these ids that belong to it, without servers that get none."""
    owner = owners(spec, ids, servers)
    for server in servers_of(spec, servers):
        server_ids = ids[owner == server]
        if len(server_ids):
            yield server, server_ids


def _listed(table: SparseTable, since: HistoryPoint | None) -> Iterator[Ids]:
    """Yield the ids of all rows in parts, or only of the rows that were updated after the point `since`."""
    count = min(max(_AT_ONCE * SEGMENT_COUNT // (len(table) + 1), _LEAST), SEGMENT_COUNT)
    for first in range(0, SEGMENT_COUNT, count):
        yield table.segment_ids(first, min(first + count, SEGMENT_COUNT), since)


def _dealt_values(table: DenseTable, shard: Shard, servers: int) -> Iterator[tuple[int, Dealt]]:
    """Yield this server's values of a dense table, divided among the new servers by their ranges."""
    spec, (step, planes) = table.spec, table.part(0, table.count)
    start, end = dense_range(spec, shard.index, shard.servers)
    for server in range(servers):
        low, high = dense_range(spec, server, servers)
        first, last = max(low, start), min(high, end)
        if first < last:
            values = np.ascontiguousarray(planes[:, first - start : last - start])
            state = PartState(spec.key, step, values, start=first - low)
            yield server, WriteState((state,))


class DealtShard:
    """New tables of a server, filled beside its present tables until the number of servers changes.

    Args:
        shard: Present shard of the server. The new tables use the same kinds of memory. If rows may be on
            disk, the present shard gives half of its remaining memory to the new tables.
        servers: New number of servers.
        journal: Receives the records that make the new tables, or None to log nothing.

    Attributes:
        shard: A shard with the new tables.
        state: State, apart from tables, that the server will have.
    """

    def __init__(self, shard: Shard, servers: int, journal: Journal | None = None) -> None:
        self.shard = Shard(shard.index, servers)
        self.shard.journal = journal
        tables, before = self.shard.tables, shard.tables
        tables.choice, tables.budget.spare = before.choice, before.budget.spare
        tables.budget.limit = self._limit = before.budget.limit
        if self._limit is not None and before.choice.folder:
            tables.budget.limit = max(before.budget.available_for() // 2, 0)
            before.budget.limit = self._limit - tables.budget.limit
        self.state = ShardState()
        self._clocks: dict[int, TableClock] = {}

    def apply_record(self, record: Dealt) -> None:
        """Apply a record from any server. A repeated record has no further effect."""
        match record:
            case CreateTable(spec, value):
                self.shard.create(spec, value)
            case WriteState(states):
                for state in states:
                    self.shard.tables.check_state(state)
                    self.shard.tables.restore(state)
            case RestorePart(table, clock, columns):
                clock = furthest((self._clocks.get(table, clock), clock))
                self._clocks[table] = clock
                # Setting the clock scans all rows. So while rows arrive, a clock that is behind is set
                # _ADVANCE steps ahead and then stays; the last record, without columns, sets the exact clock.
                filled = self.shard.tables[table]
                if columns and isinstance(filled, SparseTable):
                    is_behind = filled.step < clock.step
                    clock = (
                        replace(clock, step=clock.step + _ADVANCE) if is_behind else filled.clock
                    )
                self.shard.fill(RestorePart(table, clock, columns))

    def keep_values(self) -> None:
        """Log each dense table as a whole. The ranges in which it arrived were not logged."""
        for table in self.shard.tables.values():
            if self.shard.journal is not None and isinstance(table, DenseTable):
                with contextlib.closing(table.freeze()) as frozen:
                    columns = {name: part for page in frozen.pages() for name, part in page.items()}
                    self.shard.journal(RestorePart(table.spec.key, frozen.clock, columns))

    def become(self, state: ShardState) -> None:
        """Store the state of shard 0, which every new shard gets, apart from its tables."""
        state.workers.refused.clear()
        state.workers.addressed.clear()
        self.state = state

    def drop(self, shard: Shard) -> None:
        """Give the memory back to the present shard, because rescaling was given up."""
        shard.tables.budget.limit = self._limit

    def replace(self, shard: Shard) -> None:
        """Replace the tables of the server's shard by the new tables, which completes the rescaling."""
        tables = self.shard.tables
        tables.makers = shard.tables.makers
        tables.changes.number_after(shard.tables.changes)
        tables.budget.limit = self._limit
        shard.tables, shard.servers = tables, tables.servers
        shard.delta_bases, shard.last_cuts = DeltaBases(), DeltaBases(bounded=True)
        if shard.index:
            shard.become(self.state)
            shard.workers.view = shard.workers.promised = self.state.workers.view
        shard.workers.refused.clear()
        shard.workers.addressed.clear()
        shard.workers.frozen = shard.moving = False
