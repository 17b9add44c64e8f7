"""State of the snapshot that is being taken: its stage, its files, and the workers that it waits for.

`SnapshotCoordinator` holds these objects and decides; here is only what it remembers. `SnapshotUnderWay`
lives as long as one snapshot, `WorkerStates` as long as server 0. Both are pure and belong to the
coordinator's thread.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from psfleet.core.base.errors import CheckpointError, PsfleetError
from psfleet.core.engine.shard.events import Call
from psfleet.core.engine.shard.snapshot_cuts import PendingCut
from psfleet_server.snapshots.snapshot_events import (
    MembersChanged,
    ReleaseWorker,
    SnapshotPart,
    SnapshotRequested,
    WorkerIntroduced,
    WorkerStateArrived,
)

NEVER = float("inf")


class Stage(Enum):
    """Stages of the snapshot under way, each named by what it waits for."""

    IDLE = "there is none"
    NUMBERING = (
        "a heartbeat of each worker, which may know of a snapshot that a server 0 before had begun"
    )
    OPENING = "its folder"
    HOLDING = "where every server stands"
    DISAGREEING = "servers that do not agree on who is in the fleet"
    PLACING = "every server to know where to cut"
    AWAITING_ROUND = "the round to cut after"
    AWAITING_WORKERS = "workers to learn of it"
    CUTTING = "every server's cut"
    WRITING = "every server's file"
    AWAITING_STATES = "the states of workers"
    PUBLISHING = "its manifest"
    SETTLING = "every server to know how it ended"


ANNOUNCED = (
    Stage.AWAITING_WORKERS,
    Stage.CUTTING,
    Stage.WRITING,
    Stage.AWAITING_STATES,
    Stage.PUBLISHING,
)
"""Stages in which workers may ask what to do for the snapshot. In any other stage it is over for them."""


@dataclass
class SnapshotUnderWay:
    """Snapshot that is being taken, from the request to its end.

    Attributes:
        asked: The request for the snapshot, with its call.
        number: Number of the snapshot, or 0 until it gets one. Numbers only rise.
        path: Folder or URL where the snapshot will be.
        folder: Folder of its files until it is complete.
        agree_by: Time until which the servers must agree on who is in the fleet.
        members: Incarnations of the workers in it, by seat.
        round: In sync mode the last round in it, else None.
        base: Number and path of the snapshot that this delta builds on, or None if it is no delta.
        learned: Calls of workers that know of the snapshot and wait until all workers do, by seat.
        states: States that members have delivered, by seat and the last push or round in them.
        parts: Files of all servers, in order; empty until all are written.
        failure: Error for the caller if the snapshot is given up, else None.
    """

    asked: SnapshotRequested
    number: int = 0
    path: str = ""
    folder: str = ""
    agree_by: float = NEVER
    members: dict[int, int] = field(default_factory=dict)
    round: int | None = None
    base: tuple[int, str] | None = None
    learned: dict[int, Call] = field(default_factory=dict)
    states: dict[tuple[int, int], Any] = field(default_factory=dict)
    parts: tuple[SnapshotPart, ...] = ()
    failure: PsfleetError | None = None

    @property
    def is_own(self) -> bool:
        """True if the snapshot goes to the job's own folder, so that logs may start from it."""
        return not self.asked.request.path

    def cutting(self) -> PendingCut:
        """Return the order to cut for this snapshot. The caller adds the round or the members to cut at."""
        request = self.asked.request
        since = self.base[0] if self.base else 0
        return PendingCut(self.number, since=since, remember=request.base or request.delta)

    def last(self, seat: int) -> int:
        """Return a seat's last push or round in the snapshot. Valid once `parts` is set."""
        cut = self.parts[0].cut
        return cut.round if self.round is not None else cut.pushes.get(seat, (0, 0))[1]

    def states_at_cut(self) -> dict[int, Any]:
        """Return by seat the states that belong to this cut.

        Other states are of an earlier attempt: a server 0 that has died may have begun a snapshot of the same
        number, which ended at another push.
        """
        return {seat: state for (seat, at), state in self.states.items() if at == self.last(seat)}

    def release(self, call: Call) -> ReleaseWorker:
        """Return the reply that tells a worker to mark its stream, or to save its state after a round."""
        waits = self.asked.request.script_waits
        return ReleaseWorker(call, self.round is None, self.round or 0, waits)

    def explained(self, error: Exception) -> PsfleetError:
        """Return the error for the caller that asked for the snapshot."""
        if isinstance(error, PsfleetError):
            return type(error)(f"snapshot {self.number} was not taken: {error}")
        why = str(error) if isinstance(error, OSError) else repr(error)
        return CheckpointError(f"snapshot {self.number} was not taken: {why}")


class WorkerStates:
    """Knowledge of server 0 about which workers keep state, from one snapshot to the next. Pure.

    A worker may leave while a snapshot is being taken. It then delivers the states of its last steps, because
    the cut that decides which of them belongs into the snapshot may still be to come.

    Attributes:
        unheard: Seats of an earlier process of server 0 whose workers have sent no heartbeat to this one.
        last: Highest number of a snapshot that a worker knows of.
    """

    def __init__(self) -> None:
        self.unheard: frozenset[int] = frozenset()
        self.last = 0
        self._left: frozenset[int] = frozenset()
        self._alive: frozenset[int] = frozenset()
        self._state_keepers: dict[tuple[int, int], bool] = {}  # by seat and incarnation
        # Of workers that have left, by seat: pairs [step, state] of their last steps, in order.
        self._farewells: dict[int, Any] = {}

    def change(self, event: MembersChanged) -> None:
        """Note that workers have left, or are heard for the first time."""
        self._left, self._alive = event.left, event.alive
        self.unheard, self.last = event.unheard, event.last

    def introduce(self, event: WorkerIntroduced) -> None:
        """Note whether a worker has state to save, and forget the last states of the seat's last worker."""
        self._state_keepers[event.worker, event.incarnation] = event.keeps
        self._farewells.pop(event.worker, None)

    def leave(self, event: WorkerStateArrived) -> None:
        """Keep the states of the last steps of a worker that leaves."""
        if self._state_keepers.get((event.worker, event.incarnation)):
            self._farewells[event.worker] = event.state

    def present(self, members: Mapping[int, int]) -> set[int]:
        """Return the seats of members that have not left.

        Args:
            members: Incarnations by seat.
        """
        return set(members) - self._left

    def awaited(self, members: Mapping[int, int]) -> set[int]:
        """Return the seats of members whose states belong into a snapshot and are not known yet.

        A worker that has not introduced itself since this process started may have state, so it is awaited as
        long as it sends heartbeats.
        """
        keepers = {
            seat
            for seat in self.present(members)
            if self._state_keepers.get((seat, members[seat]), seat in self._alive)
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
