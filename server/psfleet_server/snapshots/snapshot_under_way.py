"""The snapshot that is being taken: how far it has come, and the workers that it waits for."""

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
"""Stages in which workers know of the snapshot."""


@dataclass
class SnapshotUnderWay:
    """The snapshot under way.

    Attributes:
        asked: The request for the snapshot, with its call.
        number: Its own; numbers only rise. 0: it has none yet.
        path, folder: Where it will be, and where its files are until then.
        agree_by: Time by which the servers must agree on who is in the fleet.
        members: Incarnations of the workers in it, by seat.
        round: Sync mode: the last round in it; None in other modes.
        base: Number and path of the snapshot that this delta builds on.
        learned: Calls of workers that have learned of it and wait for the others.
        states: States that members have delivered, by seat and the last push or round in them.
        parts: Files of all servers, in order.
        failure: Why it is given up.
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
        """The job keeps the snapshot, so that logs may start from it."""
        return not self.asked.request.path

    def cutting(self) -> PendingCut:
        """A cut of this snapshot, at a place that is still to be said."""
        request = self.asked.request
        since = self.base[0] if self.base else 0
        return PendingCut(self.number, since=since, remember=request.base or request.delta)

    def last(self, seat: int) -> int:
        """A seat's last push or round in the snapshot, once its parts are here."""
        cut = self.parts[0].cut
        return cut.round if self.round is not None else cut.pushes.get(seat, (0, 0))[1]

    def states_at_cut(self) -> dict[int, Any]:
        """By seat the states as of the cut. Another one is of an earlier attempt: a process that has died
        may have begun a snapshot of this number, too."""
        return {seat: state for (seat, at), state in self.states.items() if at == self.last(seat)}

    def release(self, call: Call) -> ReleaseWorker:
        """Tell a worker what to do for this snapshot."""
        waits = self.asked.request.script_waits
        return ReleaseWorker(call, self.round is None, self.round or 0, waits)

    def explained(self, error: Exception) -> PsfleetError:
        """Return the error for the caller that asked for the snapshot."""
        if isinstance(error, PsfleetError):
            return type(error)(f"snapshot {self.number} was not taken: {error}")
        why = str(error) if isinstance(error, OSError) else repr(error)
        return CheckpointError(f"snapshot {self.number} was not taken: {why}")


class WorkerStates:
    """Server 0's knowledge of its workers' states, from one snapshot to the next. Pure.

    Attributes:
        unheard, last: See MembersChanged.
    """

    def __init__(self) -> None:
        self.unheard: frozenset[int] = frozenset()
        self.last = 0
        self._left: frozenset[int] = frozenset()
        self._alive: frozenset[int] = frozenset()
        self._state_keepers: dict[tuple[int, int], bool] = {}  # by seat and incarnation
        self._farewells: dict[
            int, Any
        ] = {}  # by seat [step, state] of the last steps of who has left

    def change(self, event: MembersChanged) -> None:
        """Workers have left, or are heard for the first time."""
        self._left, self._alive = event.left, event.alive
        self.unheard, self.last = event.unheard, event.last

    def introduce(self, event: WorkerIntroduced) -> None:
        """A worker says whether it has state."""
        self._state_keepers[event.worker, event.incarnation] = event.keeps
        self._farewells.pop(event.worker, None)

    def leave(self, event: WorkerStateArrived) -> None:
        """A worker delivers the states of its last steps, because it leaves."""
        if self._state_keepers.get((event.worker, event.incarnation)):
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
            if self._state_keepers.get((seat, members[seat]), seat in self._alive)
        }
        return keepers - self._farewells.keys()

    def farewells(self, last: Callable[[int], int]) -> dict[int, Any]:
        """By seat the last state before the cut, which is after step `last`, of workers that have left."""
        states: dict[int, Any] = {}
        for seat, steps in self._farewells.items():
            until = [state for step, state in steps if step <= last(seat)]
            states |= {seat: until[-1]} if until else {}
        return states
