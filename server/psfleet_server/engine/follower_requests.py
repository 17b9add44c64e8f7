"""Sends followers the changes of this shard's tables since a version, and pages of rows for a first copy.

A follower is a process that keeps a copy of the weights (docs/decisions/0028-followers.md). Each request
names the version that the follower has, and the server process that sent this version. So the server stores
nothing about a follower between two requests, except a request that waits for a round. If the changes since
that version are no longer known, or exceed 128 MiB, the reply is a *gap*: it only names the tables, and the
follower copies all their rows again. `psfleet.core.engine.shard.follower_changes` records which rows have
changed.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.kernels.hash_index import SEGMENT_COUNT
from psfleet.core.engine.kernels.id_routing import VIRTUAL_SHARDS, owned_by
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.events import SendError
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.row_data import TableChanges
from psfleet.core.net.table_messages import NO_IDS, TableToSend, lay_out_changes, lay_out_rows
from psfleet.core.net.v1.follower_pb2 import ChangesReply, ChangesRequest, FollowedPush, RowsRequest
from psfleet_server.rpc.replies import DeferredReply, as_psfleet_error

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

# Placeholder of a field that is known only once the reply is laid out. Not 0, because protobuf omits a 0: the
# head would then have another length when it is encoded again.
_ANY = 1
_MOST = 128 << 20  # most bytes of changed rows in one reply
_PAGE = 1 << 16  # approximate rows in a page of a first copy


@dataclass(frozen=True)
class SendChanges:
    """Instruction to send an encoded ChangesReply to a follower's call."""

    call: DeferredReply
    changes: bytes


class Followers:
    """Handles the requests of followers (processes that keep a copy of the weights) to one shard.

    The caller holds the shard's lock, so that the changes of all tables are from the same moment. Only `rows`
    needs no lock.

    Args:
        boot: Random number that identifies this process. Versions of an earlier process are unknown here.
        snapshot: Returns the number of the snapshot whose file has the given SHA-256, or 0 if there is none.
        page: Approximate number of rows in a page.

    Attributes:
        asked: Number of replies with changes so far.
        gaps: Number of these replies that had no changes and made a follower copy all rows again.
        bytes: Total size of all replies in bytes.
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

    def ask(self, request: ChangesRequest, reply: DeferredReply) -> list[SendChanges | SendError]:
        """Add a request, and return the replies that can be sent now.

        In a mode with rounds, a request waits until the round that it names is closed.
        """
        _check_part(request.part, request.parts)
        self._waiting[reply] = request
        return self.due()

    def due(self) -> list[SendChanges | SendError]:
        """Return the replies to all requests whose round is closed by now."""
        if not self._waiting:
            return []
        closed = self._shard.rounds.closed
        has_rounds = self._shard.consistency.declared.has_rounds
        ready = [
            reply
            for reply, request in self._waiting.items()
            if not has_rounds or request.round <= closed
        ]
        return [self._reply_to(reply) for reply in ready]

    def expire(self, reply: DeferredReply) -> list[SendChanges | SendError]:
        """Reply with the changes so far to a request that has waited long enough for its round to close."""
        return [self._reply_to(reply)] if reply in self._waiting else []

    def _reply_to(self, reply: DeferredReply) -> SendChanges | SendError:
        request = self._waiting.pop(reply)
        # Another call may have led here, whose own reply must not fail with this one.
        try:
            return SendChanges(reply, self._changes(request))
        except Exception as error:
            return SendError(reply, as_psfleet_error(error))

    def _changes(self, request: ChangesRequest) -> bytes:
        shard, log, began = self._shard, self._shard.tables.changes, time.thread_time()
        changed = log.since(request.version if request.boot == self._boot else 0, shard.tables)
        if request.snapshot:
            number = self._snapshot(request.snapshot)
            changed = shard.last_cuts.changed_since(shard.tables, number)
        gap = changed is None or self._is_too_much(changed)
        if changed is None or gap:
            changed = dict.fromkeys(shard.tables)
        tables = [self._change(key, change, gap, request) for key, change in changed.items()]
        pushes = shard.workers.last_pushes({}).items()
        head = ChangesReply(
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
            microseconds=_ANY,
            process_microseconds=_ANY,
        )
        # The head is encoded twice: now, to lay out the reply, and at the end, when the durations are known.
        # The two durations have a fixed width on the wire, so the second head fits over the first.
        message, weights, head_bytes = lay_out_changes(head, tables)
        for table, out in zip(tables, weights, strict=True):
            self._read(table.spec, table.ids, out)
        self.asked += 1
        self.gaps += gap
        self.bytes += len(message)
        head.microseconds = max(round((time.thread_time() - began) * 1e6), 1)
        head.process_microseconds = round(time.process_time() * 1e6)
        head_bytes[:] = np.frombuffer(head.SerializeToString(), np.uint8)
        return message

    def _is_too_much(self, changed: Mapping[int, TableChanges | None]) -> bool:
        tables = self._shard.tables
        sizes = (
            len(changes.ids) * (8 + 4 * tables[key].spec.dim)
            for key, changes in changed.items()
            if changes
        )
        return sum(sizes) > _MOST

    def _change(
        self, key: int, changes: TableChanges | None, gap: bool, request: ChangesRequest
    ) -> TableToSend:
        table = self._shard.tables[key]
        if isinstance(table, DenseTable):
            return TableToSend(table.spec, NO_IDS, table.count, whole=True)
        whole = changes is None
        if changes is None:
            changes = TableChanges(NO_IDS if gap else table.ids())
        ids, removed = _part(changes.ids, request), _part(changes.removed, request)
        return TableToSend(table.spec, ids, len(ids) * table.spec.dim, removed, whole)

    def _read(self, spec: TableSpec, ids: Ids, out: Floats) -> None:
        """Write the weights of these ids, or of a dense table, into the reply's memory `out`."""
        table = self._shard.tables[spec.key]
        if isinstance(table, DenseTable):
            table.pull_into(out)
        elif len(ids):
            unknown = table.pull_into(ids, out.reshape(len(ids), spec.dim))
            # A follower's reads are not part of the training, so the metrics of pulls leave them out. Unknown
            # ids are rows that were removed after `rows` had listed them; the next changes report these
            # removals.
            table.traffic.pulled -= len(ids)
            table.traffic.unknown -= unknown

    def rows(self, request: RowsRequest) -> bytes:
        """Return an encoded RowsReply with the present rows of one page.

        A page is a range of segments of the table's hash index. A row that changes between two pages is sent
        again with the next changes.

        Raises:
            UsageError: The table is dense, or has no such segment.
        """
        _check_part(request.part, request.parts)
        table, first = self._shard.tables[request.table], request.segment
        if isinstance(table, DenseTable) or first >= SEGMENT_COUNT:
            raise UsageError(
                f"segment {first} of table {table.spec.name!r} is asked for; sparse tables have segments, up "
                f"to {SEGMENT_COUNT - 1}"
            )
        last = min(first + max(self._page * SEGMENT_COUNT // max(len(table), 1), 1), SEGMENT_COUNT)
        ids = _part(table.segment_ids(first, last), request)
        message, rooms = lay_out_rows(ids, table.spec.dim, last % SEGMENT_COUNT)
        for page_part in rooms:
            self._read(table.spec, ids, page_part)
        self.bytes += len(message)
        return message


def _part(ids: Ids, request: ChangesRequest | RowsRequest) -> Ids:
    return ids if request.parts <= 1 else ids[owned_by(ids, request.part, request.parts)]


def _check_part(part: int, parts: int) -> None:
    if part >= max(parts, 1) or parts > VIRTUAL_SHARDS:
        raise UsageError(
            f"part {part} of {parts} of the ids is asked for; parts count from 0, and there are at most "
            f"{VIRTUAL_SHARDS}"
        )
