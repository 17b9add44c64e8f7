"""Decisions of a follower, without I/O: what it asks the servers for, and when it has the next cut."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psfleet.errors import PsfleetError, ServerUnavailable
from psfleet.platform.logs import log_of
from psfleet.runtime.interface import FollowedCut
from psfleet.serving.row_source import ServedRows
from psfleet.serving.weight_copy import AskChanges, AskRows, WeightCopy
from psfleet.settings.kinds import shown_url
from psfleet.wire.v1.follower_pb2 import ChangesReply

_log = log_of(__name__)

_ROUND_INTERVALS = 1.5  # intervals in which the round of a cut has to come
_SHARE = 0.03  # of a server's CPU time that replies may take; to send them takes as much again
_LEAST = 0.01  # of its time, however little it does
_MOST_AHEAD = 64  # factor of the rounds by which a cut is asked for ahead


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
        now, cpu, own = self._clock(), reply.process_microseconds, reply.microseconds
        before, at, cost = self._cpu.get(reply.boot, (cpu, 0.0, 0))
        self._cpu[reply.boot] = cpu, now, own
        busy = (cpu - before) / max(now - at, 1e-3) * 1e-6
        return min(own, cost) * 1e-6 / max(_SHARE * busy, _LEAST)

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
    return sum(last for each in pushes for _, last in each.values())
