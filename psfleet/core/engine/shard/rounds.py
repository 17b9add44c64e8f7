"""Sync mode: who is in which round, what is held for it, and when it closes.

The rules R2, R3 and R8 of docs/protocol.md: a push is first held by every server; only then does its
worker commit it with the next pull. A server closes a round when every member has committed it, so a
closed round is one that every server holds whole. Of an incarnation that has ended the coordinator says what
its last round is, in its place.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from psfleet.core.base.errors import Gap, ProtocolError
from psfleet.core.engine.shard.events import Push
from psfleet.core.engine.shard.membership_view import SeatView


@dataclass
class Rounds:
    """Rounds of one shard. `closed` is the last one whose update is in the tables.

    Attributes:
        seats: Worker seats, taken or vacant; all of them are members unless they rest or have left.
        first: Round from which on a seat is a member, if not from the beginning.
        held: Pushes of the open round, by seat.
        committed: Highest round that each seat has committed.
        counted: Last closed round with a push of the seat's present incarnation.
        resting, left: Seats that are no members for now, or for good.
        rests: Number of the last rest of each seat, so that a repeated one has no effect.
        reached: Last round that any server had closed when the view was decided.
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
        """Return whether the push is for the open round; False if it is a repeat.

        Raises:
            Gap: The push is for a round that cannot be open yet, or in which its incarnation does not count.
        """
        first = self.first.get(push.worker, 1)
        if push.sequence < first:
            raise Gap(
                f"worker {push.worker} pushed round {push.sequence}, "
                f"but its life counts from round {first} on"
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
        is_open = self.committed.get(push.worker, 0) < push.sequence
        return push.withdrawn and is_open and bool(earlier.gradients)

    def hold(self, push: Push) -> None:
        """Hold a new push for the open round, in place of one that its worker withdraws."""
        self.resting.discard(push.worker)
        self.held[push.worker] = push

    def commit(self, worker: int, number: int) -> bool:
        """The worker knows that all servers hold its push of round `number`; whether that is news."""
        if number < self.first.get(worker, 1):
            return False  # it only waits for a round before its incarnation
        if number > self.closed and worker not in self.held:
            raise ProtocolError(f"worker {worker} committed round {number}, whose push is not here")
        is_news = number > self.sure_of(worker)
        self.committed[worker] = max(number, self.committed.get(worker, 0))
        return is_news

    def is_new_rest(self, worker: int, number: int) -> bool:
        """Return whether the worker begins this rest; False if it is a repeat.

        Raises:
            ProtocolError: A push of the worker is held and may not be committed.
        """
        if worker in self.held:
            raise ProtocolError(
                f"worker {worker} rests before its push of round "
                f"{self.closed + 1} is committed; flush first"
            )
        return number > self.rests.get(worker, 0)

    def rest_worker(self, worker: int, number: int) -> None:
        """The worker sits out until everybody does. It has committed all its pushes."""
        self.rests[worker] = number
        self.resting.add(worker)
        self._all_back()

    def leave(self, worker: int) -> None:
        """The worker is gone for good."""
        self.left.add(worker)
        self._all_back()

    def go_on_from(self, last: int) -> None:
        """The next round is the one after `last`; up to there every seat has done its part in its way."""
        self.closed = last
        self.counted = dict.fromkeys(self.seats, last)

    def go_back(self) -> None:
        """Nothing of the open round counts, and no rest: all workers begin anew and do both again."""
        self.held.clear()
        self.resting.clear()
        self.rests.clear()
        for last_rounds in (self.committed, self.counted):
            last_rounds.update(
                {seat: min(number, self.closed) for seat, number in last_rounds.items()}
            )

    def begin_incarnation(self, worker: int) -> None:
        """An incarnation begins on a shard that has no view: what the seat's earlier one left is void."""
        self.held.pop(worker, None)
        self._drop_worker(worker)
        self.rests.pop(worker, None)

    def install(
        self, seats: Mapping[int, SeatView], before: Mapping[int, int], last_closed: int
    ) -> None:
        """Be what a view says; `before`: the incarnation of each seat until now.

        A seat's push that is held counts if the view says so, as if it were committed; else it is
        dropped. Who rests follows from the numbers of the rests, and is thus equal on all servers.
        """
        self.reached = last_closed
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
        if worker not in self.held:
            self.committed.pop(worker, None)
        self.counted.pop(worker, None)
        self.resting.discard(worker)
        self.left.discard(worker)

    def members(self) -> list[int]:
        """Seats whose pushes make up the open round, in order."""
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
        """The last round of which every server holds the seat's push, as far as is known here."""
        return max(self.committed.get(seat, 0), self.counted.get(seat, 0))

    def running(self) -> list[int]:
        """Seats that push: all but those that rest or have left."""
        return sorted(self.seats - self.resting - self.left)

    def remaining(self) -> int:
        """Return the number of seats that have not left."""
        return len(self.seats - self.left)

    def is_over(self) -> bool:
        """Return whether a worker has left and none remains."""
        return bool(self.left) and not self.remaining()

    def awaited(self) -> list[int]:
        """Members that have not committed the open round."""
        return [
            seat
            for seat in self.members()
            if seat not in self.held or self.committed.get(seat, 0) <= self.closed
        ]

    def is_complete(self) -> bool:
        """Return whether every member has committed the open round.

        A round without members is complete if a later one has members. So is one of which nothing
        is held here and which another server has closed: it had no members there.
        """
        if self.held:
            return not self.awaited()
        if self.closed < self.reached:
            return True
        # The first question is part of the second; mostly no worker joins, and it is asked at each call.
        return (
            max(self.first.values(), default=0) > self.closed + 1
            and any(self.first.get(seat, 1) > self.closed + 1 for seat in self.running())
            and not self.members()
        )

    def close(self) -> list[Push]:
        """Close the open round; its pushes in seat order."""
        pushes = [self.held[seat] for seat in sorted(self.held)]
        self.held.clear()
        self.closed += 1
        for push in pushes:
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
        if not self.running() and not self.held:
            self.resting.clear()
