"""Which workers a snapshot waits for, and the states of those that have left before it was complete."""

from collections.abc import Mapping
from typing import Any

from psfleet.checkpoint import CutPosition
from psfleet_server.snapshots.snapshot_events import (
    MembersChanged,
    WorkerIntroduced,
    WorkerStateArrived,
)

__all__ = ["WorkerStates"]


class WorkerStates:
    """What server 0 knows of its workers' states, from one snapshot to the next. Pure."""

    def __init__(self) -> None:
        self._left: frozenset[int] = frozenset()
        self._heard: frozenset[int] = frozenset()
        self._keepers: dict[tuple[int, int], bool] = {}  # by seat and incarnation
        self._farewells: dict[
            int, Any
        ] = {}  # by seat [step, state] of the last steps of who has left

    def change(self, event: MembersChanged) -> None:
        """Workers have left, or are heard for the first time."""
        self._left, self._heard = event.left, event.heard

    def introduce(self, event: WorkerIntroduced) -> None:
        """A worker says whether it has state."""
        self._keepers[event.worker, event.incarnation] = event.keeps
        self._farewells.pop(event.worker, None)

    def leave(self, event: WorkerStateArrived) -> None:
        """A worker delivers the states of its last steps, because it leaves."""
        if self._keepers.get((event.worker, event.incarnation)):
            self._farewells[event.worker] = event.state

    def present(self, members: Mapping[int, int]) -> set[int]:
        """Seats of members that have not left. `members`: incarnations by seat."""
        return set(members) - self._left

    def awaited(self, members: Mapping[int, int]) -> set[int]:
        """Seats of members whose states belong into a snapshot and are not known yet.

        Who has not introduced itself since this server has started may have state, if it lives.
        """
        keepers = {
            seat
            for seat in self.present(members)
            if self._keepers.get((seat, members[seat]), seat in self._heard)
        }
        return keepers - self._farewells.keys()

    def farewells(self, cut: CutPosition, in_rounds: bool) -> dict[int, Any]:
        """By seat the last state before the cut of workers that have left."""
        found: dict[int, Any] = {}
        for seat, steps in self._farewells.items():
            last = cut.round if in_rounds else cut.pushes.get(seat, (0, 0))[1]
            until = [state for step, state in steps if step <= last]
            found |= {seat: until[-1]} if until else {}
        return found
