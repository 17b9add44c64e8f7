"""A copy of the weights of a running job, on its way from one cut to the next."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.schema.table import TableSpec
from psfleet.serving.row_source import ServedRows
from psfleet.settings.kinds import RowForm
from psfleet.shard.table_placement import dense_range
from psfleet.wire.table_messages import ChangedTable, read_changes, read_rows
from psfleet.wire.v1.follower_pb2 import ChangesReply, ChangesRequest, RowsRequest

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_PAGES = 8  # of rows between two requests for changes


@dataclass(frozen=True)
class AskChanges:
    """Ask each server what has changed; None: not that one. Comes to the replies, in their order."""

    requests: Sequence[ChangesRequest | None]


@dataclass(frozen=True)
class AskRows:
    """Ask a server for a page of rows. Comes to its reply."""

    server: int
    request: RowsRequest


Filling = Generator[AskChanges | AskRows, Any, None]


class WeightCopy:
    """Rows and dense values, and for each server the version up to which its changes are in them.

    Args:
        source: Name of the job, for messages.
        form: Form of the rows.
        part: Number of the part of the ids that it holds, and of all parts: (0, 1) is all.

    Attributes:
        rows: The values.
    """

    def __init__(self, source: str, form: RowForm, part: tuple[int, int] = (0, 1)) -> None:
        self.rows = ServedRows(source, form)
        self._part, self._parts = part
        self._specs: dict[int, TableSpec] = {}
        self._reached: dict[int, tuple[int, int]] = {}  # by server its boot and version
        self._whole: dict[tuple[int, str], Ids] = {}  # ids of tables that come whole
        # Slices, by range, of dense tables that some servers do not have yet.
        self._slices: dict[str, dict[tuple[int, int], Floats]] = {}

    def begin(self, rows: ServedRows) -> None:
        """Have the rows and dense values of a snapshot; changes since it are applied next."""
        self.rows = rows
        self._specs = {spec.key: spec for spec in rows.specs().values()}

    def request(
        self, server: int, round: int = 0, seconds: float = 0.0, snapshot: str = ""
    ) -> ChangesRequest:
        """Return the request for the changes of a server since the last ones; see ChangesRequest."""
        boot, version = self._reached.get(server, (0, 0))
        return ChangesRequest(
            boot=boot,
            version=version,
            round=round,
            milliseconds=int(seconds * 1e3),
            part=self._part,
            parts=self._parts,
            snapshot=snapshot,
        )

    def fill(self, replies: Sequence[ChangesReply]) -> Filling:
        """Copy all rows; `replies`: of each server, what it says to whoever has nothing.

        Changes meanwhile are asked for now and then, so that the servers need not remember them for long. A
        table that a server did not have then comes with its changes.
        """
        self.apply(replies)
        for reply in replies:
            for spec in [self._specs[each.table] for each in reply.tables]:
                if spec.kind == "sparse":
                    yield from self._fill_table(reply.server, spec, len(replies))

    def _fill_table(self, server: int, spec: TableSpec, count: int) -> Filling:
        segment = pages = 0
        while True:
            request = RowsRequest(
                table=spec.key, segment=segment, part=self._part, parts=self._parts
            )
            page = yield AskRows(server, request)
            self.rows.sparse[spec.name].put(*read_rows(page, spec))
            segment, pages = page.next, pages + 1
            if not segment:
                return
            if pages % _PAGES == 0:
                requests = [self.request(i) if i == server else None for i in range(count)]
                [changes] = yield AskChanges(requests)
                if not changes.gap:
                    self.apply([changes])

    def apply(self, replies: Sequence[ChangesReply]) -> int:
        """Take changes; returns how many rows they were. A dense table is there once all servers have it."""
        rows = 0
        dense: dict[str, Floats] = {}
        for reply in replies:
            for change in read_changes(reply, self._specs):
                name = change.spec.name
                if change.spec.kind == "dense":
                    if not self.rows.has(name):
                        self._add_slice(change, reply)
                        continue
                    if name not in dense:
                        dense[name] = self.rows.dense(name).reshape(-1).copy()
                    low, high = dense_range(change.spec, reply.server, reply.servers)
                    dense[name][low:high] = change.weights
                else:
                    if not self.rows.has(name):
                        self.rows.add(change.spec)
                    self._apply_rows(change, reply.server, gap=reply.gap)
                    rows += len(change.ids)
            self._reached[reply.server] = reply.boot, reply.version
        for name, value in dense.items():
            self.rows.put_dense(name, value)
        return rows

    def _add_slice(self, change: ChangedTable, reply: ChangesReply) -> None:
        """Keep a server's slice of a dense table, and add the table if it is the last one."""
        name = change.spec.name
        slices = self._slices.setdefault(name, {})
        slices[dense_range(change.spec, reply.server, reply.servers)] = change.weights
        if sum(map(len, slices.values())) == change.spec.size:
            self.rows.add(change.spec, np.concatenate([slices[each] for each in sorted(slices)]))
            del self._slices[name]

    def _apply_rows(self, change: ChangedTable, server: int, *, gap: bool) -> None:
        table = self.rows.sparse[change.spec.name]
        table.remove(change.removed)
        if change.whole and not gap:
            before = self._whole.get((server, change.spec.name))
            if before is not None:
                table.remove(np.setdiff1d(before, change.ids, assume_unique=True))
            self._whole[server, change.spec.name] = change.ids
        table.put(change.ids, change.weights)
