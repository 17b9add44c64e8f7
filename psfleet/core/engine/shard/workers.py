"""The workers as one shard knows them: which incarnation each is in, and how far that incarnation is.

Without views (one process, or a fleet that nobody coordinates) an incarnation begins when it joins. With
them an incarnation begins when a view is installed that names it, and joining only finds it there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from psfleet.core.base.errors import ConfigError, Fenced, Gap, NotReady, ProtocolError
from psfleet.core.engine.shard.events import Push, Shrink, WriteState
from psfleet.core.engine.shard.membership_view import InstallView, Position, PrepareView, ViewReport
from psfleet.core.engine.shard.rounds import Rounds


@dataclass
class Workers:
    """Per-worker state of a shard, by seat.

    Attributes:
        server: Name of the shard's server, for messages.
        count: Seats of a fleet without views.
        incarnations: Its incarnation.
        sequences: Last applied push of its incarnation (other modes than sync).
        writes: Last write of its incarnation.
        positions: Progress of each worker in its data.
        progress: Last progress of its incarnation's script, from a push that counts.
        newest: Its last incarnation, which may be over.
        base: The number after which pushes go on since the mode was changed, also those of later
            incarnations.
        view: The one that is installed; 0: none, incarnations begin when they join.
        promised: The one for which the shard is frozen, or `view`.
        frozen: The shard has just started and waits for a view.
        refused: Incarnations that the next view will have ended.
        addressed: On server 0: by server the last push of its incarnation that was sent to it, where that is
            not the last one for all.
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
        """Take over what the workers of another shard were, but not its views."""
        self.incarnations, self.newest = other.incarnations, other.newest
        self.sequences, self.writes = other.sequences, other.writes
        self.positions, self.progress = other.positions, other.progress
        self.addressed = other.addressed
        self.base = other.base

    def has_views(self) -> bool:
        """Return whether membership views say which incarnations there are."""
        return bool(self.view or self.frozen)

    def is_settled(self) -> bool:
        """Return whether no view is awaited or promised."""
        return not self.frozen and self.promised <= self.view

    def check_seat(self, worker: int) -> None:
        """Refuse a worker for which a fleet without views has no seat."""
        if not self.has_views() and not 0 <= worker < self.count:
            raise ConfigError(
                f"worker {worker} wants to join, but the fleet has workers 0 to {self.count - 1}"
            )

    def check_incarnation(self, worker: int, incarnation: int) -> None:
        """Refuse to let an incarnation join that is over, or that the view does not name."""
        if self.has_views():
            self.admit(worker, incarnation)
        present = self.incarnations.get(worker, -1)
        if incarnation < present:
            raise Fenced(
                f"incarnation {incarnation} of worker {worker} has ended; incarnation {present} has begun"
            )

    def admit(self, worker: int, incarnation: int, *, leaves: bool = False) -> None:
        """Refuse a caller whose incarnation has not begun here, or is over.

        Args:
            worker: Its seat.
            incarnation: Its incarnation.
            leaves: It only says that it is done. An incarnation that this server knows may say so before the
                first
                view: the coordinator may have ended, so that none comes.
        """
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
        """Return the error for an incarnation that is over."""
        now = self.incarnations.get(worker)
        then = "its seat is not taken" if now is None else f"incarnation {now} has begun"
        return Fenced(f"incarnation {incarnation} of worker {worker} has ended; {then}")

    def begin_incarnation(self, worker: int, incarnation: int) -> None:
        """An incarnation begins."""
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
        """Return whether the push is the next one of its incarnation (other modes than sync).

        Raises:
            Gap: One before it has not arrived.
        """
        last = self.sequences[push.worker]
        if push.sequence - 1 - push.skipped > last:
            raise Gap(
                f"worker {push.worker} sent push {push.sequence}, "
                f"but push {push.follows if push.skipped else last + 1} has not arrived"
            )
        return push.sequence > last

    def pushed(self, push: Push) -> None:
        """A new push is applied."""
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
        """The worker has said how far its script is, or nothing."""
        if progress:
            self.progress[worker] = progress

    def progress_of(self, members: Iterable[int]) -> dict[int, str]:
        """By seat what these workers said of their scripts' loops."""
        return {seat: self.progress[seat] for seat in members if seat in self.progress}

    def last_pushes(self, marks: Mapping[int, int]) -> dict[int, tuple[int, int]]:
        """By seat its incarnation and its last push before a cut with these marks.

        Pushes up to the mark that were not sent to this server have nothing for it.
        """
        return {
            seat: (incarnation, max(self.sequences[seat], marks.get(seat, 0)))
            for seat, incarnation in self.incarnations.items()
        }

    def is_new_write(self, write: WriteState | Shrink) -> bool:
        """Return whether the write has not taken effect before; one without a number always is new."""
        if not write.number:  # a stock client may leave it out
            return True
        self.admit(write.worker, write.incarnation)
        return write.number > self.writes[write.worker]

    def wrote(self, write: WriteState | Shrink) -> None:
        """A new write takes effect."""
        if write.number:
            self.writes[write.worker] = write.number

    def furthest(self) -> int:
        """The highest sequence of any worker."""
        return max(self.sequences.values(), default=0)

    def go_on_from(self, last: int) -> None:
        """Every worker's next push is the one after `last`."""
        self.base = last
        self.sequences = dict.fromkeys(self.sequences, last)
        self.addressed.clear()

    def ended_at(self, worker: int, last: int) -> None:
        """The worker makes no push after this one, and this server has what was sent to it."""
        self.sequences[worker] = max(last, self.sequences[worker])

    def freeze(self, event: PrepareView) -> None:
        """A new view is coming.

        Raises:
            ProtocolError: A later one is installed or promised.
        """
        if event.view < self.promised or event.view <= self.view:
            raise ProtocolError(
                f"view {event.view} comes after view {max(self.promised, self.view)} "
                f"on server {self.server}"
            )
        self.promised = event.view
        self.refused |= set(event.ended.items())  # of decided views that have not come, too

    def report(self, mode: str, rounds: Rounds) -> ViewReport:
        """Return the state of the shard with respect to these workers."""
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
        """Refuse a view for which the shard is not frozen."""
        if event.view != self.promised:
            raise ProtocolError(
                f"view {event.view} cannot be installed on server {self.server}, which is frozen "
                f"for view {self.promised}"
            )

    def install(self, event: InstallView) -> list[tuple[int, int]]:
        """Be what a view says of who is there; the incarnations that are to begin, as (worker,
        incarnation)."""
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
        """Check what must always hold; for tests."""
        assert set(self.sequences) == set(self.writes) == set(self.incarnations)
        assert set(self.incarnations) <= set(self.newest)
        assert self.view <= self.promised
