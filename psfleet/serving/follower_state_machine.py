"""State machine of a follower: decides the requests from cut to cut, and applies the replies. Does no I/O.

A *cut* is the state of a job's weights at one point of the training. A WeightCopy has the weights and
remembers, for each server, the version of the last changes. `Following` yields actions, which
psfleet.serving.follower carries out:

    AskChanges  ->  replies of all servers after the same round   ->  TakeCut, Rest, next round
                    replies of different rounds                   ->  ask for a later round
                    a server no longer knows the changes (a gap)  ->  new copy, from a snapshot or by AskRows

In a mode with rounds, all servers must reply with their state after the same round. So a request names a
round that has not closed yet (`_target`), and each server replies when it closes that round. In the other
modes servers reply at once.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import PsfleetError, ServerUnavailable
from psfleet.core.base.logs import log_of
from psfleet.core.base.settings.kinds import RowForm, shown_url
from psfleet.core.engine.runtime_interface import FollowedCut
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.table_placement import dense_range
from psfleet.core.net.table_messages import ChangedTable, read_changes, read_rows
from psfleet.core.net.v1.follower_pb2 import ChangesReply, ChangesRequest, RowsRequest
from psfleet.serving.row_source import ServedRows

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_PAGES = 8  # pages of rows that are copied between two requests for changes


_log = log_of(__name__)
_ROUND_INTERVALS = 1.5  # intervals for which a server waits for the round that a request names
_SHARE = (
    0.03  # share of a server's CPU time that replies may take; sending them costs as much again
)
_LEAST = 0.01  # CPUs that replies may take on a server that is almost idle
_MOST_AHEAD = 64  # maximum number of rounds between the present round and a requested one


@dataclass(frozen=True)
class AskChanges:
    """Action: request the changes of the servers. Its result is the list of replies, in the order of the
    servers.

    Attributes:
        requests: Request for each server, or None for a server that gets no request.
    """

    requests: Sequence[ChangesRequest | None]


@dataclass(frozen=True)
class AskRows:
    """Action: request some rows from one server. Its result is the reply."""

    server: int
    request: RowsRequest


Filling = Generator[AskChanges | AskRows, Any, None]


class WeightCopy:
    """Copy of a job's weights that remembers, for each server, the version of the last changes.

    Args:
        source: Name of the job, for error messages.
        part: Share of the ids to keep, as (number from 0, number of parts). (0, 1) keeps all ids.

    Attributes:
        rows: Rows and dense values.
    """

    def __init__(self, source: str, form: RowForm, part: tuple[int, int] = (0, 1)) -> None:
        self.rows = ServedRows(source, form)
        self._part, self._parts = part
        self._specs: dict[int, TableSpec] = {}
        self._reached: dict[int, tuple[int, int]] = {}  # boot and version of each server
        # Ids of tables that a server always sends whole. An id that is missing in the next reply has lost
        # its row.
        self._whole: dict[tuple[int, str], Ids] = {}
        # Slices of dense tables that not all servers have created yet, by their range.
        self._slices: dict[str, dict[tuple[int, int], Floats]] = {}

    def begin(self, rows: ServedRows) -> None:
        """Take the values of a snapshot. The caller must then apply the changes since that snapshot."""
        self.rows = rows
        self._specs = {spec.key: spec for spec in rows.specs().values()}

    def request(
        self, server: int, round: int = 0, seconds: float = 0.0, snapshot: str = ""
    ) -> ChangesRequest:
        """Return the request to a server for its changes since this copy's version.

        Args:
            round: Round for whose end the server is to wait before it replies, or 0 to reply at once.
            seconds: Maximum number of seconds that the server may wait for that round.
            snapshot: SHA-256 of the server's file in a snapshot, to request the changes since the snapshot.
                "" requests those since this copy's version.
        """
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
        """Copy all rows from the servers into this empty copy. Yields the necessary requests.

        Training goes on meanwhile. So changes are requested too, every few pages of rows, before the
        servers forget them. They include tables that a server creates meanwhile.

        Args:
            replies: Replies to the first request of an empty copy, with each server's tables and dense
                values.
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
        """Apply changes of all servers, and return the number of rows that they contain.

        A dense table is split over servers, and is added once its slices from all servers are here.
        """
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
        """Store a server's slice of a dense table. If it is the last missing slice, add the table."""
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
    """Action: apply replies with `Following.take`, under the lock of lookups.

    Each lookup then sees the weights of a single cut (point of the training).

    Attributes:
        at: Time at which the training had these values, in seconds of `Following`'s clock.
    """

    replies: Sequence[ChangesReply]
    at: float


@dataclass(frozen=True)
class Rest:
    """Action: wait for a number of seconds."""

    seconds: float


@dataclass(frozen=True)
class FoundSnapshot:
    """Snapshot that a copy may be read from.

    Attributes:
        name: Path or URL, for log messages.
        checksums: SHA-256 of each server's file, in the order of the servers.
        read: Function that reads the weights of the snapshot.
    """

    name: str
    checksums: Sequence[str]
    read: Callable[[], ServedRows]


Step = Generator[AskChanges | AskRows | TakeCut | Rest, Any, None]
"""Generator of actions. Send the result of each action to it, or throw the action's error into it."""


class Following:
    """State machine that brings a copy of a job's weights from one cut (point of the training) to the next.

    Args:
        new_copy: Function that makes an empty copy.
        newest: Function that returns the newest snapshot, or None if there is none.
        interval: Seconds between cuts.
        clock: Function that returns the time in seconds.

    Attributes:
        copy: The present copy of the weights.
        cut: The present cut, or None before the first.
        gaps: Number of times that all rows were copied again because the servers no longer knew the changes.
        snapshot: Name of the snapshot that the copy was read from, or "" if all rows came from the servers.
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
        self._target = 0  # round of the next cut, as requests name it
        self._ahead = (
            1  # minimum distance of that round from the present one, doubled after each miss
        )
        self._rate = 0.0  # rounds per second
        self._ended = 0  # number of pushes of incarnations that have ended
        self._last = 0, 0.0  # round of the last cut, and the time when it came
        # By server process (boot): its total CPU time in microseconds, the time in seconds at which it
        # reported this, and the CPU time of that reply in microseconds.
        self._cpu: dict[int, tuple[int, float, int]] = {}

    def begin_anew(self, servers: int) -> None:
        """Start again with an empty copy, because the job now has other servers."""
        self._servers, self.copy = servers, self._new_copy()

    def next_step(self) -> Step:
        """Yield the actions that lead to the next cut, or at least closer to it."""
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
            # Some servers had already closed a later round when the request arrived. Drop these changes and
            # request a round that is further ahead.
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
        """Return the seconds to wait before the next request, so that replies take about _SHARE of the
        server's CPU time.

            pause = CPU time of the reply / (_SHARE * CPUs that the server keeps busy)

        The CPU time is that of the cheaper of the last two replies, because either may include
        compiling or loading a kernel.
        """
        now, cpu, reply_cpu = self._clock(), reply.process_microseconds, reply.microseconds
        before, at, cost = self._cpu.get(reply.boot, (cpu, 0.0, 0))
        self._cpu[reply.boot] = cpu, now, reply_cpu
        busy = (cpu - before) / max(now - at, 1e-3) * 1e-6
        return min(reply_cpu, cost) * 1e-6 / max(_SHARE * busy, _LEAST)

    def take(self, replies: Sequence[ChangesReply], at: float) -> int:
        """Apply the changes of all servers, and return the number of changed rows.

        The point of the training that these changes lead to becomes the present cut.
        """
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
        """Return the number of pushes in the weights, which is the number of a cut in a mode without rounds.

        `pushes` has only the present incarnation (registered process) of each worker. Pushes of
        incarnations that ended since the last cut are added to `_ended`, so that the number never falls.
        """
        before = self.cut.pushes if self.cut is not None else ()
        # If the number of servers has changed, take server 0's pushes as those of each new server before.
        if before and len(before) != len(pushes):
            moved = before[:1] * len(pushes)
            self._ended += _total(before) - _total(moved)
            before = moved
        self._ended += sum(
            last
            for old, new in zip(before, pushes, strict=False)  # `before` is empty at the first cut
            for worker, (incarnation, last) in old.items()
            if worker not in new or new[worker][0] != incarnation
        )
        return self._ended + _total(pushes)

    def _aim(self, closed: int, pause: float) -> None:
        """Choose the round to name in the next request.

        When the request arrives, no server may have closed that round yet.

        Args:
            closed: Round after which the servers took the present cut.
            pause: Seconds until the next request.
        """
        now = self._clock()
        before, at = self._last
        self._last = closed, now
        if before:
            self._rate = (closed - before) / max(now - at, 1e-3)
        self._target = closed + max(math.ceil(self._rate * pause), self._ahead)
        self._ahead = max(self._ahead // 2, 1)

    def _recopy(self) -> Step:
        """Copy all rows again, from the newest snapshot if possible. Lookups read the old copy meanwhile."""
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
        """Make a copy from the newest snapshot and the changes since then. Returns True if this has worked.

        The changes are requested before the snapshot is read, so that the servers remember the changes that
        happen during the reading. Each server compares the checksum with that of its own file. So a
        snapshot of another job cannot be used by mistake.

        Returns:
            False if there is no snapshot, or the servers no longer know the changes since the snapshot.
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
    """Return True if all servers are in the same mode and, in a mode with rounds, replied after the same
    round.
    """
    modes = {reply.has_rounds for reply in replies}
    rounds = {reply.round for reply in replies}
    return len(modes) == 1 and (False in modes or len(rounds) == 1)


def _total(pushes: Sequence[Mapping[int, tuple[int, int]]]) -> int:
    return sum(last for by_worker in pushes for _, last in by_worker.values())
