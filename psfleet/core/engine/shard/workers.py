"""Workers as one shard knows them: the present incarnation of each seat, and its progress.

A *seat* is a worker's rank in the fleet. Each process that takes a seat is an *incarnation* of it. A call of
an ended incarnation is refused with Fenced, and a call of an incarnation that has not begun here with
NotReady, after which the worker tries again. This module also recognises repeated pushes and writes by their
numbers.

In a fleet with membership views, an incarnation begins when a view with it is installed; joining then only
confirms it. Without views (one process, or a fleet without a coordinator) an incarnation begins when it
joins.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from psfleet.core.base.errors import ConfigError, Fenced, Gap, NotReady, ProtocolError
from psfleet.core.engine.shard.events import Push, Shrink, WriteState
from psfleet.core.engine.shard.membership_view import InstallView, Position, PrepareView, ViewReport
from psfleet.core.engine.shard.rounds import Rounds


@dataclass
class Workers:
    """State of each worker in a shard. The mappings are by seat (worker rank).

    An incarnation is one process that takes a seat. A view is a membership that the coordinator has decided.

    Attributes:
        server: Index of the shard's server, for messages.
        count: Number of seats in a fleet without views.
        incarnations: Number of the present incarnation.
        sequences: Last applied push of the incarnation (modes other than sync).
        writes: Number of the incarnation's last write.
        positions: Position of the incarnation in its data after its last push (modes other than sync).
        progress: Last loop position of the incarnation's script that came with an accepted push.
        newest: Highest incarnation that has begun; it may have ended.
        base: Number of the last push before the latest mode switch. New incarnations number their pushes
            after it.
        view: Number of the installed view, or 0 in a fleet without views, where incarnations begin when they
            join.
        promised: Number of the view that was announced and not installed yet, or else `view`.
        frozen: True if the shard has just started and waits for a view.
        refused: Pairs of a seat and an incarnation that the next view ends.
        addressed: On server 0, the incarnation's last push that was sent to each server. A seat
            whose last push went to all servers has no entry.
    """

    server: int
    count: int
    incarnations: dict[int, int] = field(default_factory=dict)
    sequences: dict[int, int] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)
    positions: dict[int, Position] = field(default_factory=dict)
    progress: dict[int, str] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)
    base: int = 0
    view: int = 0
    promised: int = 0
    frozen: bool = False
    refused: set[tuple[int, int]] = field(default_factory=set)
    addressed: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def become(self, other: "Workers") -> None:
        """Copy the worker processes and their progress from another shard, but not its membership views."""
        self.incarnations, self.newest = other.incarnations, other.newest
        self.sequences, self.writes = other.sequences, other.writes
        self.positions, self.progress = other.positions, other.progress
        self.addressed = other.addressed
        self.base = other.base

    def has_views(self) -> bool:
        """Return whether membership views decide which worker processes belong to the fleet."""
        return bool(self.view or self.frozen)

    def is_settled(self) -> bool:
        """Return whether no membership view is awaited or announced."""
        return not self.frozen and self.promised <= self.view

    def check_seat(self, worker: int) -> None:
        """Raise ConfigError for a worker rank that a fleet without membership views does not have."""
        if not self.has_views() and not 0 <= worker < self.count:
            raise ConfigError(
                f"worker {worker} wants to join, but the fleet has workers 0 to {self.count - 1}"
            )

    def check_incarnation(self, worker: int, incarnation: int) -> None:
        """Raise an error if a joining worker process (incarnation) has ended, or is not in the fleet.

        Raises:
            Fenced: The process has ended: a later process of the same rank has begun.
            NotReady: The membership view does not contain the process yet; the caller tries again.
        """
        if self.has_views():
            self.admit(worker, incarnation)
        present = self.incarnations.get(worker, -1)
        if incarnation < present:
            raise Fenced(
                f"incarnation {incarnation} of worker {worker} has ended; incarnation {present} has begun"
            )

    def admit(self, worker: int, incarnation: int, *, leaves: bool = False) -> None:
        """Refuse a call of a worker process (incarnation) that has ended, or that is not known here yet.

        Args:
            worker: Rank of the caller.
            incarnation: Number of the caller's process among those of its rank.
            leaves: True if the call only reports that the worker has finished. Such a call of a known
                incarnation is accepted even while the server waits for its first view, because a coordinator
                that has ended never sends that view.

        Raises:
            NotReady: The incarnation has not begun here, or a view is awaited; the caller tries again.
            Fenced: The incarnation has ended.
        """
        # NotReady comes before Fenced: while a view is awaited, this server cannot know which incarnations
        # have ended.
        waits = self.frozen and not (leaves and self.incarnations.get(worker) == incarnation)
        if waits or (worker, incarnation) in self.refused:
            raise NotReady(f"server {self.server} waits to hear who is in the fleet")
        if self.incarnations.get(worker) == incarnation:
            return
        if worker not in self.newest or incarnation > self.newest[worker]:
            raise NotReady(
                f"incarnation {incarnation} of worker {worker} has not joined server {self.server}"
            )
        raise self.fenced(worker, incarnation)

    def fenced(self, worker: int, incarnation: int) -> Fenced:
        """Return the error for a call of a worker process that has ended."""
        now = self.incarnations.get(worker)
        then = "its seat is not taken" if now is None else f"incarnation {now} has begun"
        return Fenced(f"incarnation {incarnation} of worker {worker} has ended; {then}")

    def begin_incarnation(self, worker: int, incarnation: int) -> None:
        """Begin a worker process (incarnation) in this seat, with no pushes and no writes."""
        self.incarnations[worker] = self.newest[worker] = incarnation
        self.sequences[worker], self.writes[worker] = self.base, 0
        self._drop_worker(worker)

    def _end(self, worker: int) -> None:
        del self.incarnations[worker], self.sequences[worker], self.writes[worker]
        self._drop_worker(worker)

    def _drop_worker(self, worker: int) -> None:
        for by_seat in (self.positions, self.progress, self.addressed):
            by_seat.pop(worker, None)

    def is_new_push(self, push: Push) -> bool:
        """Return whether the push is the next push of its worker process, or False if it is a repeat.

        For modes other than sync.

        Raises:
            Gap: An earlier push has not arrived.
        """
        last = self.sequences[push.worker]
        if push.sequence - 1 - push.skipped > last:
            raise Gap(
                f"worker {push.worker} sent push {push.sequence}, "
                f"but push {push.follows if push.skipped else last + 1} has not arrived"
            )
        return push.sequence > last

    def pushed(self, push: Push) -> None:
        """Record a new push that is about to be applied."""
        self.sequences[push.worker] = push.sequence
        if push.addressed:
            self.addressed[push.worker] = push.addressed
        else:
            self.addressed.pop(push.worker, None)
        if push.position is not None:
            self.positions[push.worker] = push.position
        if push.progress:
            self.progress[push.worker] = push.progress

    def said(self, worker: int, progress: str) -> None:
        """Store the loop position of a worker's script, unless it is empty."""
        if progress:
            self.progress[worker] = progress

    def progress_of(self, members: Iterable[int]) -> dict[int, str]:
        """Return the last loop position of each of these workers that has reported one, by rank."""
        return {seat: self.progress[seat] for seat in members if seat in self.progress}

    def last_pushes(self, marks: Mapping[int, int]) -> dict[int, tuple[int, int]]:
        """Return for each worker rank the pair (incarnation, its last push in a snapshot).

        Args:
            marks: For each worker that has named its last push in the snapshot, that push. It counts even if
                it was not sent to this server: it then has no gradients for the server, so the tables
                contain it.
        """
        return {
            seat: (incarnation, max(self.sequences[seat], marks.get(seat, 0)))
            for seat, incarnation in self.incarnations.items()
        }

    def is_new_write(self, write: WriteState | Shrink) -> bool:
        """Return whether the write has not taken effect before. A write without a number is always new."""
        if not write.number:  # a client other than psfleet's may leave the number out
            return True
        self.admit(write.worker, write.incarnation)
        return write.number > self.writes[write.worker]

    def wrote(self, write: WriteState | Shrink) -> None:
        """Record that a new write takes effect."""
        if write.number:
            self.writes[write.worker] = write.number

    def furthest(self) -> int:
        """Return the highest push number of any worker."""
        return max(self.sequences.values(), default=0)

    def go_on_from(self, last: int) -> None:
        """Number the pushes of every worker on from `last`, after a mode switch."""
        self.base = last
        self.sequences = dict.fromkeys(self.sequences, last)
        self.addressed.clear()

    def ended_at(self, worker: int, last: int) -> None:
        """Record that the worker makes no push after `last`, and that this server has all its pushes."""
        self.sequences[worker] = max(last, self.sequences[worker])

    def freeze(self, event: PrepareView) -> None:
        """Stop closing rounds until a new membership view is installed, and refuse processes that it ends.

        Raises:
            ProtocolError: A later view is installed or announced.
        """
        if event.view < self.promised or event.view <= self.view:
            raise ProtocolError(
                f"view {event.view} comes after view {max(self.promised, self.view)} "
                f"on server {self.server}"
            )
        self.promised = event.view
        # Add to the set: an earlier announced view may have been decided without reaching this server.
        self.refused |= set(event.ended.items())

    def report(self, mode: str, rounds: Rounds) -> ViewReport:
        """Return the report of the frozen shard about these workers."""
        return ViewReport(
            mode,
            rounds.closed,
            dict(self.incarnations),
            {seat: rounds.sure_of(seat) for seat in self.incarnations},
            dict(rounds.rests),
            frozenset(rounds.left),
            dict(self.sequences),
            dict(self.positions),
            dict(self.progress),
            dict(self.addressed),
        )

    def check_install(self, event: InstallView) -> None:
        """Raise ProtocolError for a membership view that was not announced to this shard."""
        if event.view != self.promised:
            raise ProtocolError(
                f"view {event.view} cannot be installed on server {self.server}, which is frozen "
                f"for view {self.promised}"
            )

    def install(self, event: InstallView) -> list[tuple[int, int]]:
        """Adopt the worker processes (incarnations) of a membership view, and end those that are not in it.

        Returns:
            The new incarnations, as pairs (worker, incarnation); the caller begins them.
        """
        self.view = self.promised = event.view
        self.refused = set()
        now = {
            seat: s.incarnation.incarnation
            for seat, s in event.seats.items()
            if s.incarnation is not None
        }
        for worker in [*self.incarnations]:
            if worker not in now:
                self._end(worker)
        return [
            (seat, incarnation)
            for seat, incarnation in now.items()
            if incarnation not in (0, self.incarnations.get(seat))
        ]

    def validate(self) -> None:
        """Check the invariants; for tests."""
        assert set(self.sequences) == set(self.writes) == set(self.incarnations)
        assert set(self.incarnations) <= set(self.newest)
        assert self.view <= self.promised
