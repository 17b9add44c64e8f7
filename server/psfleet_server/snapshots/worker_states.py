"""Knowledge of server 0 about which workers keep state for snapshots, from one snapshot to the next.

A worker may leave while a snapshot is being taken. It then delivers the states of its last steps, because the
cut that decides which of them belongs into the snapshot may still be to come. Pure, like the coordinator that
owns this.
"""

from collections.abc import Callable, Mapping
from typing import Any


class WorkerStates:
    """Knows which workers have state to save, and the last states of workers that have left.

    Attributes:
        left: Seats whose workers have left.
        alive: Seats whose workers have sent a heartbeat since this process started.
        unheard: Seats that an earlier process of server 0 knew and that have sent no heartbeat to this one.
        last_snapshot: Highest number of a snapshot that a worker knows of, from this or an earlier process.
    """

    def __init__(self) -> None:
        self.left: frozenset[int] = frozenset()
        self.alive: frozenset[int] = frozenset()
        self.unheard: frozenset[int] = frozenset()
        self.last_snapshot = 0
        self._state_keepers: dict[tuple[int, int], bool] = {}  # by seat and incarnation
        # Of workers that have left, by seat: pairs [step, state] of their last steps, in order.
        self._farewells: dict[int, Any] = {}

    def introduce(self, worker: int, incarnation: int, keeps: bool) -> None:
        """Note whether a worker has state to save, and drop the farewell of the seat's last worker."""
        self._state_keepers[worker, incarnation] = keeps
        self._farewells.pop(worker, None)

    def keep_farewell(self, worker: int, incarnation: int, steps: Any) -> None:
        """Keep the states of the last steps of a worker that leaves, if it has state to save."""
        if self._state_keepers.get((worker, incarnation)):
            self._farewells[worker] = steps

    def present(self, members: Mapping[int, int]) -> set[int]:
        """Return the seats of members that have not left.

        Args:
            members: Incarnations by seat.
        """
        return set(members) - self.left

    def awaited(self, members: Mapping[int, int]) -> set[int]:
        """Return the seats of members whose states belong into a snapshot and are not known yet.

        A worker that has not introduced itself since this process started may have state, so it is awaited as
        long as it sends heartbeats.
        """
        keepers = {
            seat
            for seat in self.present(members)
            if self._state_keepers.get((seat, members[seat]), seat in self.alive)
        }
        return keepers - self._farewells.keys()

    def farewells(self, last: Callable[[int], int]) -> dict[int, Any]:
        """Return by seat the last state before the cut, of workers that have left.

        Args:
            last: Returns a seat's last push or round in the snapshot.
        """
        states: dict[int, Any] = {}
        for seat, steps in self._farewells.items():
            until = [state for step, state in steps if step <= last(seat)]
            states |= {seat: until[-1]} if until else {}
        return states
