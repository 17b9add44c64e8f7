"""Knowledge of server 0 about the workers that have state to save, from one snapshot to the next.

A worker may leave while a snapshot is being taken. It then delivers the states of its last steps, because the
cut, which decides which state belongs into the snapshot, may still be in the future. Pure, like the
coordinator that owns this object.
"""

from collections.abc import Callable, Mapping
from typing import Any


class WorkerStates:
    """Workers that have state to save, and the last states of workers that have left.

    Attributes:
        left: Workers that have left.
        alive: Workers that have sent a heartbeat since this process started.
        unheard: Workers that an earlier process of server 0 knew and that have sent no heartbeat to this one.
        last_snapshot: Highest number of a snapshot that a worker knows of, from this or an earlier process.
    """

    def __init__(self) -> None:
        self.left: frozenset[int] = frozenset()
        self.alive: frozenset[int] = frozenset()
        self.unheard: frozenset[int] = frozenset()
        self.last_snapshot = 0
        self._state_keepers: dict[tuple[int, int], bool] = {}  # by seat and incarnation
        # For each worker that has left, pairs [step, state] of its last steps, in order.
        self._farewells: dict[int, Any] = {}

    def introduce(self, worker: int, incarnation: int, keeps: bool) -> None:
        """Note whether a worker has state to save, and drop the last states of its earlier process."""
        self._state_keepers[worker, incarnation] = keeps
        self._farewells.pop(worker, None)

    def keep_farewell(self, worker: int, incarnation: int, steps: Any) -> None:
        """Keep the states of the last steps of a worker that leaves, if it has state to save."""
        if self._state_keepers.get((worker, incarnation)):
            self._farewells[worker] = steps

    def present(self, members: Mapping[int, int]) -> set[int]:
        """Return the members that have not left.

        Args:
            members: For each worker, the number of its process (incarnation).
        """
        return set(members) - self.left

    def awaited(self, members: Mapping[int, int]) -> set[int]:
        """Return the members whose states a snapshot waits for.

        A worker that has not introduced itself since this process started may have state. The snapshot waits
        for it as long as it sends heartbeats.
        """
        keepers = {
            seat
            for seat in self.present(members)
            if self._state_keepers.get((seat, members[seat]), seat in self.alive)
        }
        return keepers - self._farewells.keys()

    def farewells(self, last: Callable[[int], int]) -> dict[int, Any]:
        """Return, for each worker that has left, its last state that belongs into the snapshot.

        Args:
            last: Returns a worker's last push or round in the snapshot.
        """
        states: dict[int, Any] = {}
        for seat, steps in self._farewells.items():
            until = [state for step, state in steps if step <= last(seat)]
            states |= {seat: until[-1]} if until else {}
        return states
