"""Sync mode: who is in which round, what is held for it, and when it closes.

The rules R2 and R3 of the protocol: a push is first held by every server; only then does its worker
commit it with the next pull. A server closes a round when every member has committed it, so a
closed round is one that every server holds whole.
"""

from dataclasses import dataclass, field

from psfleet.errors import Gap, ProtocolError
from psfleet.shard.events import Push

__all__ = ["Rounds"]


@dataclass
class Rounds:
    """Rounds of one shard. `closed` is the last one whose update is in the tables.

    Attributes:
        seats: Number of worker seats; all of them are members until they rest or leave.
        held: Pushes of the open round, by seat.
        committed: Highest round that each seat has committed.
        resting, left: Seats that are no members for now, or for good.
        rests: Number of the last rest of each seat, so that a repeated one has no effect.
    """

    seats: int
    closed: int = 0
    held: dict[int, Push] = field(default_factory=dict)
    committed: dict[int, int] = field(default_factory=dict)
    resting: set[int] = field(default_factory=set)
    rests: dict[int, int] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)

    def is_new(self, push: Push) -> bool:
        """Whether the push is for the open round; False if it is a repeat.

        Raises:
            Gap: The push is for a round that cannot be open yet.
        """
        if push.sequence <= self.closed or push.worker in self.held:
            return False
        if push.sequence != self.closed + 1:
            raise Gap(
                f"worker {push.worker} pushed round {push.sequence}, "
                f"but round {self.closed + 1} is open"
            )
        return True

    def hold(self, push: Push) -> None:
        """Hold a new push for the open round."""
        self.resting.discard(push.worker)
        self.held[push.worker] = push

    def commit(self, worker: int, number: int) -> None:
        """The worker knows that all servers hold its push of round `number`."""
        if number > self.closed and worker not in self.held:
            raise ProtocolError(f"worker {worker} committed round {number}, whose push is not here")
        self.committed[worker] = max(number, self.committed.get(worker, 0))

    def is_new_rest(self, worker: int, number: int) -> bool:
        """Whether the worker begins this rest; False if it is a repeat.

        Raises:
            ProtocolError: A push of the worker is held and may not be committed.
        """
        if worker in self.held:
            raise ProtocolError(
                f"worker {worker} rests before its push of round "
                f"{self.closed + 1} is committed; flush first"
            )
        return number > self.rests.get(worker, 0)

    def rest(self, worker: int, number: int) -> None:
        """The worker sits out until everybody does. It has committed all its pushes."""
        self.rests[worker] = number
        self.resting.add(worker)
        self._all_back()

    def leave(self, worker: int) -> None:
        """The worker is gone for good."""
        self.left.add(worker)
        self._all_back()

    def forget(self, worker: int) -> None:
        """A new life of the worker begins: what its earlier life left open does not count."""
        self.held.pop(worker, None)
        self.committed.pop(worker, None)
        self.rests.pop(worker, None)
        self.resting.discard(worker)
        self.left.discard(worker)

    def members(self) -> list[int]:
        """Seats whose pushes make up the open round, in order."""
        return [
            seat
            for seat in range(self.seats)
            if seat in self.held or not (seat in self.resting or seat in self.left)
        ]

    def awaited(self) -> list[int]:
        """Members that have not committed the open round."""
        return [
            seat
            for seat in self.members()
            if seat not in self.held or self.committed.get(seat, 0) <= self.closed
        ]

    def is_complete(self) -> bool:
        """Whether every member has committed the open round."""
        return bool(self.held) and not self.awaited()

    def close(self) -> list[Push]:
        """Close the open round; its pushes in seat order."""
        pushes = [self.held[seat] for seat in sorted(self.held)]
        self.held.clear()
        self.closed += 1
        return pushes

    def validate(self) -> None:
        """Check what must always hold; for tests."""
        assert all(push.sequence == self.closed + 1 for push in self.held.values())
        assert not self.resting & set(self.held)

    def _all_back(self) -> None:
        if len(self.resting | self.left) == self.seats and not self.held:
            self.resting.clear()
