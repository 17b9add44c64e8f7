"""What server 0 keeps for the whole fleet: lives of workers, and the meetings of all of them.

Pure like the shard: events in, instructions out; a waiting call is handed back when its meeting is
complete. A meeting is a barrier, or a reduction to which every worker brings an array.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import (
    ConfigError,
    DeadlineExceeded,
    Fenced,
    Gap,
    NotReady,
    ProtocolError,
    PsfleetError,
    ShapeError,
    UsageError,
)
from psfleet.shard.events import Call, Refuse

__all__ = [
    "Arrival",
    "Beat",
    "Coordinator",
    "Decision",
    "Left",
    "Met",
    "Orders",
    "Registered",
    "Release",
]

Array = NDArray[Any]

REDUCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
}
DTYPES = ("float32", "float64", "int32", "int64")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A worker comes to its `number`-th meeting; to a reduction it brings `value`."""

    worker: int
    incarnation: int
    number: int
    mode: str = ""
    value: Array | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be equal among the workers of one meeting, in words."""
        if self.value is None:
            return ("barrier",)
        return ("all_reduce", self.mode, self.value.dtype.name, self.value.shape)


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life of a worker (of its life `incarnation`) or of a server.

    `step`: of a worker the last one it has started, of a server the last closed round.
    """

    index: int
    server: bool = False
    incarnation: int = 0
    boot: int = 0
    step: int = 0


@dataclass
class Orders:
    """What is wanted of every worker until it is withdrawn; told in answer to its beats.

    Attributes:
        snapshot: Number of the snapshot to mark, and the view in which that counts.
        drain: The mode to which the fleet changes; empty: none.
    """

    snapshot: tuple[int, int] | None = None
    drain: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """Reply to `call`: the meeting is complete, with this combination (None: a barrier)."""

    call: Call
    value: Array | None


@dataclass(frozen=True, slots=True)
class Registered:
    """A worker process begins a life."""

    worker: int
    boot: int


@dataclass(frozen=True, slots=True)
class Met:
    """A meeting is complete: of each of its workers the meeting's number, and what it has given."""

    numbers: dict[int, int]
    value: Array | None


@dataclass(frozen=True, slots=True)
class Left:
    """A worker comes to no more meetings."""

    worker: int
    incarnation: int


Decision = Registered | Met | Left
"""What changes a coordinator for good."""


@dataclass
class _Seat:
    """One worker's seat: its present life and the last meeting of it."""

    incarnation: int = 0
    boot: int = -1
    earlier: set[int] = field(default_factory=set)
    met: int = 0
    left: bool = False


class Coordinator:
    """Lives and meetings of a fleet of `workers` workers. One thread at a time.

    Attributes:
        journal: Gets every decision before it takes effect; None: nothing is kept.
        orders: What is wanted of workers; whoever wants something sets it.
        beats: The last one of each worker (False, seat) and server (True, index), and when it came.
    """

    def __init__(self, workers: int) -> None:
        self.orders = Orders()
        self.view = 0
        self.beats: dict[tuple[bool, int], tuple[Beat, float]] = {}
        self.seats = [_Seat() for _ in range(workers)]
        self._lives = 0
        self._waiting: dict[int, tuple[Arrival, list[Call]]] = {}
        self._result: Array | None = None
        self.journal: Callable[[Decision], None] | None = None

    def register(self, worker: int, boot: int, workers: int) -> int:
        """The life (incarnation) of a worker process that has started as number `boot`.

        Raises:
            ConfigError: The worker believes in another fleet.
            Fenced: A later process has taken the seat.
        """
        if workers != len(self.seats):
            raise ConfigError(
                f"worker {worker} believes in {workers} workers, "
                f"the servers were started for {len(self.seats)}"
            )
        seat = self._seat(worker)
        if boot in seat.earlier:
            raise Fenced(f"a later process has taken the seat of worker {worker}")
        if boot != seat.boot:
            self._decide(Registered(worker, boot))
        return seat.incarnation

    def arrive(self, arrival: Arrival, call: Call) -> list[Release | Refuse]:
        """Take a worker to its meeting; releases everybody when it was the last one."""
        try:
            seat = self._admit(arrival.worker, arrival.incarnation)
            if arrival.number == seat.met:
                return [Release(call, self._result)]
            if arrival.number != seat.met + 1:
                raise Gap(
                    f"worker {arrival.worker} comes to meeting {arrival.number}, "
                    f"its last one was {seat.met}"
                )
            self._check(arrival)
        except PsfleetError as error:
            return [Refuse(call, error)]
        self._waiting.setdefault(arrival.worker, (arrival, []))[1].append(call)
        return self._complete()

    def leave(self, worker: int, incarnation: int) -> list[Release | Refuse]:
        """The worker comes to no more meetings."""
        seat = self._seat(worker)
        if seat.incarnation == incarnation and not seat.left:
            self._decide(Left(worker, incarnation))
        return self._complete()

    def beat(self, beat: Beat, at: float) -> Orders:
        """Note a sign of life that came at time `at`; what is wanted of whoever gave it.

        Raises:
            Fenced: This life of the worker is over.
        """
        if not beat.server:
            self._admit(beat.index, beat.incarnation)
        self.beats[beat.server, beat.index] = (beat, at)
        return Orders() if beat.server else self.orders

    def _decide(self, decision: Decision) -> None:
        if self.journal is not None:
            self.journal(decision)
        self.replay(decision)

    def replay(self, decision: Decision) -> None:
        """Let a decision, perhaps one of an earlier process, take effect."""
        match decision:
            case Registered(worker, boot):
                self._lives += 1
                self._waiting.pop(worker, None)
                seat = self._seat(worker)
                seat.earlier.add(seat.boot)
                seat.boot, seat.incarnation, seat.met, seat.left = boot, self._lives, 0, False
            case Met(numbers, value):
                self._result = value
                for worker, number in numbers.items():
                    self._seat(worker).met = number
            case Left(worker, _):
                self._seat(worker).left = True

    def expire(self, call: Call) -> list[Release | Refuse]:
        """The deadline of a waiting call has passed. Its worker stays arrived."""
        for arrival, calls in self._waiting.values():
            if call in calls:
                calls.remove(call)
                waited = ", ".join(f"worker {index}" for index in self._missing())
                return [
                    Refuse(
                        call,
                        DeadlineExceeded(
                            f"{arrival.kind[0]} {arrival.number} of worker {arrival.worker} "
                            f"did not end in time: it waits for {waited}"
                        ),
                    )
                ]
        return []

    def _seat(self, worker: int) -> _Seat:
        if worker >= len(self.seats):
            raise ConfigError(
                f"worker {worker} is unknown; the fleet has workers 0 to {len(self.seats) - 1}"
            )
        return self.seats[worker]

    def _admit(self, worker: int, incarnation: int) -> _Seat:
        seat = self._seat(worker)
        if incarnation > seat.incarnation or seat.incarnation == 0:
            raise NotReady(f"life {incarnation} of worker {worker} has not registered")
        if incarnation < seat.incarnation:
            raise Fenced(
                f"life {incarnation} of worker {worker} is over; life {seat.incarnation} has begun"
            )
        return seat

    def _check(self, arrival: Arrival) -> None:
        if arrival.value is not None and arrival.mode not in REDUCTIONS:
            raise UsageError(f"all_reduce mode is {arrival.mode!r}; it must be sum, max or min")
        for other, _ in self._waiting.values():
            if other.kind == arrival.kind:
                continue
            cls = ShapeError if other.kind[0] == arrival.kind[0] else ProtocolError
            raise cls(
                f"worker {arrival.worker} comes to {_words(arrival)}, "
                f"but worker {other.worker} is at {_words(other)}"
            )

    def _missing(self) -> list[int]:
        return [
            index
            for index, seat in enumerate(self.seats)
            if not seat.left and index not in self._waiting
        ]

    def _complete(self) -> list[Release | Refuse]:
        if not self._waiting or self._missing():
            return []
        arrivals = [self._waiting[worker] for worker in sorted(self._waiting)]
        numbers = {arrival.worker: arrival.number for arrival, _ in arrivals}
        self._decide(Met(numbers, _combine([arrival for arrival, _ in arrivals])))
        self._waiting.clear()
        return [Release(call, self._result) for _, calls in arrivals for call in calls]


def _combine(arrivals: list[Arrival]) -> Array | None:
    """The values combined in worker order; None for a barrier."""
    total = arrivals[0].value
    for arrival in arrivals[1:]:
        if total is not None and arrival.value is not None:
            total = REDUCTIONS[arrival.mode](total, arrival.value)
    return total


def _words(arrival: Arrival) -> str:
    return " ".join(str(word) for word in arrival.kind)
