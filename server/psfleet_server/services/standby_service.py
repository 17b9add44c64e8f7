"""gRPC service Replica, which sends a server's state to its standby: the primary's side of replication.

One stream for each standby: first a copy of the tables, in pages of `PAGE` rows
(psfleet/core/engine/tables/row_snapshot.py), then records as they are made (`LogShipping`). The copy is a
frozen image, so pushes continue while it is sent. A method runs in a thread of the RPC server, and each
attached standby holds one such thread.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import grpc
import numpy as np

from psfleet.core.base.errors import ProtocolError
from psfleet.core.base.threads import ServiceThread
from psfleet.core.engine.shard.events import CreateTable, FrozenShard, Record, RestorePart
from psfleet.core.engine.tables.row_snapshot import FrozenTable
from psfleet.core.net.body import parse, write_record
from psfleet.core.net.connections import error_statuses
from psfleet.core.net.frame import Part
from psfleet.core.net.v1.replica_pb2 import FollowReply, FollowRequest
from psfleet_server.durability import records
from psfleet_server.durability.log import VERSION
from psfleet_server.durability.log_shipping import LogShipping, ShippedRecord, joined
from psfleet_server.durability.recovery import copied
from psfleet_server.engine.row_moves import RowMoves
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.replies import as_psfleet_error, encoded

T = TypeVar("T")  # a record of the shard, or a decision of the coordinator


def feeds_standby(host: ShardHost) -> None:
    """Send records of the shard and decisions of the coordinator to the standby, once they are logged."""
    host.feed.enabled = True
    host.shard.journal = _also_fed(host, host.shard.journal, records.encode)
    if host.coordinator is not None:
        journal = host.coordinator.journal
        host.coordinator.journal = _also_fed(host, journal, records.encode_change)


def _also_fed(
    host: ShardHost,
    journal: Callable[[T], None] | None,
    encode: Callable[[T], tuple[int, Sequence[Part]]],
) -> Callable[[T], None]:
    """Return a journal that keeps a change as `journal` does, and then ships it to the attached standby."""

    def keep(change: T) -> None:
        if journal is not None:
            journal(change)
        # Not `feed = host.feed` outside: a change of the number of servers replaces the host's feed.
        if host.feed.attached:
            host.feed.append(*encode(change))

    return keep


def replica_handler(host: ShardHost, moves: RowMoves) -> "grpc.GenericRpcHandler[Any, Any]":
    """Return the handler of calls from this server's standby."""
    return grpc.method_handlers_generic_handler(
        "psfleet.v1.Replica",
        {"Follow": grpc.stream_stream_rpc_method_handler(_ReplicaService(host, moves).follow)},
    )


class _ReplicaService:
    """Methods of the service Replica, by which this server's standby gets a copy and then the records."""

    def __init__(self, host: ShardHost, moves: RowMoves) -> None:
        self._host, self._moves = host, moves

    def follow(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            yield from self._follow(requests, context)
        except Exception as error:
            error_statuses.failure(context, as_psfleet_error(error))

    def _follow(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        host = self._host
        request = _read(next(requests))
        if request.server != host.shard.index:
            raise ProtocolError(
                f"a standby of server {request.server} has come to server {host.shard.index}"
            )
        if request.version != VERSION:
            raise ProtocolError(
                f"a standby reads records of version {request.version}, this server writes version "
                f"{VERSION}; start both with the same version of psfleet"
            )
        # Nothing changes within this block, so the first record in `feed` is the first one after the copy.
        with self._moves.still():
            feed, shard, state = self._moves.copy(request.servers)
            last = feed.attach(request.attach)
            frozen = shard.freeze()
            kind, parts = copied(state, host.coordinator)
        # gRPC adds no callback to a call that has ended already.
        if not context.add_callback(lambda: feed.lose(request.attach)):
            feed.lose(request.attach)
        ServiceThread(_listen, "standby", (feed, request.attach, requests)).start()
        with contextlib.closing(frozen):
            for record in _copy(frozen):
                yield from _messages(ShippedRecord(0, *_encoded(record)))
        yield from _messages(ShippedRecord(last, kind, joined(parts)))
        for entry in feed.records(request.attach):
            yield from _messages(entry)
        yield encoded(FollowReply(over=True))


def _listen(feed: LogShipping, attach: int, requests: Iterator[bytes]) -> None:
    """Handle confirmations and metrics of the standby, or its takeover, until the stream ends."""
    for message in _said(requests):
        if message.term:
            feed.depose(message.term)
        feed.took(attach, message.taken)
        if message.metrics:
            feed.told(attach, message.metrics)
    feed.lose(attach)


def _said(requests: Iterator[bytes]) -> Iterator[FollowRequest]:
    """Yield the messages of a standby. gRPC raises a bare Exception when the call has ended."""
    with contextlib.suppress(Exception):
        while True:
            yield _read(next(requests))


def _copy(frozen: FrozenShard) -> Iterator[Record]:
    """Yield the records (entries of a log) that turn an empty shard into a shard with these tables."""
    for table in frozen.tables:
        count = 0 if table.spec.kind == "sparse" else table.columns()["value"][1][0]
        yield CreateTable(table.spec, np.zeros(count, np.float32))
        for columns in _pages(table):
            yield RestorePart(table.spec.key, table.clock, columns)


def _pages(table: FrozenTable) -> Iterator[dict[str, Any]]:
    """Yield the columns for each record: a dense table at once, a sparse table page by page."""
    if table.spec.kind == "dense":
        yield {name: values for page in table.pages() for name, values in page.items()}
        return
    for page in table.pages():
        yield dict(page)
    yield {}  # a record that sets the clock, also of a table without rows


def _encoded(record: Record) -> tuple[int, bytes]:
    kind, parts = records.encode(record)
    return kind, joined(parts)


def _messages(record: ShippedRecord) -> Iterator[bytes]:
    if not record.kind:
        if record.wants_metrics:
            yield encoded(FollowReply(wants_metrics=True))
        else:
            required = not record.complete
            yield encoded(
                FollowReply(number=record.number, complete=record.complete, required=required)
            )
        return
    yield from write_record(record.number, record.kind, record.body)


def _read(request: bytes) -> FollowRequest:
    return parse(FollowRequest, request)
