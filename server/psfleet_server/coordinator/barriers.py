"""Collectives of all workers: barriers, all-reduces of one array per worker, and mode switches.

Collectives are numbered for the whole fleet, not per worker process. A restarted worker runs its script from
the start, so it arrives at completed collectives again and needs their results at once. That is why results
are kept. `CollectiveState` is part of the coordinator and pure: `complete` proposes a decision, and `take`
applies the decision once it is in the journal.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import DeadlineExceeded, Gap, ProtocolError, PsfleetError, ShapeError
from psfleet.core.engine.consistency import ConsistencyMode
from psfleet.core.engine.gradient_checks import check_reduction
from psfleet.core.engine.shard.events import Call, SendError
from psfleet.core.engine.shard.membership_view import Position
from psfleet.core.net.membership_messages import (
    agreed_numbers,
    combined_changes,
    read_agreed_numbers,
    read_change,
)
from psfleet.core.net.message_codec import Message

Array = NDArray[Any]

REDUCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "switch": combined_changes,
}
SWITCH = "switch"
"""Reduction of a mode switch. Its arrays come from psfleet.core.net.membership_messages.write_change."""
DTYPES = ("float32", "float64", "int32", "int64")
_KEPT_RESULTS = 64 << 20  # bytes of results that are kept for later incarnations


@dataclass(frozen=True, slots=True)
class Arrival:
    """Arrival of a worker at collective `number`.

    Attributes:
        mode: Name of the reduction in REDUCTIONS, or empty at a barrier.
        value: The worker's array, or None at a barrier.
        change: At a mode switch, the ordinal of the switch in the worker's script.
        round: At a mode switch, the number of the worker's last push.
        position: At a mode switch, the worker's progress in its data. The first number counts the leases
            (ranges of samples from server 0) that are used up, the second the samples used of the next
            lease.
    """

    worker: int
    incarnation: int
    number: int
    mode: str = ""
    value: Array | None = None
    change: int = 0
    round: int = 0
    position: Position = (0, 0)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Kind of the collective as words, such as ("all_reduce", "sum", "float32", (8,)).

        A collective completes only if all workers arrive with the same kind.
        """
        if self.value is None:
            return ("barrier",)
        if self.mode == SWITCH:
            return ("set_mode",)
        return ("all_reduce", self.mode, self.value.dtype.name, self.value.shape)


@dataclass(frozen=True, slots=True)
class ModeRequest:
    """Request from outside the script (`psfleet mode`) to switch the consistency mode.

    Later requests have a higher `number`.
    """

    number: int
    mode: str
    settings: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class CollectiveReply:
    """Reply to a worker's call that waited for a collective to complete.

    Attributes:
        value: Result of the reduction, or None at a barrier.
        mode_request: Request of `psfleet mode` for another mode, announced by this barrier, or None.
    """

    call: Call
    value: Array | None
    mode_request: ModeRequest | None = None


@dataclass(frozen=True, slots=True)
class ModeSwitch:
    """Switch of the fleet to another consistency mode. All workers have arrived; no push is under way.

    Attributes:
        number: Ordinal of the switch, from 1.
        agreed: The new mode as numbers: the number of the mode itself, then those settings of the mode that
            servers need.
        rounds: Number of the last push of each worker.
        positions: Maps each worker to its progress in the data: the number of leases (ranges of samples from
            server 0) that are used up, and the number of samples used of the next lease.
    """

    number: int
    agreed: tuple[int, ...]
    rounds: dict[int, int]
    positions: dict[int, Position]

    def __post_init__(self) -> None:
        read_agreed_numbers(self.agreed)  # refuses a mode that this process does not know

    @property
    def mode(self) -> ConsistencyMode:
        """The new mode, with those of its settings that servers need."""
        return read_agreed_numbers(self.agreed)

    @property
    def last(self) -> int:
        """Highest push number over all workers at the switch, or 0."""
        return max(self.rounds.values(), default=0)


class CollectiveCompleted(Message, frozen=True):
    """Decision that a collective is complete.

    A barrier may also announce a mode request (somebody asks for another mode with `psfleet mode`).
    """

    number: int
    value: Array | None
    mode_request: ModeRequest | None = None
    switch: ModeSwitch | None = None


@dataclass
class CollectiveState:
    """Arrivals at the next collective, and results of earlier collectives.

    Attributes:
        completed: Number of completed collectives.
        results: Results of all-reduces, by number of the collective. The oldest are dropped beyond 64 MiB.
        told: Maps the number of a barrier to the mode request (`psfleet mode`) that it has announced to
            workers.
        switch: The last mode switch, or None.
    """

    completed: int = 0
    results: dict[int, Array] = field(default_factory=dict)
    told: dict[int, ModeRequest] = field(default_factory=dict)
    switch: ModeSwitch | None = None

    def __post_init__(self) -> None:
        # By worker, its arrival and the calls that wait: repeated calls of the same worker wait together.
        self._waiting: dict[int, tuple[Arrival, list[Call]]] = {}

    def arrive(self, arrival: Arrival, call: Call) -> list[CollectiveReply | SendError]:
        """Note that a worker has arrived.

        Returns:
            The reply, if the collective is already complete, or an error, if the arrival is invalid.
            Otherwise nothing yet; `take` later returns the reply.
        """
        try:
            if arrival.value is not None and arrival.mode != SWITCH:
                check_reduction(arrival.mode)
            _check_switch(arrival)
            if arrival.number <= self.completed:
                return [CollectiveReply(call, self._result(arrival), self.told.get(arrival.number))]
            self._check(arrival)
        except PsfleetError as error:
            return [SendError(call, error)]
        self._waiting.setdefault(arrival.worker, (arrival, []))[1].append(call)
        return []

    def _result(self, arrival: Arrival) -> Array | None:
        value = self.results.get(arrival.number)
        if arrival.value is None and value is None:
            return None
        if value is None or arrival.value is None or value.shape != arrival.value.shape:
            raise ProtocolError(
                f"worker {arrival.worker} arrives at collective {arrival.number} with {_words(arrival)}, "
                "which completed with another operation, or whose result is no longer kept"
            )
        return value

    def last_told(self) -> int:
        """Number of the last mode request (`psfleet mode`) that a barrier has announced, or 0."""
        return max((mode_request.number for mode_request in self.told.values()), default=0)

    def complete(
        self, seats: Collection[int], mode_request: ModeRequest | None = None
    ) -> CollectiveCompleted | None:
        """Return the decision that completes the collective, or None if a worker is missing.

        Args:
            seats: Numbers of all workers in the fleet.
            mode_request: Mode request (`psfleet mode`) to announce if the collective is a barrier, and if
                no barrier has announced the request yet.
        """
        if len(self._waiting) < max(len(seats), 1) or not self._waiting.keys() >= set(seats):
            return None
        arrivals = [self._waiting[worker][0] for worker in sorted(self._waiting)]
        value = _combine(arrivals)
        is_new = (
            value is None and mode_request is not None and mode_request.number > self.last_told()
        )
        return CollectiveCompleted(
            self.completed + 1,
            value,
            mode_request if is_new else None,
            self._switch(arrivals, value),
        )

    def _switch(self, arrivals: list[Arrival], value: Array | None) -> ModeSwitch | None:
        """Return the mode switch that all workers request.

        Returns None if this is not a mode switch, if the workers want different modes, or if an earlier run
        of the script has already made the switch.
        """
        if value is None or arrivals[0].mode != SWITCH:
            return None
        mode, _ = read_change(value)
        if mode is None:
            return None
        number = max(arrival.change for arrival in arrivals)
        if self.switch is not None and number <= self.switch.number:
            return None
        return ModeSwitch(
            number,
            agreed_numbers(mode),
            {arrival.worker: arrival.round for arrival in arrivals},
            {arrival.worker: arrival.position for arrival in arrivals},
        )

    def take(self, decision: CollectiveCompleted) -> list[CollectiveReply | SendError]:
        """Complete a collective, as decided. Returns the replies to all calls that wait for it."""
        self.completed = decision.number
        self.switch = decision.switch or self.switch
        if decision.value is not None:
            self.results[decision.number] = decision.value
            self._forget()
        if decision.mode_request is not None:
            self.told[decision.number] = decision.mode_request
        return [
            CollectiveReply(call, decision.value, decision.mode_request)
            for call in self._released()
        ]

    def drop(self, worker: int, error: PsfleetError) -> list[SendError]:
        """Discard the arrival of a worker whose process has ended, and refuse its calls with `error`."""
        _, calls = self._waiting.pop(worker, (None, []))
        return [SendError(call, error) for call in calls]

    def refuse(self, error: PsfleetError) -> list[SendError]:
        """Refuse the calls of all workers that wait, because their collective cannot complete.

        The workers may call again, with the same number.
        """
        return [SendError(call, error) for call in self._released()]

    def _released(self) -> list[Call]:
        """Discard all arrivals, and return their calls by worker number."""
        waiting, self._waiting = self._waiting, {}
        return [call for _, (_, calls) in sorted(waiting.items()) for call in calls]

    def expire(self, call: Call, seats: Collection[int]) -> list[CollectiveReply | SendError]:
        """Refuse a call whose deadline has passed. The worker stays arrived, so others do not wait for it."""
        for arrival, calls in self._waiting.values():
            if call in calls:
                calls.remove(call)
                missing = sorted(set(seats) - self._waiting.keys())
                workers = ", ".join(f"worker {index}" for index in missing)
                error = DeadlineExceeded(
                    f"{arrival.kind[0]} {arrival.number} of worker {arrival.worker} "
                    f"did not end in time: it waits for {workers}"
                )
                return [SendError(call, error)]
        return []

    def _check(self, arrival: Arrival) -> None:
        if arrival.number != self.completed + 1:
            raise Gap(
                f"worker {arrival.worker} arrives at collective {arrival.number}, "
                f"the last one completed is {self.completed}"
            )
        if not self._waiting:
            return
        waiting, _ = next(iter(self._waiting.values()))  # all who wait are at the same collective
        if waiting.kind != arrival.kind:
            cls = ShapeError if waiting.kind[0] == arrival.kind[0] else ProtocolError
            raise cls(
                f"worker {arrival.worker} comes to {_words(arrival)}, "
                f"but worker {waiting.worker} is at {_words(waiting)}"
            )

    def _forget(self) -> None:
        size = sum(value.nbytes for value in self.results.values())
        while size > _KEPT_RESULTS and len(self.results) > 1:
            size -= self.results.pop(min(self.results)).nbytes


def _combine(arrivals: list[Arrival]) -> Array | None:
    """Reduce the values of all workers, or return None at a barrier.

    Values are combined by ascending worker number, so a floating-point sum is the same whoever arrives first.
    """
    total = arrivals[0].value
    for arrival in arrivals[1:]:
        if total is not None and arrival.value is not None:
            total = REDUCTIONS[arrival.mode](total, arrival.value)
    return total


def _check_switch(arrival: Arrival) -> None:
    value = arrival.value
    if arrival.mode != SWITCH or value is None:
        return
    if read_change(value)[0] is None:
        raise ProtocolError(
            f"worker {arrival.worker} wants a change of the mode to two modes at once"
        )


def _words(arrival: Arrival) -> str:
    return " ".join(str(word) for word in arrival.kind)
