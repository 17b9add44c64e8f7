"""What followers ask of one shard: changes of its tables as of one moment, and rows for a first copy."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import UsageError
from psfleet.kernels.hash_index import SEGMENT_COUNT
from psfleet.kernels.hashing import VIRTUAL_SHARDS, owned_by
from psfleet.shard.shard import Shard
from psfleet.tables.assigned_weights import values_of
from psfleet.tables.dense import DenseTable
from psfleet.tables.sparse import SparseTable
from psfleet.wire.change_messages import NO_IDS, ChangedTable, write_rows
from psfleet.wire.v1.follower_pb2 import (
    ChangesReply,
    ChangesRequest,
    FollowedPush,
    RowsReply,
    RowsRequest,
)
from psfleet_server.rpc.deferred_reply import DeferredReply

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_MOST = 128 << 20  # bytes of rows in one reply
_PAGE = 1 << 16  # rows


@dataclass(frozen=True)
class SendChanges:
    """Answer a follower."""

    call: DeferredReply
    changes: ChangesReply


class Followers:
    """Requests of followers at one shard. Call with nothing changing, but for `rows`.

    No follower is known here: a request says all, and only one that waits for a round is remembered.

    Attributes:
        asked, gaps: Replies so far, and those of them that sent a follower to copy anew.
        bytes: Bytes of ids and weights in all replies.

    Args:
        shard, boot: The shard, and the number of this process.
        snapshot: The number of the snapshot whose file has this SHA-256; 0: none.
        page: Rows of a page.
    """

    def __init__(
        self,
        shard: Shard,
        boot: int,
        snapshot: Callable[[str], int] = lambda sha256: 0,
        page: int = _PAGE,
    ) -> None:
        self.asked = 0
        self.gaps = 0
        self.bytes = 0
        self._shard = shard
        self._snapshot = snapshot
        self._boot = boot
        self._page = page
        self._waiting: dict[DeferredReply, ChangesRequest] = {}

    def ask(self, request: ChangesRequest, reply: DeferredReply) -> list[SendChanges]:
        """Take a request; it is answered now, or when its round is closed."""
        _check_part(request.part, request.parts)
        self._waiting[reply] = request
        return self.due()

    def due(self) -> list[SendChanges]:
        """Return the answers of requests that wait for nothing more."""
        if not self._waiting:
            return []
        closed = self._shard.rounds.closed
        has_rounds = self._shard.consistency.declared.has_rounds
        ready = [
            reply
            for reply, request in self._waiting.items()
            if not has_rounds or request.round <= closed
        ]
        return [SendChanges(reply, self._changes(self._waiting.pop(reply))) for reply in ready]

    def expire(self, reply: DeferredReply) -> list[SendChanges]:
        """Answer a request that has waited long enough with what there is."""
        request = self._waiting.pop(reply, None)
        return [] if request is None else [SendChanges(reply, self._changes(request))]

    def _changes(self, request: ChangesRequest) -> ChangesReply:
        shard, log, began = self._shard, self._shard.tables.changes, time.thread_time()
        ids_of = log.since(request.version if request.boot == self._boot else 0)
        if request.snapshot:
            number = self._snapshot(request.snapshot)
            ids_of = shard.last_cuts.changed_since(shard.tables, number)
        gap = ids_of is None or self._is_too_much(ids_of)
        if ids_of is None or gap:
            ids_of = dict.fromkeys(shard.tables)
        changes = [self._change(key, ids, gap, request) for key, ids in ids_of.items()]
        self.asked += 1
        self.gaps += gap
        self.bytes += sum(change.ids.nbytes + change.weights.nbytes for change in changes)
        pushes = shard.workers.last_pushes({}).items()
        reply = ChangesReply(
            boot=self._boot,
            version=log.version,
            gap=gap,
            has_rounds=shard.consistency.declared.has_rounds,
            round=shard.rounds.closed,
            pushes=[
                FollowedPush(worker=worker, incarnation=incarnation, last=last)
                for worker, (incarnation, last) in pushes
            ],
            server=shard.index,
            servers=shard.servers,
        )
        for change in changes:  # in place: a message that is passed would be copied
            change.write(reply.tables.add())
        reply.microseconds = round((time.thread_time() - began) * 1e6)
        reply.process_microseconds = round(time.process_time() * 1e6)
        return reply

    def _is_too_much(self, ids_of: Mapping[int, Ids | None]) -> bool:
        return (
            sum(
                len(ids) * (8 + 4 * self._shard.tables[key].spec.dim)
                for key, ids in ids_of.items()
                if ids is not None
            )
            > _MOST
        )

    def _change(
        self, key: int, ids: Ids | None, gap: bool, request: ChangesRequest
    ) -> ChangedTable:
        table = self._shard.tables[key]
        if isinstance(table, DenseTable):
            return ChangedTable(table.spec, NO_IDS, values_of(table), whole=True)
        part = _part(NO_IDS if gap else table.ids() if ids is None else ids, request)
        there, weights = _weights(table, part)
        absent = NO_IDS
        if ids is not None and len(there) < len(part):
            absent = np.setdiff1d(part, there, assume_unique=True)
        return ChangedTable(table.spec, there, weights, absent, whole=ids is None)

    def rows(self, request: RowsRequest) -> RowsReply:
        """Return a page of rows as they are."""
        _check_part(request.part, request.parts)
        table, first = self._shard.tables[request.table], request.segment
        if isinstance(table, DenseTable) or first >= SEGMENT_COUNT:
            raise UsageError(
                f"segment {first} of table {table.spec.name!r} is asked for; sparse tables have segments, up "
                f"to {SEGMENT_COUNT - 1}"
            )
        last = min(first + max(self._page * SEGMENT_COUNT // max(len(table), 1), 1), SEGMENT_COUNT)
        ids, weights = _weights(table, _part(table.segment_ids(first, last), request))
        self.bytes += ids.nbytes + weights.nbytes
        reply = RowsReply(next=last % SEGMENT_COUNT)
        write_rows(reply, ids, weights)
        return reply


def _weights(table: SparseTable, ids: Ids) -> tuple[Ids, Floats]:
    """Those of the ids that have rows, and the weights of these."""
    weights = np.empty((len(ids), table.spec.dim), np.float32)
    unknown = table.pull_into(ids, weights)
    table.traffic.pulled -= len(ids)  # nobody trains with them
    table.traffic.unknown -= unknown
    if not unknown:
        return ids, weights
    there = table.scan.has(ids)
    return ids[there], weights[there]


def _part(ids: Ids, request: ChangesRequest | RowsRequest) -> Ids:
    return ids if request.parts <= 1 else ids[owned_by(ids, request.part, request.parts)]


def _check_part(part: int, parts: int) -> None:
    if part >= max(parts, 1) or parts > VIRTUAL_SHARDS:
        raise UsageError(
            f"part {part} of {parts} of the ids is asked for; parts count from 0, and there are at most "
            f"{VIRTUAL_SHARDS}"
        )
