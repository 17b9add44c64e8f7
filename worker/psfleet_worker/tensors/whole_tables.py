"""Calls that find, create, read, write and shrink whole tables.

Contents are sent in pages of a fixed size, so that neither end holds a large table in one message. A worker's
runtime uses `WorkerTables`. A process outside the job uses `TableReader`, which only reads. The calls block
the thread that makes them.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UnknownTable
from psfleet.core.base.settings.kinds import place_or_url
from psfleet.core.engine.eviction_records import EvictedIds
from psfleet.core.engine.gradient_checks import check_ids, check_spec_value
from psfleet.core.engine.kernels.dedup import load_batch_kernels
from psfleet.core.engine.runtime_interface import TableState
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.table_placement import dense_ranges, located_as, owned_rows, placed
from psfleet.core.net import frame, segments
from psfleet.core.net.segments import OutgoingSegment, PartState
from psfleet.core.net.table_messages import read_evictions, read_spec, write_spec
from psfleet.core.net.v1 import shard_pb2
from psfleet.core.net.v1.frame_pb2 import Header
from psfleet_worker.connection.call import Call, wait_all
from psfleet_worker.connection.server_client import ServerClient

if TYPE_CHECKING:
    from psfleet_worker.connection.connection import FleetConnection

Floats = NDArray[np.float32]

_PAGE_ROWS = 1 << 16  # rows of a sparse table in a page
_PAGE_VALUES = 1 << 23  # values of a dense table in a page


def page_size(spec: TableSpec) -> int:
    """Return the maximum number of rows (sparse table) or values (dense table) in a page."""
    return _PAGE_VALUES if spec.kind == "dense" else _PAGE_ROWS


def join_pages(spec: TableSpec, pages: Sequence[Sequence[PartState]]) -> TableState:
    """Join the pages of all servers to the content of a table. Rows are sorted by id.

    Args:
        spec: The table.
        pages: Pages of each server, in the order in which the server sent them.
    """
    step = max(page.step for server in pages for page in server)
    if spec.kind == "dense":
        return TableState(step, [plane.reshape(spec.shape) for plane in _join_dense(spec, pages)])
    every = [page for server in pages for page in server]
    ids = np.concatenate([page.ids for page in every if page.ids is not None])
    rows = np.concatenate([page.values for page in every])
    touched = np.concatenate([page.touched for page in every if page.touched is not None])
    scores = np.concatenate([page.scores for page in every if page.scores is not None])
    order = np.argsort(ids, kind="stable")
    planes = np.split(rows[order], 1 + len(spec.rule.slots), axis=1)
    return TableState(
        step,
        [np.ascontiguousarray(plane) for plane in planes],
        ids[order],
        touched[order],
        scores[order],
    )


def _join_dense(spec: TableSpec, pages: Sequence[Sequence[PartState]]) -> Floats:
    """Return the flattened values and their optimizer state, [1 + slots, size]."""
    flat = np.empty((1 + len(spec.rule.slots), spec.size), np.float32)
    for (low, high), server in zip(dense_ranges(spec, len(pages)), pages, strict=True):
        flat[:, low:high] = np.concatenate([page.values for page in server], axis=1)
    return flat


def split_state(
    spec: TableSpec, state: TableState, servers: int
) -> Iterator[list[OutgoingSegment]]:
    """Split the content of a table into pages.

    Yields, for each page, a list with one segment (a tensor and its description) per server.
    """
    return (_split_dense if spec.kind == "dense" else _split_rows)(spec, state, servers)


def _split_dense(
    spec: TableSpec, state: TableState, servers: int
) -> Iterator[list[OutgoingSegment]]:
    planes = np.stack([np.asarray(plane, np.float32).reshape(-1) for plane in state.values])
    ranges = dense_ranges(spec, servers)
    longest = max(high - low for low, high in ranges)
    # A rule for whole arrays, not for single elements, needs a server's whole range in one page.
    length = _PAGE_VALUES // len(planes) if spec.rule.unit == "element" else longest
    for start in range(0, max(longest, 1), max(length, 1)):
        yield [
            _dense_page(spec, state.step, planes[:, low:high], start, length)
            for low, high in ranges
        ]


def _split_rows(
    spec: TableSpec, state: TableState, servers: int
) -> Iterator[list[OutgoingSegment]]:
    ids = check_ids(spec, state.ids)
    rows = np.concatenate(state.values, axis=1, dtype=np.float32)
    touched = None if state.touched is None else np.asarray(state.touched, np.int64)
    scores = None if state.scores is None else np.asarray(state.scores, np.float32)
    for start in range(0, max(len(ids), 1), _PAGE_ROWS):
        page = slice(start, start + _PAGE_ROWS)
        masks = [owned_rows(spec, ids[page], server, servers) for server in range(servers)]
        yield [
            segments.write_state(
                PartState(
                    spec.key,
                    state.step,
                    rows[page][owned],
                    ids[page][owned],
                    None if touched is None else touched[page][owned],
                    None if scores is None else scores[page][owned],
                )
            )
            for owned in masks
        ]


def _dense_page(
    spec: TableSpec, step: int, planes: Floats, start: int, page: int
) -> OutgoingSegment:
    """Return up to `page` values of one server's range, from `start` on. Empty after the end of the range."""
    start = min(start, planes.shape[1])
    part = planes[:, start : start + page]
    return segments.write_state(PartState(spec.key, step, part, start=start))


class _Specs(dict[int, TableSpec]):
    """Definitions of tables by key. Raises UnknownTable for an unknown key."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._who = process_name

    def __missing__(self, table: int) -> NoReturn:
        raise UnknownTable(f"table {table:#x} is unknown to {self._who}; create it first")


class TableReader:
    """Reads definitions and contents of tables from all servers.

    Args:
        clients: One client per server.
        who: Description of this process for errors.

    Attributes:
        specs: Definitions of the known tables by key. Raises UnknownTable for another key.
        spec: Returns the definition of a table for its key.
    """

    def __init__(self, clients: Sequence[ServerClient], who: str) -> None:
        self.specs: dict[int, TableSpec] = _Specs(who)
        self._clients = clients
        self.spec = self.specs.__getitem__

    def open(self, name: str) -> TableSpec:
        """Return the definition of a table by its name.

        All servers are called, because the table's creator may have reached only some of them so far.
        """
        request = shard_pb2.CreateTableRequest(spec=shard_pb2.TableSpec(name=name))
        message = request.SerializeToString()
        reply = wait_all([c.start("Shard/CreateTable", message) for c in self._clients])[0]
        spec = read_spec(shard_pb2.CreateTableReply.FromString(reply).spec)
        self.specs[spec.key] = spec
        return spec

    def read(self, table: int) -> TableState:
        """Return the whole content of a table."""
        spec = self.spec(table)
        return join_pages(spec, [list(self._pages(client, spec)) for client in self._clients])

    def _pages(self, client: ServerClient, spec: TableSpec) -> Iterator[PartState]:
        """Yield the pages of a table on one server. The last page is empty."""
        offset, limit = 0, page_size(spec)
        while True:
            request = shard_pb2.StateRequest(table=spec.key, offset=offset, limit=limit)
            [reply] = wait_all([client.start("Shard/ReadState", request.SerializeToString())])
            [page] = segments.read_states(*frame.decode(reply), self.spec)
            yield page
            count = page.values.shape[1] if page.ids is None else len(page.ids)
            if count == 0:
                return
            offset += count

    def evictions(self, table: int, position: Sequence[int], limit: int) -> list[EvictedIds]:
        """Return ids that a table has evicted (removed), up to `limit` from each server.

        Args:
            table: Key of the table.
            position: For each server, the position in the server's stream of evicted ids at which to start.
            limit: Maximum number of ids from each server.
        """
        requests = [
            shard_pb2.EvictionsRequest(table=table, position=at, limit=limit) for at in position
        ]
        calls = [
            client.start("Shard/Evictions", request.SerializeToString())
            for client, request in zip(self._clients, requests, strict=True)
        ]
        return [
            read_evictions(shard_pb2.EvictionsReply.FromString(reply)) for reply in wait_all(calls)
        ]


class WorkerTables(TableReader):
    """Reads and writes whole tables for a worker.

    Before each call, wait until the worker's pushes are applied (`Stream.flush`).
    """

    def __init__(self, fleet: "FleetConnection") -> None:
        super().__init__(fleet.clients, f"worker {fleet.worker}")
        self._fleet = fleet
        self._writes = 0  # of this incarnation

    def create(self, spec: TableSpec, value: Floats | None = None) -> int:
        """Create a table on all servers, or find it if another worker has created it. Returns its key.

        Server 0 is called first and decides: the first worker that reaches server 0 provides the initial
        values on all servers. Other workers send no values.
        """
        flat = check_spec_value(spec, value)
        spec = placed(spec, self.specs.values())
        first, *later_clients = self._fleet.clients
        creation = self._create_on(first, spec, self._parts(spec, flat)[0])
        load_batch_kernels(spec)  # while the server loads its own
        [response] = wait_all([creation])
        reply = shard_pb2.CreateTableReply.FromString(response)
        if reply.HasField("spec"):
            spec = located_as(read_spec(reply.spec), spec)
        wait_all(
            [
                self._create_on(client, spec, part if reply.created else part[:0])
                for client, part in zip(later_clients, self._parts(spec, flat)[1:], strict=True)
            ]
        )
        self.specs[spec.key] = spec
        return spec.key

    def _parts(self, spec: TableSpec, flat: Floats) -> list[Floats]:
        """Split a table's initial values by server."""
        servers = len(self._fleet.clients)
        if spec.kind == "sparse":
            return [flat] * servers
        return [flat[low:high] for low, high in dense_ranges(spec, servers)]

    def _create_on(self, client: ServerClient, spec: TableSpec, part: Floats) -> Call:
        request = shard_pb2.CreateTableRequest(
            spec=write_spec(spec),
            value=part.tobytes(),
            worker=self._fleet.worker,
            incarnation=self._fleet.session.incarnation,
        )
        return client.start(
            "Shard/CreateTable", request.SerializeToString(), outage=self._fleet.patience.start
        )

    def write(self, table: int, state: TableState) -> None:
        """Replace the whole content of a table."""
        for parts in split_state(self.spec(table), state, len(self._fleet.clients)):
            self._writes += 1
            wait_all(
                [
                    client.start("Shard/WriteState", segments.message(self._header(), [part]))
                    for client, part in zip(self._fleet.clients, parts, strict=True)
                ]
            )

    def shrink(
        self, table: int = 0, threshold: float | None = None, unseen: int | None = None
    ) -> int:
        """Remove rows of a table, or of all tables if `table` is 0. Returns the number of removed rows.

        Args:
            table: Key of the table, or 0.
            threshold: Lowest score (by the table's eviction policy) of a row that stays. None means each
                table's default.
            unseen: Number of steps without a push to a row after which the row is removed, or None.
        """
        self._writes += 1
        request = shard_pb2.ShrinkRequest(
            table=table,
            threshold=threshold,
            unseen=unseen,
            worker=self._fleet.worker,
            incarnation=self._fleet.session.incarnation,
            number=self._writes,
        )
        replies = wait_all(
            self._fleet.to_all("Shard/Shrink", request, seconds=self._fleet.patience.wait)
        )
        return sum(shard_pb2.ShrinkReply.FromString(response).removed for response in replies)

    def load(self, path: str) -> None:
        """Load the tables of the snapshot at `path` on all servers."""
        from psfleet.checkpoint import read_specs  # loads the tables of servers

        absolute = place_or_url(path)
        specs = read_specs(absolute)
        wait_all(
            self._fleet.to_all(
                "Shard/Load",
                shard_pb2.LoadRequest(path=absolute),
                seconds=self._fleet.patience.wait,
            )
        )
        # The servers report where each table is: a table that existed before the load has kept its location.
        for spec in specs:
            self.open(spec.name)

    def _header(self) -> Header:
        """Return a new header.

        Each message needs a separate header, because writing the message adds its segments to the header.
        """
        return self._fleet.header(sequence=self._writes)
