"""Tables on the servers of a fleet: found by name, and read whole. None of it needs a seat."""

from collections.abc import Iterator, Sequence
from typing import NoReturn

from psfleet.errors import UnknownTable
from psfleet.runtime.evictions import EvictedIds
from psfleet.runtime.interface import TableState
from psfleet.schema.table import TableSpec
from psfleet.wire import frame, segments
from psfleet.wire.segments import PartState
from psfleet.wire.table_messages import read_evictions, read_spec
from psfleet.wire.v1 import shard_pb2
from psfleet_worker.connection.call import wait_all
from psfleet_worker.connection.server_client import ServerClient
from psfleet_worker.sharding.paging import join_pages, page_size


class _Specs(dict[int, TableSpec]):
    """Definitions of tables by key."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def __missing__(self, table: int) -> NoReturn:
        raise UnknownTable(f"table {table:#x} is unknown to {self._who}; create it first")


class TableReader:
    """Asks servers for definitions and contents.

    Attributes:
        specs: The definitions, by key, of the tables that are known; UnknownTable for others.
    """

    def __init__(self, clients: Sequence[ServerClient], who: str) -> None:
        self.specs: dict[int, TableSpec] = _Specs(who)
        self._clients = clients
        self.spec = self.specs.__getitem__

    def open(self, name: str) -> TableSpec:
        """Return the definition of a table. Asks every server: a creator may have reached some only."""
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
        """Yield the pages of a table on one server; the last page is empty."""
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
        """Return up to `limit` evictions of a table from each server, starting at its position."""
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
