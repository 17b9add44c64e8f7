"""Rounds of sync mode: which workers are members of a round, which pushes have arrived, and when it closes.

A worker takes part in a round in two steps (rules R2, R3 and R8 of docs/protocol.md):

    1. push      each server checks the push and stores it; the tables do not change
    2. commit    sent with the next pull, once all servers have the push

A server closes a round when every member has committed it: it applies the mean of the stored (*held*) pushes.
So no server closes a round for which another server lacks a push. For a worker process that has ended, the
coordinator decides its last round instead of a commit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from psfleet.core.base.errors import Gap, ProtocolError
from psfleet.core.engine.shard.events import Push
from psfleet.core.engine.shard.membership_view import SeatView


@dataclass
class Rounds:
    """Rounds of one shard. The open round is round `closed` + 1. A *seat* is a worker's rank.

    Attributes:
        seats: Seats of workers, taken or vacant. A seat is a member of the open round unless it waits at a
            collective (a barrier, say) or has left.
        closed: Last round whose update is in the tables.
        first: For each seat that joined later than the first round, the first round of which it is a member.
        held: Pushes of the open round that have arrived, by seat.
        committed: For each seat, the highest round that it has committed: it has confirmed that all servers
            have its push.
        counted: For each seat, the last closed round with a push of its present incarnation.
        resting, left: Seats that wait at a collective, and seats that have left for good.
        rests: For each seat, the number of collectives at which it has waited. A repeated message has the
            same number and no effect.
        reached: Last round that any server had closed when the membership was decided.
    """

    seats: set[int]
    closed: int = 0
    first: dict[int, int] = field(default_factory=dict)
    held: dict[int, Push] = field(default_factory=dict)
    committed: dict[int, int] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)
    resting: set[int] = field(default_factory=set)
    rests: dict[int, int] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    reached: int = 0

    def is_new(self, push: Push) -> bool:
        """Return whether the push is a new push for the open round, or False if it has arrived before.

        Raises:
            Gap: The push is for a round that cannot be open yet, or of which its worker process is no member.
        """
        first = self.first.get(push.worker, 1)
        if push.sequence < first:
            raise Gap(
                f"worker {push.worker} pushed round {push.sequence}, "
                f"but this process of it takes part from round {first} on"
            )
        if push.sequence <= self.closed:
            return False
        if push.sequence != self.closed + 1:
            raise Gap(
                f"worker {push.worker} pushed round {push.sequence}, "
                f"but round {self.closed + 1} is open"
            )
        earlier = self.held.get(push.worker)
        if earlier is None:
            return True
        # A second push of the round is a repeat, or it withdraws the first: once (a withdrawn push has no
        # gradients), and only as long as the worker has not committed.
        is_open = self.committed.get(push.worker, 0) < push.sequence
        return push.withdrawn and is_open and bool(earlier.gradients)

    def hold(self, push: Push) -> None:
        """Store a new push for the open round. It replaces the push that its worker withdraws, if any."""
        # A worker that pushes waits at no collective; `validate` checks that no worker does both.
        self.resting.discard(push.worker)
        self.held[push.worker] = push

    def commit(self, worker: int, number: int) -> bool:
        """Record that all servers have the worker's push of round `number`; return whether this is new.

        Raises:
            ProtocolError: The push is not here.
        """
        if number < self.first.get(worker, 1):
            return False  # the worker only waits for a round before its first one
        if number > self.closed and worker not in self.held:
            raise ProtocolError(f"worker {worker} committed round {number}, whose push is not here")
        is_news = number > self.sure_of(worker)
        self.committed[worker] = max(number, self.committed.get(worker, 0))
        return is_news

    def is_new_rest(self, worker: int, number: int) -> bool:
        """Return whether the worker now begins to wait at a collective, or False if the message is a repeat.

        Raises:
            ProtocolError: A push of the worker for the open round is here, and perhaps not on all servers.
        """
        if worker in self.held:
            raise ProtocolError(
                f"worker {worker} rests before its push of round "
                f"{self.closed + 1} is committed; flush first"
            )
        return number > self.rests.get(worker, 0)

    def rest_worker(self, worker: int, number: int) -> None:
        """Record that a worker waits at a collective (a barrier, say), until all workers wait or have left.

        Before that, the worker has confirmed that all servers have its pushes.
        """
        self.rests[worker] = number
        self.resting.add(worker)
        self._all_back()

    def leave(self, worker: int) -> None:
        """Record that a worker has left for good."""
        self.left.add(worker)
        self._all_back()

    def go_on_from(self, last: int) -> None:
        """Number rounds on from `last` after a mode switch, as if all workers had taken part in `last`."""
        self.closed = last
        self.counted = dict.fromkeys(self.seats, last)

    def go_back(self) -> None:
        """Drop the open round and all waits at barriers, because all workers restart and repeat both."""
        self.held.clear()
        self.resting.clear()
        self.rests.clear()
        # The open round will be pushed again, so a commit of it must not count.
        for last_rounds in (self.committed, self.counted):
            last_rounds.update(
                {seat: min(number, self.closed) for seat, number in last_rounds.items()}
            )

    def begin_incarnation(self, worker: int) -> None:
        """Drop the remains of a worker's earlier process. For fleets without membership views."""
        self.held.pop(worker, None)  # first, so that `_drop_worker` drops its commit too
        self._drop_worker(worker)
        self.rests.pop(worker, None)

    def install(
        self, seats: Mapping[int, SeatView], before: Mapping[int, int], last_closed: int
    ) -> None:
        """Adopt a view, a membership of the fleet that the coordinator has decided.

        A push of the open round stays if the view makes its worker process (incarnation) a member of the
        round. If that process has ended, the push also counts as present on all servers. Other pushes are
        dropped. The seats that wait at a collective follow from the number of each seat's waits, and are
        therefore the same on all servers.

        Args:
            seats: Seats (worker ranks) of the view.
            before: For each seat, the number of its worker process until now.
            last_closed: Last round that any server had closed.
        """
        self.reached = last_closed
        # Held pushes first: `_drop_worker` keeps the commits of pushes that stay.
        for seat in [*self.held]:
            self._decide_held_push(seat, seats)
        self.seats = {seat for seat, view in seats.items() if view.incarnation is not None}
        for seat in self.seats:
            incarnation = seats[seat].incarnation
            assert incarnation is not None
            if before.get(seat) != incarnation.incarnation:
                self._drop_worker(seat)
                self.rests[seat] = 0
            self.first[seat] = incarnation.first
            self.rests[seat] = max(seats[seat].rests, self.rests.get(seat, 0))
            if seats[seat].left:
                self.left.add(seat)
        self.left &= self.seats
        # A seat that has waited at more collectives than the slowest seat still waits for that seat.
        slowest = min((self.rests[seat] for seat in self.seats - self.left), default=0)
        self.resting = {seat for seat in self.seats - self.left if self.rests[seat] > slowest}

    def _decide_held_push(self, seat: int, seats: Mapping[int, SeatView]) -> None:
        push = self.held[seat]
        incarnations = (
            {incarnation.incarnation: incarnation for incarnation in seats[seat].incarnations}
            if seat in seats
            else {}
        )
        incarnation = incarnations.get(push.incarnation)
        if incarnation is None or not incarnation.is_member_in(push.sequence):
            del self.held[seat]
        elif incarnation.last is not None:
            self.committed[seat] = push.sequence

    def _drop_worker(self, worker: int) -> None:
        # A held push of an ended incarnation still counts in the open round, and needs its commit.
        if worker not in self.held:
            self.committed.pop(worker, None)
        self.counted.pop(worker, None)
        self.resting.discard(worker)
        self.left.discard(worker)

    def members(self) -> list[int]:
        """Return the ranks of the workers whose pushes make up the open round, ascending."""
        return sorted(
            seat for seat in self.seats | self.held.keys() if seat in self.held or self._is_in(seat)
        )

    def _is_in(self, seat: int) -> bool:
        return (
            self.first.get(seat, 1) <= self.closed + 1
            and seat not in self.resting
            and seat not in self.left
        )

    def sure_of(self, seat: int) -> int:
        """Return the last round for which all servers are known to have this worker's push."""
        return max(self.committed.get(seat, 0), self.counted.get(seat, 0))

    def running(self) -> list[int]:
        """Return the ranks of the workers that push: all except those that wait or have left."""
        return sorted(self.seats - self.resting - self.left)

    def remaining(self) -> int:
        """Return the number of workers that have not left."""
        return len(self.seats - self.left)

    def is_over(self) -> bool:
        """Return whether all workers have left."""
        return bool(self.left) and not self.remaining()

    def awaited(self) -> list[int]:
        """Return the members that have not confirmed yet that all servers have their push of this round."""
        return [
            seat
            for seat in self.members()
            if seat not in self.held or self.committed.get(seat, 0) <= self.closed
        ]

    def is_complete(self) -> bool:
        """Return whether the open round can close: all servers have the push of every member.

        A round without pushes and without members can close if a later round has members. A round without
        pushes that another server has already closed can close too, because it had no members there.
        """
        if self.held:
            return not self.awaited()
        if self.closed < self.reached:
            return True
        # The first condition follows from the second. It saves time: this runs at each call, and usually
        # no worker has just joined.
        return (
            max(self.first.values(), default=0) > self.closed + 1
            and any(self.first.get(seat, 1) > self.closed + 1 for seat in self.running())
            and not self.members()
        )

    def close(self) -> list[Push]:
        """Close the open round, and return its pushes in the order of worker ranks."""
        pushes = [self.held[seat] for seat in sorted(self.held)]
        self.held.clear()
        self.closed += 1
        for push in pushes:
            # Otherwise the push is of an earlier incarnation of the seat, which a view has ended.
            if self.first.get(push.worker, 1) <= self.closed:
                self.counted[push.worker] = self.closed
        self._all_back()
        return pushes

    def validate(self) -> None:
        """Check what must always hold; for tests."""
        assert all(push.sequence == self.closed + 1 for push in self.held.values())
        assert not self.resting & set(self.held)
        assert self.resting <= self.seats

    def _all_back(self) -> None:
        """End all waits at a collective if every worker has arrived there."""
        # While a push is held, its round is open. Workers that come back would become members of that round
        # without having pushed.
        if not self.running() and not self.held:
            self.resting.clear()
