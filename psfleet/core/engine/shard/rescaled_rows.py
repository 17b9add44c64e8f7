"""The tables of a shard, dealt to another number of servers: what each of them gets, as records.

Rows are dealt ahead while they change, and in the end, when nothing may change, those that have changed since
they were dealt. `psfleet.core.engine.shard.table_placement` alone says which server has an id or range, so
no server asks another what is whose. Records that come twice, or in another order, make the same tables.
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
_AT_ONCE = 8 * PAGE  # rows among which those to deal are looked for, about
_LEAST = 4  # segments that are looked at together: on a device that takes two launches of kernels
_ADVANCE = 1 << 20
"""Steps by which the clock of a table that is filled may be ahead: to set it costs a look at all rows."""


def dealt(
    shard: Shard, since: Mapping[int, HistoryPoint], servers: int, ahead: bool = False
) -> Iterator[tuple[int, Dealt]]:
    """Yield what each of `servers` servers gets of these tables: the server, and a record for it.

    Ids that were evicted are not told: their positions count those of as many servers.

    Args:
        shard: Holds the tables.
        since: Marks of the tables that were dealt ahead: of their rows only what has changed.
        servers: Number of servers.
        ahead: Only rows, which may change while they are dealt, before the others get them again.
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
    """Each record is as the table is then, so that nothing need be kept of what changes meanwhile.

    A change behind it is new since a mark that was made before.
    """
    spec = table.spec
    written, removed = (_NONE, _NONE) if since is None else table.set_since(since)
    for server, ids in _split(spec, removed, servers):  # what goes makes room for what comes
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
    for server in servers_of(spec, servers):
        yield server, RestorePart(spec.key, table.clock, {})  # the clock, also without rows


def _split(spec: TableSpec, ids: Ids, servers: int) -> Iterator[tuple[int, Ids]]:
    """Yield the ids that each server is to hold, if there are any."""
    owner = owners(spec, ids, servers)
    for server in servers_of(spec, servers):
        server_ids = ids[owner == server]
        if len(server_ids):
            yield server, server_ids


def _listed(table: SparseTable, since: HistoryPoint | None) -> Iterator[Ids]:
    """Yield the ids of all rows, or of those that updates have named since a mark."""
    count = min(max(_AT_ONCE * SEGMENT_COUNT // (len(table) + 1), _LEAST), SEGMENT_COUNT)
    for first in range(0, SEGMENT_COUNT, count):
        yield table.segment_ids(first, min(first + count, SEGMENT_COUNT), since)


def _dealt_values(table: DenseTable, shard: Shard, servers: int) -> Iterator[tuple[int, Dealt]]:
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
    """The tables that a server is to hold, filled beside those that it holds.

    Args:
        shard: The server's shard, whose choices of memory they share. Rows on disk leave half of theirs to
            these tables.
        servers: Number of servers that there are to be.
        journal: Gets records that make these tables; None: nothing is kept.

    Attributes:
        shard: They are its tables.
        state: State that their server is to have beside them.
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
        """Take a record from any server, once or again."""
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
                filled = self.shard.tables[table]
                if columns and isinstance(filled, SparseTable):
                    is_behind = filled.step < clock.step
                    clock = (
                        replace(clock, step=clock.step + _ADVANCE) if is_behind else filled.clock
                    )
                self.shard.fill(RestorePart(table, clock, columns))

    def keep_values(self) -> None:
        """Give the journal the dense tables, which have come in ranges."""
        for table in self.shard.tables.values():
            if self.shard.journal is not None and isinstance(table, DenseTable):
                with contextlib.closing(table.freeze()) as frozen:
                    columns = {name: part for page in frozen.pages() for name, part in page.items()}
                    self.shard.journal(RestorePart(table.spec.key, frozen.clock, columns))

    def become(self, state: ShardState) -> None:
        """Take the state of shard 0, which all are to have beside their tables."""
        state.workers.refused.clear()
        state.workers.addressed.clear()
        self.state = state

    def drop(self, shard: Shard) -> None:
        """Let the shard go on with the tables that it has, and all of the memory."""
        shard.tables.budget.limit = self._limit

    def replace(self, shard: Shard) -> None:
        """Let the shard for which these tables were made hold them, as one of so many servers."""
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
