"""A follower's copy of a running job's weights, and what it asks the servers for, without I/O."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import PsfleetError, ServerUnavailable
from psfleet.core.base.logs import log_of
from psfleet.core.base.settings.kinds import RowForm, shown_url
from psfleet.core.engine.interface import FollowedCut
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.table_placement import dense_range
from psfleet.core.net.table_messages import ChangedTable, read_changes, read_rows
from psfleet.core.net.v1.follower_pb2 import ChangesReply, ChangesRequest, RowsRequest
from psfleet.serving.row_source import ServedRows

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_PAGES = 8  # of rows between two requests for changes


_log = log_of(__name__)
_ROUND_INTERVALS = 1.5  # intervals in which the round of a cut has to come
_SHARE = 0.03  # of a server's CPU time that replies may take; to send them takes as much again
_LEAST = 0.01  # of its time, however little it does
_MOST_AHEAD = 64  # factor of the rounds by which a cut is asked for ahead


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
            for spec in [self._specs[change.table] for change in reply.tables]:
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
            self.rows.add(
                change.spec, np.concatenate([slices[bounds] for bounds in sorted(slices)])
            )
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


@dataclass(frozen=True)
class TakeCut:
    """Be at the next cut: `Following.take`, while nobody reads."""

    replies: Sequence[ChangesReply]
    at: float


@dataclass(frozen=True)
class Rest:
    """Ask for nothing for so many seconds."""

    seconds: float


@dataclass(frozen=True)
class FoundSnapshot:
    """A snapshot with which a copy may begin.

    Attributes:
        name: Its address, for messages.
        checksums: SHA-256 of its file of each server.
        read: Its weights.
    """

    name: str
    checksums: Sequence[str]
    read: Callable[[], ServedRows]


Step = Generator[AskChanges | AskRows | TakeCut | Rest, Any, None]
"""Yields what is to be done, and is sent what has come of it: replies, or an error is thrown."""


class Following:
    """The way of a copy from cut to cut.

    Args:
        servers: Number of servers.
        new_copy: An empty copy.
        newest: The newest snapshot; None: there is none.
        interval: Seconds between cuts.
        clock: The time in seconds.

    Attributes:
        copy: The weights.
        cut: The cut that was taken last; None: there was none.
        gaps: Copies that were made anew because changes were not known any more.
        snapshot: The snapshot with which the copy began; "": all rows came from the servers.
    """

    def __init__(
        self,
        servers: int,
        new_copy: Callable[[], WeightCopy],
        newest: Callable[[], FoundSnapshot | None],
        interval: float,
        clock: Callable[[], float],
    ) -> None:
        self.copy = new_copy()
        self.cut: FollowedCut | None = None
        self.gaps = 0
        self.snapshot = ""
        self._servers = servers
        self._new_copy, self._newest = new_copy, newest
        self._interval, self._clock = interval, clock
        self._target = 0  # round of the next cut
        self._ahead = 1
        self._rate = 0.0  # rounds in a second
        self._ended = 0  # pushes of earlier incarnations
        self._last = 0, 0.0  # round of the last cut, and when it came
        # CPU of each server process, when it said so, and what of it was for that reply.
        self._cpu: dict[int, tuple[int, float, int]] = {}

    def begin_anew(self, servers: int) -> None:
        """These are other servers: nothing that the copy knows of them holds."""
        self._servers, self.copy = servers, self._new_copy()

    def next_step(self) -> Step:
        """Get to the next cut, or a step nearer."""
        began = self._clock()
        wait = _ROUND_INTERVALS * self._interval
        copy = self.copy
        replies: list[ChangesReply] = yield AskChanges(
            [copy.request(i, self._target, wait) for i in range(self._servers)]
        )
        if any(reply.gap for reply in replies):
            yield from self._recopy()
            return
        closed = max(reply.round for reply in replies)
        if not _are_one_cut(replies):
            self._ahead = min(2 * self._ahead, _MOST_AHEAD)
            self._target = closed + self._ahead
            return
        has_rounds = replies[0].has_rounds
        yield TakeCut(replies, self._clock() if has_rounds else began)
        pause = max(self._interval, *map(self._pause, replies))
        if has_rounds:
            yield Rest(pause - self._interval)
            self._aim(closed, pause)
        else:
            yield Rest(max(pause - (self._clock() - began), 0.0))

    def _pause(self, reply: ChangesReply) -> float:
        """Seconds in which a server does so much else that the reply was a small part of it.

        Of two replies the cheaper one counts: one may have loaded a kernel.
        """
        now, cpu, reply_cpu = self._clock(), reply.process_microseconds, reply.microseconds
        before, at, cost = self._cpu.get(reply.boot, (cpu, 0.0, 0))
        self._cpu[reply.boot] = cpu, now, reply_cpu
        busy = (cpu - before) / max(now - at, 1e-3) * 1e-6
        return min(reply_cpu, cost) * 1e-6 / max(_SHARE * busy, _LEAST)

    def take(self, replies: Sequence[ChangesReply], at: float) -> int:
        """Apply the changes of a cut, and be there; returns how many rows they were."""
        rows = self.copy.apply(replies)
        closed = replies[0].round if replies[0].has_rounds else None
        pushes = tuple(
            {push.worker: (push.incarnation, push.last) for push in reply.pushes}
            for reply in replies
        )
        number = self._count(pushes) if closed is None else closed
        self.cut = FollowedCut(closed, pushes, at, number)
        return rows

    def _count(self, pushes: Sequence[Mapping[int, tuple[int, int]]]) -> int:
        """The number of all pushes; it also counts those of incarnations that are over since the last cut."""
        before = self.cut.pushes if self.cut is not None else ()
        if before and len(before) != len(pushes):  # each server of another number was as server 0
            moved = before[:1] * len(pushes)
            self._ended += _total(before) - _total(moved)
            before = moved
        self._ended += sum(
            last
            for old, new in zip(before, pushes, strict=False)  # none is before the first cut
            for worker, (incarnation, last) in old.items()
            if worker not in new or new[worker][0] != incarnation
        )
        return self._ended + _total(pushes)

    def _aim(self, closed: int, pause: float) -> None:
        """Choose the round of the next cut: one that no server has closed when the request comes.

        pause: Seconds from one cut to the next.
        """
        now = self._clock()
        before, at = self._last
        self._last = closed, now
        if before:
            self._rate = (closed - before) / max(now - at, 1e-3)
        self._target = closed + max(math.ceil(self._rate * pause), self._ahead)
        self._ahead = max(self._ahead // 2, 1)

    def _recopy(self) -> Step:
        """Have all rows anew, from the newest snapshot if that will do; what there is serves meanwhile."""
        if self.cut is not None:
            self.gaps += 1
        try:
            has_begun = yield from self._begin_with_snapshot()
        except ServerUnavailable:
            raise
        except PsfleetError as error:
            has_begun = False
            _log.warning(f"the follower copies all rows, for the snapshot is of no use: {error}")
        if has_begun:
            return
        copy = self._new_copy()
        yield from copy.fill((yield AskChanges([copy.request(i) for i in range(self._servers)])))
        self.copy = copy

    def _begin_with_snapshot(self) -> Generator[AskChanges, Any, bool]:
        """Read the newest snapshot, and what has changed since its cut; False: that is not to be had.

        The servers are asked first, so that they keep what changes while it is read. Each knows its own file
        by the checksum, so that no snapshot of another job is taken for this one's.
        """
        snapshot = self._newest()
        if snapshot is None or len(snapshot.checksums) != self._servers:
            return False
        copy = self._new_copy()
        replies = yield AskChanges(
            [copy.request(i, snapshot=sha256) for i, sha256 in enumerate(snapshot.checksums)]
        )
        if any(reply.gap for reply in replies):
            return False
        copy.begin(snapshot.read())
        copy.apply(replies)
        self.copy, self.snapshot = copy, snapshot.name
        _log.info(f"the follower begins with the snapshot {shown_url(snapshot.name)!r}")
        return True


def _are_one_cut(replies: Sequence[ChangesReply]) -> bool:
    """Return whether the servers are in the same mode and, if it has rounds, after the same round."""
    modes = {reply.has_rounds for reply in replies}
    rounds = {reply.round for reply in replies}
    return len(modes) == 1 and (False in modes or len(rounds) == 1)


def _total(pushes: Sequence[Mapping[int, tuple[int, int]]]) -> int:
    return sum(last for by_worker in pushes for _, last in by_worker.values())
