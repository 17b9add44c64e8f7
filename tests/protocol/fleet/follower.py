"""A follower process: the copy of the product under the scheduler, and what each of its cuts must have."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from psfleet.core.base.errors import PsfleetError, ServerUnavailable
from psfleet.core.engine.runtime_interface import FollowedCut, Read
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.net.v1.follower_pb2 import ChangesReply
from psfleet.serving import follower_state_machine
from psfleet.serving.row_source import ServedRows
from tests.protocol.fleet.calls import Published, Request, Response, Taken
from tests.protocol.fleet.job import COUNTS, FEW, IDS, ROWS, Job, Rows, count_ids
from tests.protocol.fleet.pushes import Pushes
from tests.protocol.scheduler import Boot, Broken, Instruction, Received, Send, Tick

Content = Mapping[str, Mapping[int, bytes]]
"""By table the weights of the ids that have rows."""

_INTERVAL = 0.05  # seconds between cuts
_TICK = 0.03  # seconds at most
_PATIENCE = 6  # ticks in which a call waits until it is given up


@dataclass(frozen=True)
class Changes:
    """A server's reply, and for the checks what it held then."""

    reply: ChangesReply
    held: Content


@dataclass
class Cuts:
    """What all followers of a run have announced.

    Attributes:
        rows: The weights at each cut of rounds, with the number of the round.
        counts: By server how often each sample was used, in the newest cut that had it.
        rounds: By server and round what the table FEW held.
        count, gaps, begun: Cuts; copies made again, and with a snapshot.
    """

    rows: list[tuple[int, Rows]] = field(default_factory=list)
    counts: dict[int, dict[int, float]] = field(default_factory=dict)
    rounds: dict[tuple[int, int], Mapping[int, bytes]] = field(default_factory=dict)
    count: int = 0
    gaps: int = 0
    begun: int = 0

    def check_kept(self, server: int, shard: Shard) -> None:
        """Raise Broken unless a server holds all that was announced of it."""
        own = _counts(server, content_of(shard))
        for sample, count in self.counts.get(server, {}).items():
            if own.get(sample, 0.0) < count:
                raise Broken(f"server {server} lacks sample {sample}, which is in a cut")


class Follower:
    """One process.

    Args:
        leads: Whether a process answers for its place now: one that was replaced may tell what was.
        newest: The newest snapshot.
        count: How many servers there are.
    """

    def __init__(
        self,
        job: Job,
        boot: int,
        cuts: Cuts,
        pushes: Pushes,
        leads: Callable[[str], bool],
        newest: Callable[[], Published | None],
        count: Callable[[], int],
    ) -> None:
        self._count, self._servers = count, count()
        self._job, self._cuts, self._pushes, self._leads = job, cuts, pushes, leads
        self._newest = newest
        self._dice = random.Random(boot)
        self._now = self._until = 0.0
        self._following = follower_state_machine.Following(
            self._servers, self._new_copy, self._found, _INTERVAL, lambda: self._now
        )
        self._step = self._following.next_step()
        self._resume: Callable[[], Any] = self._step.__next__
        self._held: list[Content] = []
        self._number = boot << 20
        self._asked: dict[int, tuple[str, Request]] = {}  # that wait, by number
        self._replies: dict[int, Any] = {}
        self._sources: set[str] = set()
        self._pages = False
        self._before: dict[int, dict[int, float]] = {}  # counts that had been announced
        self._ticks = 0  # since the request
        self._gaps, self._snapshot = 0, ""
        self._acknowledged = 0  # pushes before the request

    @property
    def position(self) -> FollowedCut | None:
        """Its cut."""
        return self._following.cut

    def is_at(self, shards: Sequence[Shard]) -> bool:
        """Whether its copy is what the servers hold."""
        return self._following.cut is not None and self._content() == _union(
            [content_of(shard) for shard in shards]
        )

    def handle(self, event: Any) -> list[Instruction]:
        match event:
            case Boot():
                return self._go_on()
            case Tick():
                return self._tick()
            case Received(source, Response(number, content)) if number in self._asked:
                self._sources.add(source)
                del self._asked[number]
                self._replies[number] = content
                if isinstance(content, PsfleetError):
                    return self._fail(content)
                return [] if self._asked else self._answered()
        return []

    def _tick(self) -> list[Instruction]:
        self._now += self._dice.uniform(0, _TICK)
        self._ticks += 1
        if self._asked and self._ticks > _PATIENCE:
            return self._fail(ServerUnavailable("a server does not answer"))
        if self._asked:
            return [Send(to, request) for to, request in self._asked.values()]
        return self._go_on() if self._now >= self._until else []

    def _fail(self, error: PsfleetError) -> list[Instruction]:
        self._asked.clear()
        self._resume = partial(self._step.throw, error)
        return self._go_on()

    def _answered(self) -> list[Instruction]:
        replies = [self._replies[number] for number in sorted(self._replies)]
        if self._pages:
            outcome = replies[0]
        else:
            if any(changes.reply.servers != self._servers for changes in replies):
                return self._fail(
                    ServerUnavailable("the job has other servers")
                )  # see ReaderRuntime
            self._held = [changes.held for changes in replies]
            outcome = [changes.reply for changes in replies]
        self._resume = partial(self._step.send, outcome)
        return self._go_on()

    def _go_on(self) -> list[Instruction]:
        """Do what is wanted until that takes time."""
        while True:
            try:
                wanted = self._resume()
            except (StopIteration, PsfleetError):
                if self._count() != self._servers:
                    self._servers = self._count()
                    self._following.begin_anew(self._servers)
                self._step = self._following.next_step()
                self._resume = self._step.__next__
                if self._until <= self._now:
                    self._until = self._now + 1e-6  # with the next tick
                return []
            match wanted:
                case follower_state_machine.AskChanges(requests):
                    self._before = {server: dict(own) for server, own in self._cuts.counts.items()}
                    self._acknowledged = len(self._pushes.acknowledged)
                    return self._ask(
                        {i: request for i, request in enumerate(requests) if request is not None}
                    )
                case follower_state_machine.AskRows(server, request):
                    return self._ask({server: request}, pages=True)
                case follower_state_machine.TakeCut(replies, at):
                    before = self._following.cut
                    self._following.take(replies, at)
                    self._check(before)
                    self._note()
                case follower_state_machine.Rest(seconds):
                    self._until = self._now + seconds
            self._resume = partial(self._step.send, None)
            if isinstance(wanted, follower_state_machine.Rest):
                return []

    def _ask(self, requests: Mapping[int, Any], pages: bool = False) -> list[Instruction]:
        self._replies, self._sources, self._pages = {}, set(), pages
        self._ticks = 0
        for server, content in requests.items():
            self._number += 1
            self._asked[self._number] = f"S{server}", Request(self._number, content)
        return [Send(to, request) for to, request in self._asked.values()]

    def _note(self) -> None:
        following, cuts = self._following, self._cuts
        cuts.count += 1
        cuts.gaps += following.gaps - self._gaps
        cuts.begun += following.snapshot != self._snapshot
        self._gaps, self._snapshot = following.gaps, following.snapshot

    # -- the copy ------------------------------------------------------------------------------

    def _new_copy(self) -> follower_state_machine.WeightCopy:
        return follower_state_machine.WeightCopy("the job", "float32")

    def _found(self) -> follower_state_machine.FoundSnapshot | None:
        snapshot = self._newest()
        if snapshot is None:
            return None
        checksums = [checksum(snapshot.number)] * len(snapshot.parts)
        return follower_state_machine.FoundSnapshot(
            checksums[0], checksums, lambda: _served(snapshot.parts)
        )

    def _content(self) -> Content:
        content_now = {}
        for name, table in self._following.copy.rows.sparse.items():
            ids, rows, _ = table.content()
            content_now[name] = {
                int(key): row.tobytes() for key, row in zip(ids, rows, strict=True)
            }
        return _union([content_now])

    # -- checks --------------------------------------------------------------------------------

    def _check(self, before: FollowedCut | None) -> None:
        """Raise Broken unless the cut is what all servers held, and lacks nothing."""
        cut, held = self._following.cut, self._held
        assert cut is not None
        same = before is not None and (before.round is None) == (cut.round is None)
        if before is not None and same and cut.number < before.number:
            raise Broken(f"cut {cut} comes after cut {before}")
        if self._content() != _union(held):
            raise Broken(f"the copy is not what the servers held at cut {cut.number}")
        counts = [_counts(server, content) for server, content in enumerate(held)]
        if self._job.moves:  # each server counts its own samples alone
            counts = [_counts(0, _union(held))]
        if cut.round is not None:
            self._check_round(cut.round)
        elif not self._job.moves:
            for server, own in enumerate(counts):
                self._check_pushes(server, cut.pushes[server], own)
        if all(map(self._leads, self._sources)):
            for server, known in self._before.items():
                if any(counts[server].get(sample, 0) < count for sample, count in known.items()):
                    raise Broken(f"cut {cut.number} takes back what was in a cut before it")
        for server, own in enumerate(counts):
            self._cuts.counts.setdefault(server, {}).update(own)

    def _check_round(self, number: int) -> None:
        rows = self._following.copy.rows
        if rows.has("rows"):
            self._cuts.rows.append((number, rows.look_up("rows", IDS)))
        for server, content in enumerate(() if self._job.moves else self._held):
            own = content.get(FEW.name, {})
            if self._cuts.rounds.setdefault((server, number), own) != own:
                raise Broken(f"server {server} has held {own} after round {number}, or others")

    def _check_pushes(
        self, server: int, last: Mapping[int, tuple[int, int]], counts: Mapping[int, float]
    ) -> None:
        """What the cut says is in it, nothing that is behind it, and all that had been acknowledged."""
        for (seat, incarnation, number), samples in self._pushes.items():
            at, top = last.get(seat, (0, 0))
            if at != incarnation or server not in self._pushes.sent[seat, incarnation, number]:
                continue
            inside = [sample in counts for sample in samples.tolist()]
            if number <= top and not all(inside):
                raise Broken(f"push {number} of {seat} is not in a cut up to {top}: {counts}")
            # Samples of a worker that has died may have come with another push.
            if number > top and any(inside) and not self._pushes.again(samples):
                raise Broken(f"push {number} of {seat} is in a cut up to {top}: {counts}")
        if not all(map(self._leads, self._sources)):
            return
        for where, *found in self._pushes.acknowledged[: self._acknowledged]:
            push = found[0], found[1], found[2]
            if where == server and not counts.keys() >= set(self._pushes[push].tolist()):
                raise Broken(f"push {push} was acknowledged by server {server}, and is in no cut")


def content_of(shard: Shard) -> Content:
    """What a server holds."""
    found = {}
    for key, table in shard.tables.items():
        assert isinstance(table, SparseTable)
        ids = np.sort(table.ids())
        [rows] = shard.tables.read([Read(key, ids)])
        found[table.spec.name] = {int(k): row.tobytes() for k, row in zip(ids, rows, strict=True)}
    return found


def checksum(number: int) -> str:
    """What a snapshot's files are known by."""
    return f"snapshot {number}"


def _union(contents: Sequence[Content]) -> Content:
    names = {name for content in contents for name in content}
    union = {
        name: {k: row for content in contents for k, row in content.get(name, {}).items()}
        for name in names
    }
    return {name: rows for name, rows in union.items() if rows}


def _counts(server: int, content: Content) -> dict[int, float]:
    """By sample how often a server says that it was used."""
    rows = content.get(COUNTS.name, {})
    first = int(count_ids(np.zeros(1, np.int64), server)[0])
    return {
        key - first: round(float(np.frombuffer(row, np.float32)[0]), 5) for key, row in rows.items()
    }


def _served(parts: Sequence[Taken]) -> ServedRows:
    """The weights of a snapshot."""
    rows = ServedRows("a snapshot")
    for spec in (ROWS, COUNTS, FEW):
        rows.add(spec)
        for part in parts:
            own = part.rows.get(spec.name, {})
            if own:
                values = np.frombuffer(b"".join(own.values()), np.float32)
                ids = np.array(list(own), np.int64)
                rows.sparse[spec.name].put(ids, values.reshape(-1, spec.dim))
    return rows
