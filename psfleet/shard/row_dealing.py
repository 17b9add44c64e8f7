"""The tables of a shard, dealt to another number of servers: what each of them gets, as records.

While that lasts, no shard takes anything that would change its rows. Ids and ranges belong to servers by
`psfleet.shard.server_group` alone, so no server has to ask another what is whose. Records that come twice, or
in another order, make the same tables.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.schema.table import TableSpec
from psfleet.shard.events import CreateTable, FrozenShard, PartState, RestorePart, WriteState
from psfleet.shard.server_group import dense_range, owned_rows, servers_of
from psfleet.shard.shard import Shard
from psfleet.shard.shard_state import ShardState
from psfleet.shard.shard_tables import DeltaBases
from psfleet.shard.updates import StaleGradients
from psfleet.tables.row_data import CANDIDATE_IDS, REMOVED, ROW_IDS, TableClock, furthest
from psfleet.tables.row_snapshot import FrozenTable

Dealt = CreateTable | RestorePart | WriteState


def dealt(frozen: FrozenShard, servers: int, ahead: bool = False) -> Iterator[tuple[int, Dealt]]:
    """Yield what each of `servers` servers gets of these tables: the server, and a record for it.

    Ids that were evicted are not told: their positions count those of as many servers.

    Args:
        frozen: The shard; with `since`, of rows what has changed since those that were dealt ahead.
        servers: Number of servers.
        ahead: Only rows, which may change before the others get them again.
    """
    for table in frozen.tables:
        for server in range(servers):
            held = np.zeros(_values(table.spec, server, servers), np.float32)
            yield server, CreateTable(table.spec, held)
    for table in frozen.tables:
        if table.spec.kind == "sparse":
            yield from _dealt_rows(table, servers, bool(frozen.since), ahead)
        elif not ahead:
            yield from _dealt_values(table, frozen, servers)


def _values(spec: TableSpec, server: int, servers: int) -> int:
    if spec.kind == "sparse":
        return 0
    low, high = dense_range(spec, server, servers)
    return high - low


def _dealt_rows(
    table: FrozenTable, servers: int, changes: bool, ahead: bool
) -> Iterator[tuple[int, Dealt]]:
    spec, group = table.spec, servers_of(table.spec, servers)
    pages: Iterable[Mapping[str, NDArray[Any]]] = table.pages()
    if changes and spec.entry is not None:  # what goes makes room for what comes
        pages = sorted(pages, key=lambda page: REMOVED not in page)
    for page in pages:
        ids = page.get(ROW_IDS, page.get(REMOVED))
        if ids is None and not ahead:
            ids = page.get(CANDIDATE_IDS)
        if ids is None:
            continue
        for server in group:
            mine = owned_rows(spec, ids, server, servers)
            if mine.any():
                part = {name: np.ascontiguousarray(column[mine]) for name, column in page.items()}
                yield server, RestorePart(spec.key, table.clock, part)
    for server in group:
        yield server, RestorePart(spec.key, table.clock, {})  # the clock, also without rows


def _dealt_values(
    table: FrozenTable, frozen: FrozenShard, servers: int
) -> Iterator[tuple[int, Dealt]]:
    spec = table.spec
    columns = {name: values for page in table.pages() for name, values in page.items()}
    planes = np.stack([columns[name] for name in spec.slot_names])
    start, end = dense_range(spec, frozen.index, frozen.servers)
    for server in range(servers):
        low, high = dense_range(spec, server, servers)
        first, last = max(low, start), min(high, end)
        if first < last:
            values = np.ascontiguousarray(planes[:, first - start : last - start])
            state = PartState(spec.key, table.clock.step, values, start=first - low)
            yield server, WriteState((state,))


class DealtShard:
    """The tables that a server is to hold, filled beside those that it holds.

    Args:
        shard: The server's shard, whose choices of memory they share.
        servers: Number of servers that there are to be.

    Attributes:
        shard: They are its tables.
    """

    def __init__(self, shard: Shard, servers: int) -> None:
        self.shard = Shard(shard.index, servers)
        tables = self.shard.tables
        tables.choice = shard.tables.choice
        tables.budget.limit, tables.budget.spare = (
            shard.tables.budget.limit,
            shard.tables.budget.spare,
        )
        self._clocks: dict[int, TableClock] = {}

    def take(self, record: Dealt) -> None:
        """Take a record from any server, once or again."""
        match record:
            case CreateTable(spec, value):
                self.shard.create(spec, value)
            case WriteState(states):
                for state in states:
                    self.shard.tables.restore(state)
            case RestorePart(table, clock, columns):
                clock = furthest((self._clocks.get(table, clock), clock))
                self._clocks[table] = clock
                self.shard.fill(RestorePart(table, clock, columns))

    def replace(self, shard: Shard, state: ShardState | None) -> None:
        """Let the shard hold these tables, as one of so many servers.

        Args:
            shard: The shard for which they were made.
            state: State of shard 0 beside its tables; None: the shard is shard 0.
        """
        tables = self.shard.tables
        tables.makers = shard.tables.makers
        shard.tables, shard.servers = tables, tables.servers
        shard.delta_bases, shard.last_cuts = DeltaBases(), DeltaBases(bounded=True)
        shard.stale_gradients = StaleGradients()
        if state is not None:
            shard.become(state)
            shard.workers.view = shard.workers.promised = state.workers.view
            shard.workers.refused.clear()
        shard.workers.addressed.clear()
        shard.workers.frozen = shard.moving = False
