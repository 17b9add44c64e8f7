"""A copy of the weights of a running job, on its way from one cut to the next."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from psfleet.schema.table import TableSpec
from psfleet.serving.row_source import ServedRows
from psfleet.settings.choices import RowForm
from psfleet.shard.server_group import dense_range
from psfleet.wire.change_messages import ChangedTable, read_changes, read_rows
from psfleet.wire.v1.follower_pb2 import ChangesReply, ChangesRequest, RowsReply, RowsRequest

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_PAGES = 8  # of rows between two requests for changes


class Servers(Protocol):
    """The servers of a job, as a follower calls them."""

    def read_changes(self, requests: Sequence[ChangesRequest | None]) -> list[ChangesReply]:
        """The replies to one request for each server, in their order; None: that server gets none."""

    def read_rows(self, server: int, request: RowsRequest) -> RowsReply:
        """A page of rows."""


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

    def begin(self, rows: ServedRows) -> None:
        """Have the rows and dense values of a snapshot; changes since it are applied next."""
        self.rows = rows
        self._specs = {spec.key: spec for spec in rows.specs().values()}

    def request(self, server: int, round: int = 0, seconds: float = 0.0) -> ChangesRequest:
        """Return the request for the changes of a server since the last ones; see ChangesRequest."""
        boot, version = self._reached.get(server, (0, 0))
        return ChangesRequest(
            boot=boot,
            version=version,
            round=round,
            milliseconds=int(seconds * 1e3),
            part=self._part,
            parts=self._parts,
        )

    def fill(
        self, servers: Servers, replies: Sequence[ChangesReply], alive: Callable[[float], None]
    ) -> None:
        """Copy all rows; `replies`: of each server, what it says to whoever has nothing.

        Changes meanwhile are asked for now and then, so that the servers need not remember them for long.
        `alive` is called after each page with the seconds that it took, and raises what ends the copy.
        """
        self.apply(replies)
        for server in range(len(replies)):
            for spec in [*self._specs.values()]:
                if spec.kind == "sparse":
                    self._fill_table(servers, server, spec, len(replies), alive)

    def _fill_table(
        self,
        servers: Servers,
        server: int,
        spec: TableSpec,
        count: int,
        alive: Callable[[float], None],
    ) -> None:
        segment = pages = 0
        while True:
            began = time.monotonic()
            request = RowsRequest(
                table=spec.key, segment=segment, part=self._part, parts=self._parts
            )
            page = servers.read_rows(server, request)
            self.rows.sparse[spec.name].put(*read_rows(page, spec))
            segment, pages = page.next, pages + 1
            alive(time.monotonic() - began)
            if not segment:
                return
            if pages % _PAGES == 0:
                requests = [self.request(i) if i == server else None for i in range(count)]
                [changes] = servers.read_changes(requests)
                if not changes.gap:
                    self.apply([changes])

    def apply(self, replies: Sequence[ChangesReply]) -> int:
        """Take changes; returns how many rows they were."""
        rows = 0
        dense: dict[str, Floats] = {}
        for reply in replies:
            for change in read_changes(reply, self._specs):
                name = change.spec.name
                if not self.rows.has(name):
                    self.rows.add(change.spec)
                if change.spec.kind == "dense":
                    if name not in dense:
                        dense[name] = self.rows.dense(name).reshape(-1).copy()
                    low, high = dense_range(change.spec, reply.server, reply.servers)
                    dense[name][low:high] = change.weights
                else:
                    self._apply_rows(change, reply.server, gap=reply.gap)
                    rows += len(change.ids)
            self._reached[reply.server] = reply.boot, reply.version
        for name, value in dense.items():
            self.rows.put_dense(name, value)
        return rows

    def _apply_rows(self, change: ChangedTable, server: int, *, gap: bool) -> None:
        table = self.rows.sparse[change.spec.name]
        table.remove(change.removed)
        if change.whole and not gap:
            before = self._whole.get((server, change.spec.name))
            if before is not None:
                table.remove(np.setdiff1d(before, change.ids, assume_unique=True))
            self._whole[server, change.spec.name] = change.ids
        table.put(change.ids, change.weights)
